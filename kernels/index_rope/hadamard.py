"""Queries and keys of an indexer, turned so that no feature is much larger than the others: what has one scale for all
its features then loses less when it is rounded to INT8. As both are turned alike, their products do not change.

Features come in groups, each as large as the largest power of two that divides their number: of 128 there is one.
Within a group of G features

    out[i] = sum over n of (-1) ** popcount(n & i) * x[n] / sqrt(G)

which is a product with a Hadamard matrix (Sylvester, 1867). It takes log2(G) stages of sums and differences of two
numbers each. DeepSeek-V3.2's published inference code turns queries and keys so, too, before it rounds them.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_WIDTH = tl.constexpr(16)
_WIDTH_STAGES = tl.constexpr(4)
"""Features side by side, whose stages take place within a thread. A group has no fewer."""


def stages_of(features: int) -> int:
    """log2(G)."""
    return (features & -features).bit_length() - 1


def spread(x: Tensor) -> Tensor:
    """The reference: of the last dimension of `x`, in fp32. Sums are the kernel's, in the same order."""
    stages = stages_of(x.shape[-1])
    turned = x.float()
    for stage in range(stages):
        even, odd = turned.reshape(-1, 2, 1 << stage).unbind(1)
        turned = torch.stack([even + odd, even - odd], 1)
    return turned.reshape(x.shape).mul(2.0 ** (-0.5 * stages))


@triton.jit
def spread_lanes(x, STAGES: tl.constexpr):
    """Variant of `spread` for [rows, lanes], lanes being a power of two, with 0 behind the features."""
    ROWS: tl.constexpr = x.shape[0]
    LANES: tl.constexpr = x.shape[1]
    HEIGHT: tl.constexpr = LANES // _WIDTH
    x = tl.reshape(x, [ROWS * HEIGHT, _WIDTH])
    for _ in tl.static_range(_WIDTH_STAGES):
        # Sums come before differences, so that behind the last stage all are where they belong.
        even, odd = tl.split(tl.reshape(x, [ROWS * HEIGHT, _WIDTH // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), [ROWS * HEIGHT, _WIDTH])
    x = tl.reshape(x, [ROWS, HEIGHT, _WIDTH])
    h = tl.broadcast_to(tl.arange(0, HEIGHT)[None, :, None], [ROWS, HEIGHT, _WIDTH])
    for stage in tl.static_range(STAGES - _WIDTH_STAGES):
        other = tl.gather(x, h ^ (1 << stage), 1)
        x = other + tl.where((h >> stage) & 1 == 1, -x, x)
    return tl.reshape(x, [ROWS, LANES]) * (2.0 ** (-0.5 * STAGES))
