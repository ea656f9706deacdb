"""Reference of `kernels.ordered_sum` in plain torch."""

from __future__ import annotations

from torch import Tensor


def ordered_sum(part_GTE: Tensor, out_TE: Tensor) -> None:
    """See `kernels.ordered_sum.ordered_sum`."""
    while len(part_GTE) > 1:
        part_GTE = part_GTE[0::2] + part_GTE[1::2]
    out_TE.copy_(part_GTE[0])
