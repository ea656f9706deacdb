"""The tokenizers of transformers, imported without torch.

Versions before 5.19 import torch with them, for what reads GGUF files, as which no folder here has its tokenizer. That
takes a second, and more memory than all the rest of a front, in each process that reads a tokenizer.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from typing import Final

from workers.unimported import unimported

_READS_GGUF: Final = "transformers.modeling_gguf_pytorch_utils"

with nullcontext() if "torch" in sys.modules else unimported(_READS_GGUF):
    from transformers import PreTrainedTokenizerFast

__all__ = ["PreTrainedTokenizerFast"]
