"""Output heads, whose rows the ranks along `heads` share: those that have the same hidden states.

Shape legend: Y rows of a rank, E hidden features.
"""

from __future__ import annotations

import torch

from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


def load_head(source: WeightSource, name: str, vocab: int, hidden: int, dtype: torch.dtype | None = None) -> Weight:
    """Load this rank's rows of head `name`, [Y, E]; the last ranks' are padded with zeros. `dtype`: the model's where
    none is given."""
    share, rows = source.mesh.heads.padded_share(vocab)
    head_YE = source.zeros(share, hidden, dtype=dtype)
    source.fill(Weight(head_YE[: rows.stop - rows.start]), Part(name, vocab, hidden, own=rows))
    return Weight(head_YE)
