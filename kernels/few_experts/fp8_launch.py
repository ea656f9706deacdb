"""Launches the experts of a few tokens in FP8 on Hopper. Allocates nothing and waits for nothing, so it may be
captured. `dependent`: as in `launch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import triton
from torch import Tensor

from kernels.few_experts.records import Choices, Sum
from kernels.fp16_scaled import Fp16Scaled
from kernels.gluon.stored import stored
from kernels.gluon.tiles import ROWS
from kernels.linear.fp8_launch import BLOCK, box, kept_stages, ring_of, warps_of
from kernels.linear.launch import pieces
from kernels.linear.records import Size
from kernels.matrix import BlockScaled
from kernels.pending_norm import PendingNorm
from kernels.runtime.hopper import multiprocessors

if TYPE_CHECKING:
    from kernels.few_experts import ChosenExperts

SHORT_EXPERTS: Final = 256
"""Most features of an expert for `down_short`, which has two warps for them. Of 512 it took longer than `down` on an
H200: a step of two rows of six layers of DeepSeek-V3, as a rank of four has them, 0.731 ms in place of 0.720."""
BESIDE_FEATURES: Final = 4096
"""Most features of one token of which a multiprocessor has two programs of `gate_up`, of BESIDE_STAGES stages each: one
multiplies while the other waits for its warps' sums. Of more it has one program. (One of six stages would leave room
for a second here: one multiprocessor might have two and another none.) With two, the kernel took 22.3 us a layer of
Mistral Small 4 in place of 34.5 on an H200 (`python bench/decode_step.py --shape small4-slice --rows 1 --timeline`)."""
BESIDE_STAGES: Final = 4
"""Stages of such a program's ring. With 4096 features they are so many that a third program finds no room, and programs
are dealt out evenly."""
SHORT_STAGES: Final = 6
"""Stages of the ring of `down_short`, each an expert: as many bytes are in flight as memory takes to answer, and the
programs of all rows are resident at once."""


def gate_up(
    x: PendingNorm,
    choice: ChosenExperts,
    shared: int,
    weight_XFE: BlockScaled,
    act_YI: Tensor,
    *,
    dependent: bool = False,
) -> None:
    """Launch the first half of `kernels.few_experts.experts`."""
    from kernels.few_experts import fp8  # a machine without Hopper GPUs need not have Gluon

    (tokens, features), intermediate, half = x.x_TE.shape, act_YI.shape[1], ROWS // 2
    warps = warps_of(features, 8)
    beside, stages = gate_up_ring(tokens, features)
    programs = min((shared + choice.slots) * triton.cdiv(intermediate, half), beside * multiprocessors(x.x_TE.device))
    fp8.gate_up[(programs,)](
        x.x_TE,
        x.square_TP,
        box(
            weight_XFE.data,
            [weight_XFE.shape[0], features // BLOCK, 2, intermediate, BLOCK],
            [2 * intermediate * features, BLOCK, intermediate * features, features, 1],
            [1, warps, 2, half, BLOCK],
        ),
        weight_XFE.scales,
        choice.slot_S,
        choice.place_TX,
        choice.weight_TK,
        act_YI,
        tokens,
        choice.slots,
        x.eps,
        STORED=stored(weight_XFE)[2],
        SIZE=Size(intermediate, features),
        CHOICES=Choices(choice.experts, shared, choice.weight_TK.shape[1]),
        X_STRIDE=x.x_TE.stride(0),
        NORM=pieces(x),
        **ring_of(tokens, warps, stages, dependent),
    )


def gate_up_ring(tokens: int, features: int) -> tuple[int, int]:
    """Programs of `gate_up` on a multiprocessor, and stages of each."""
    if tokens == 1 and features <= BESIDE_FEATURES:
        return 2, BESIDE_STAGES
    return 1, kept_stages(tokens, features)


def short(intermediate: int) -> bool:
    """Whether `down_short` serves experts of so many features."""
    return intermediate in (BLOCK, SHORT_EXPERTS)


def down_ring(tokens: int, intermediate: int) -> tuple[int, int]:
    """Warps and stages of `down`. (One token and long experts have `fp8_even`.)"""
    return (warps_of(intermediate, 8), 3) if tokens > 1 else (warps_of(intermediate, 4), 6)


def down(
    act: Fp16Scaled,
    choice: ChosenExperts,
    shared: int,
    weight_XEI: BlockScaled,
    out_TE: Tensor,
    residual_TE: Tensor | None = None,
    norm_E: Tensor | None = None,
    square_TP: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """Launch the second half of `kernels.few_experts.experts`."""
    from kernels.few_experts import fp8, fp8_short

    (tokens, features), intermediate = out_TE.shape, act.fp16_TF.shape[1]
    data, scales, how = stored(weight_XEI)
    grid = (triton.cdiv(features, ROWS),)
    behind = (
        scales,
        choice.slot_S,
        choice.place_TX,
        out_TE if residual_TE is None else residual_TE,
        out_TE if norm_E is None else norm_E,
        out_TE,
        out_TE if square_TP is None else square_TP,
        tokens,
        choice.slots,
    )
    constants = {
        "STORED": how,
        "SIZE": Size(features, intermediate),
        "CHOICES": Choices(choice.experts, shared, choice.weight_TK.shape[1]),
        "SUM": Sum(
            residual_TE is not None,
            0 if residual_TE is None else residual_TE.stride(0),
            out_TE.stride(0),
            1 if square_TP is None else square_TP.shape[1],
        ),
    }
    if short(intermediate):
        ring = ring_of(tokens, intermediate // BLOCK, SHORT_STAGES, dependent)
        fp8_short.down_short[grid](act.fp16_TF, act.unit_T, data, *behind, **constants, **ring)
        return
    warps, stages = down_ring(tokens, intermediate)
    weights = box(
        weight_XEI.data,
        [weight_XEI.shape[0], intermediate // BLOCK, features, BLOCK],
        [features * intermediate, BLOCK, intermediate, 1],
        [1, warps, ROWS, BLOCK],
    )
    ring = ring_of(tokens, warps, stages, dependent)
    fp8.down[grid](act.fp16_TF, act.unit_T, weights, *behind, **constants, **ring)
