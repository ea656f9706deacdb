"""The experts of a few tokens with weights of four bits between pending norms, on Hopper: what the small-batch path
launches.

The tokens' division by their root mean square is done by gate and up, and the sum over a token's experts is spread over
programs for some features each, which leave the next norm pending. The shared experts may stand between the choice and
`add`: then every program of gate and up asks for its first weights while they are still at work.

Shape legend: T tokens, K experts per token, X experts, E features, F = 2 I, I intermediate features of one expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
import triton
from torch import Tensor

from kernels import pending_norm
from kernels.matrix import FourBits, Matrix
from kernels.moe import kernel, reference, scaled_launch, schedule
from kernels.moe.launch import ExpertLaunches
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, Workspace
from kernels.pending_norm import PendingNorm

if TYPE_CHECKING:
    from collections.abc import Callable

SUMMED = 256
"""Features of a program that sums up: a warp's, 16 bytes of a result a lane."""


def takes(shape: ExpertsShape) -> bool:
    """Whether there are kernels for a call with weights of four bits."""
    return bool(shape.hopper) and (shape.for_four_bit_alone or shape.for_four_bit_tiles)


@dataclass(frozen=True)
class PendingExperts:
    """One call: `sort` behind the choice of experts, then `add`, with other launches between them or without. Both
    allocate nothing on the device and wait for nothing."""

    x: PendingNorm
    id_TK: Tensor
    """int64, -1 for what is no work; see `kernels.moe.route`."""
    weight_TK: Tensor
    """fp32."""
    gate_up_XFE: Matrix
    down_XEI: Matrix
    launches: ExpertLaunches | None
    """Launches on a GPU; None on a CPU."""

    @staticmethod
    def of(
        x: PendingNorm,
        id_TK: Tensor,
        weight_TK: Tensor,
        gate_up_XFE: Matrix,
        down_XEI: Matrix,
        shape: ExpertsShape,
        empty: Callable[..., Tensor],
        *,
        dependent: bool = False,
    ) -> PendingExperts:
        """`shape`: see `kernels.moe.experts_shape`; ValueError on a GPU for one that `takes` says no of.
        `empty(*shape, dtype=...)` gives memory. `dependent`: programmatic dependent launch."""
        if not x.x_TE.is_cuda:
            return PendingExperts(x, id_TK, weight_TK, gate_up_XFE, down_XEI, None)
        if not takes(shape):
            raise ValueError(f"no kernel for experts behind a pending norm takes {shape}")
        tiling = schedule.tiling(shape, (stored(gate_up_XFE), stored(down_XEI)))
        scratch = Workspace.over(empty(Workspace.bytes(shape, tiling), dtype=torch.uint8), shape, tiling)
        # Its sort and its sizes alone are used: what it calls its output is nobody's.
        tensors = (x.x_TE, id_TK, weight_TK, gate_up_XFE, down_XEI, x.x_TE)
        launches = ExpertLaunches(*tensors, scratch, shape, tiling, dependent)
        return PendingExperts(x, id_TK, weight_TK, gate_up_XFE, down_XEI, launches)

    def sort(self) -> None:
        """Sort the pairs, if there are several tokens."""
        if self.launches is not None and self.launches.tiling.rows:
            self.launches.sort()

    def add(
        self, before_TE: Tensor | None, norm_E: Tensor, out: PendingNorm | Tensor, *, settled: bool = False
    ) -> None:
        """before (fp32) += sum over k of weight * expert(norm(x)), and `out` = its pending norm of weight `norm_E`; or,
        for a tensor, `out` = that sum, which may be without anything before, rounded once.

        `settled`: of the launches since `sort`, also where that launches nothing, one at least lets its successor start
        after its own wait only (`kernels.linear.gated_linear`, not early)."""
        if isinstance(out, PendingNorm) and before_TE is None:
            raise ValueError("a pending norm is of a sum onto what was before")
        if self.launches is None:
            sum_TE = torch.empty_like(self.x.x_TE, dtype=torch.float32)
            x_TE = pending_norm.normed(self.x)
            reference.experts_grouped(x_TE, self.id_TK, self.weight_TK, self.gate_up_XFE, self.down_XEI, sum_TE)
            if before_TE is not None:
                sum_TE += before_TE
            if isinstance(out, PendingNorm):
                assert before_TE is not None  # as was checked
                pending_norm.write(before_TE.copy_(sum_TE), norm_E, out)
            else:
                out.copy_(sum_TE)
            return
        self._products(self.launches, settled)
        self._combine(self.launches, before_TE, norm_E, out)

    def _products(self, call: ExpertLaunches, settled: bool) -> None:
        gate_up, down, scratch = cast(FourBits, self.gate_up_XFE), cast(FourBits, self.down_XEI), call.scratch
        act_YI, part_YE = scratch.act_YI, scratch.partial_YGE[:, 0]
        how = call.shape, call.tiling, call.dependent
        if call.tiling.rows:
            scaled_launch.four_bit_tiled(self.x, gate_up, act_YI, scratch, *how, settled=settled)
            scaled_launch.four_bit_tiled(act_YI, down, part_YE, scratch, *how, settled=True)
        else:
            scaled_launch.four_bit_singly(self.x, self.id_TK, gate_up, act_YI, *how, settled=settled)
            scaled_launch.four_bit_singly(act_YI, self.id_TK, down, part_YE, *how, settled=True)

    def _combine(
        self, call: ExpertLaunches, before_TE: Tensor | None, norm_E: Tensor, out: PendingNorm | Tensor
    ) -> None:
        pending = isinstance(out, PendingNorm)
        out_TE = out.x_TE if isinstance(out, PendingNorm) else out
        hidden = call.shape.hidden
        kernel.combine_pending[(call.shape.tokens, triton.cdiv(hidden, SUMMED))](
            call.scratch.partial_YGE,
            self.id_TK,
            self.weight_TK,
            out_TE if before_TE is None else before_TE,
            norm_E,
            out_TE,
            out.square_TP if isinstance(out, PendingNorm) else out_TE,
            BEFORE_STRIDE=0 if before_TE is None else before_TE.stride(0),
            OUT_STRIDE=out_TE.stride(0),
            COLUMNS=call.shape.chosen,
            EXPERTS=call.shape.experts,
            FEATURES=hidden,
            ADD=before_TE is not None,
            PENDING=pending,
            **call.sums(SUMMED),
        )
