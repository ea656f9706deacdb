"""How a checkpoint will store its tensors, as far as its config.json tells: for those who do not have the files yet."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

from workers.weights.stored import FP8_DTYPE, FP8_SCALES, INT4_PACKED

_FP8: Final = re.compile(r"((?<!\.eh)(?<!\.weights)_proj(_with_mqa)?|\.indexer\.w(q_b|k))\.weight$")
"""What is published in FP8: every projection but that of the draft layer's inputs and of an indexer's weights."""
_INT4: Final = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")
"""What Moonshot publishes in INT4: the routed experts."""


def published_in_fp8(name: str) -> bool:
    """Whether checkpoints in FP8 store this matrix so."""
    return _FP8.search(name) is not None


def assumed_dtypes(method: str | None) -> Callable[[str], str | None]:
    """The dtype of a tensor by its name, in safetensors' words, in checkpoints with this `quant_method`, which
    `workers.quantization` supports; None: there is no such tensor."""

    def dtype_of(name: str) -> str | None:
        if name.endswith(INT4_PACKED):
            return "I32" if method == "compressed-tensors" and _INT4.search(name.removesuffix(INT4_PACKED)) else None
        if name.endswith(FP8_SCALES):
            return "F32" if method == "fp8" and published_in_fp8(name.removesuffix(FP8_SCALES)) else None
        if method == "compressed-tensors" and _INT4.search(name):
            return None
        return FP8_DTYPE if method == "fp8" and published_in_fp8(name) else "BF16"

    return dtype_of
