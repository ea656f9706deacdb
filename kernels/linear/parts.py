"""Split-K products of some tokens, which leave parts of their sums, and their launch.

Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.linear.launch import options

MOST_TOKENS: Final = 64
"""Most tokens of a product in parts: the rows of its matrix instruction."""
MOST_PARTS: Final = 8
"""Most parts: more would cost the kernel that adds them up more than they bring."""
MOST_BYTES: Final = 192 * 1024
"""Most bytes of a program's shared memory for tokens and weights; small kernels that start early should find room
beside it."""
_STEP: Final = 64
"""Input features of a stage."""


@dataclass(frozen=True)
class Cut:
    """Division of a product. It is a function of the weight's shape and the device alone: with it a token's result does
    not depend on the other tokens."""

    block: int
    """Weight rows of a program."""
    stages: int
    """Steps of 64 input features of a program."""
    parts: int

    @property
    def group(self) -> int:
        """Input features of a part; the last one's may be fewer."""
        return self.stages * _STEP

    @staticmethod
    def of(rows: int, features: int, programs: int) -> Cut | None:
        """Divide a product of `rows` output and `features` input features among `programs` that run at once. None where
        one program would need more memory than it gets. There are as few parts as possible, then as many programs."""
        steps, cuts = -(-features // _STEP), []
        for block in (64, 128):
            share = min(MOST_PARTS, programs // -(-rows // block))
            if not share:
                continue
            stages = -(-steps // share)
            if stages * (block + MOST_TOKENS) * _STEP * 2 <= MOST_BYTES:
                cuts.append(Cut(block, stages, -(-steps // stages)))
        return min(cuts, key=lambda cut: (cut.parts, cut.block), default=None)


def divisible(x_FE: Tensor) -> bool:
    """Whether the copy engine can fetch a matrix: bf16, in rows that begin at multiples of 16 bytes."""
    return (
        x_FE.dtype == torch.bfloat16 and x_FE.stride(1) == 1 and x_FE.stride(0) % 8 == 0 and x_FE.data_ptr() % 16 == 0
    )


def part_linear(x_TE: Tensor, weight_FE: Tensor, out_TPF: Tensor, cut: Cut, *, dependent: bool = False) -> None:
    from kernels.linear import hopper  # a machine without Hopper GPUs need not have Gluon

    tokens, rows = x_TE.shape[0], weight_FE.shape[0]
    if not tokens:
        return
    hopper.part_linear[(-(-rows // cut.block), cut.parts)](
        hopper.box(x_TE, MOST_TOKENS),
        hopper.box(weight_FE, cut.block),
        out_TPF,
        tokens,
        F=rows,
        OUT_TOKEN=out_TPF.stride(0),
        OUT_PART=out_TPF.stride(1),
        BLOCK=cut.block,
        STAGES=cut.stages,
        DEPENDENT=dependent,
        num_warps=4,
        **options(dependent),
    )
