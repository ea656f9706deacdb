"""Products of groups of FP8 (W8A8) activations with weights of their own, held against double precision."""

from __future__ import annotations

import torch
import w8a8_case
from torch import Tensor

from kernels.matrix import BlockScaled
from kernels.quantize import GROUP


def groups_case(
    tokens: int, groups: int, rows: int, features: int, device: str
) -> tuple[Tensor, Tensor, BlockScaled, Tensor]:
    """Rounded activations of all groups, their scales, the groups' weights, and room for the products of the groups,
    which lie apart with NaN between them."""
    number, scale, _ = w8a8_case.case(tokens, groups * features, 128, device)
    weight = w8a8_case.case(tokens + 1, features, groups * rows, device)[2]
    out = torch.full((tokens, groups, rows + 8), torch.nan, dtype=torch.bfloat16, device=device)
    return number, scale, weight, out[..., :rows]


def check(number: Tensor, scale: Tensor, weight: BlockScaled, out: Tensor) -> None:
    """Each group's products are those of its own, and nothing is written between them."""
    (_, groups, rows), features = out.shape, weight.shape[1]
    for group in range(groups):
        own, columns = slice(group * rows, (group + 1) * rows), slice(group * features, (group + 1) * features)
        scales = slice(group * features // GROUP, (group + 1) * features // GROUP)
        blocks = weight.scales[group * rows // 128 : (group + 1) * rows // 128]
        w8a8_case.check(number[:, columns], scale[:, scales], BlockScaled(weight.data[own], blocks), out[:, group])
    between = out.as_strided((out.shape[0], groups, 8), out.stride(), out.storage_offset() + rows)
    assert bool(between.isnan().all())
