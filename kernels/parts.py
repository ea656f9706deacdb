"""Sums that several programs of one kernel share: each leaves a part in fp32, the kernel behind adds them up."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def added(part_TPF: Tensor, dtype: torch.dtype) -> Tensor:
    """The parts of each token added up in their order in fp32 and rounded to `dtype`: [T, F] of [T, P, F], where more
    dimensions may follow."""
    sum_TF, *others = part_TPF.unbind(1)
    for other_TF in others:
        sum_TF = sum_TF + other_TF
    return sum_TF.to(dtype)


@triton.jit
def sum_of_parts(at, mask, STRIDE: tl.constexpr, PARTS: tl.constexpr):
    """The sum of PARTS values that lie STRIDE apart, in their order: it does not depend on which came first.

    All are on their way at once. ptxas would rather save registers: load one or two, add them up, load the next. So the
    first, which everything is added to, is read behind a barrier that the other loads come before. All threads of a
    program must get here.
    """
    others = ()
    for part in tl.static_range(1, PARTS):
        others += (tl.load(at + part * STRIDE, mask=mask, other=0.0, cache_modifier=".cg"),)
    if PARTS > 1:
        tl.debug_barrier()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    sum = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        sum += others[part - 1]
    return sum
