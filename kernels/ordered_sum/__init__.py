"""Sums of parts in an order that is stated, so that it does not matter who computed which of them.

Shape legend: G parts, T tokens, E features.
"""

from __future__ import annotations

from torch import Tensor

from kernels.ordered_sum import launch, reference


def ordered_sum(part_GTE: Tensor, out_TE: Tensor) -> None:
    """out = ((part 0 + part 1) + (part 2 + part 3)) + ..., a balanced binary tree in fp32, rounded once.

    G is a power of two (else ValueError). Equal neighbouring shares of the parts are subtrees: summed apart into fp32,
    their sums in order give the same bits. `part_GTE` is fp32, `out_TE` of any floating dtype; the features of both are
    contiguous.
    """
    parts = part_GTE.shape[0]
    if parts < 1 or parts & (parts - 1):
        raise ValueError(f"{parts} parts make no balanced tree: their number must be a power of two")
    if part_GTE.is_cuda:
        launch.ordered_sum(part_GTE, out_TE)
    else:
        reference.ordered_sum(part_GTE, out_TE)
