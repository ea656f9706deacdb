"""How a rank multiplies: the products of all layers and their sums over ranks. Layers ask one object and know no mode.

Shape legend: T tokens, E hidden features, F output features, H heads of this rank, N / L features of a head, I
intermediate features of this rank, X experts, K experts per token, G groups of this rank, R ranks, P parts of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels import moe
from kernels.dependent import launches_dependently
from kernels.head_linear import head_linear
from kernels.linear import MOST_STREAMED, grouped_linear, linear, part_linear, parts_of
from kernels.moe import AddNorm
from kernels.ordered_sum import ordered_sum
from kernels.rms_norm import add_rms_norm
from workers.memory.scratch import Scratch
from workers.parallel.group import TensorParallel
from workers.weights.weight import Weight

GROUPS: Final = 8
"""Parts of every sum over ranks in invariant mode, all ranks together; so many ranks at most."""
MOST_DEPENDENT: Final = 512
"""Most tokens whose small kernels are launched dependently."""
ROUTER_PARTS: Final = 16
"""Parts of the sums of few tokens' router logits."""
PART_BYTES: Final = 1 << 29
"""Most bytes of experts' parts at once in invariant mode; more tokens take turns."""


@dataclass(frozen=True)
class Mixture:
    """What a mixture computes for its tokens, this rank's share of the intermediate features."""

    id_TK: Tensor
    weight_TK: Tensor
    gate_up_XFE: Weight
    down_XEI: Weight
    shared: int = 0
    """The last so many experts are those of every token, as its last choices."""


class Products:
    """Every product in the way that is fastest for its number of tokens."""

    invariant = False
    """Whether a token's bits are the same in any batch, at any width and on any number of ranks."""

    def __init__(self, group: TensorParallel) -> None:
        self.group = group

    def parts(self, tokens: int, weight_FE: Weight) -> int:
        """Parts in which products of decode rows' tokens with this rank's matrix are left for the kernel behind to add
        up, 0 where they are summed at once: cuBLAS's kernels, which start late and read nothing early, take longer than
        that costs."""
        return 0 if self.invariant or self.group.size > 1 else parts_of(tokens, weight_FE.plain)

    def part_linear(self, x_TE: Tensor, weight_FE: Weight, out_TPF: Tensor) -> None:
        """Parts of x · weight^T, as many as `parts` says."""
        part_linear(x_TE, weight_FE.plain, out_TPF, dependent=launches_dependently(x_TE.device))

    def add_norm(self, x_TE: Tensor, norm: AddNorm, out_TE: Tensor) -> None:
        """residual += x, out = rms_norm(residual), of what a sum over ranks or `part_linear` has left; `out_TE` may be
        `x_TE`."""
        # Behind many tokens' kernels a launch costs nothing, and behind a collective it is a plain one.
        dependent = x_TE.shape[0] <= MOST_DEPENDENT and self.group.size == 1 and launches_dependently(x_TE.device)
        add_rms_norm(x_TE, norm.residual_TE, norm.weight_E, out_TE, eps=norm.eps, dependent=dependent)

    def linear(self, x_TE: Tensor, weight_FE: Weight, out_TF: Tensor, *, dependent: bool = False) -> None:
        """out = x · weight^T; this rank's rows of the weight give its columns of the output."""
        linear(x_TE, weight_FE.plain, out_TF, dependent=dependent)

    def head_linear(self, x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor) -> None:
        """out[t, h] = x[t, h] · weight[h]."""
        head_linear(x_THN, weight_HNL, out_THL)

    def router(self, x_TE: Tensor, weight_XE: Weight, scratch: Scratch) -> Tensor:
        """Router logits in fp32, [T, X], or parts of them [T, P, X]; the same on every rank."""
        (tokens, hidden), experts = x_TE.shape, weight_XE.shape[0]
        if (
            not self.invariant
            and MOST_STREAMED < tokens <= MOST_DEPENDENT
            and x_TE.is_cuda
            and x_TE.dtype.itemsize == 2
            and hidden % (16 * ROUTER_PARTS) == 0
        ):
            # So few outputs are the work of a few multiprocessors, unless they share the sums.
            part_TPX = scratch.empty(tokens, ROUTER_PARTS, experts, dtype=torch.float32)
            dependent = launches_dependently(x_TE.device)
            grouped_linear(x_TE, weight_XE.plain, part_TPX, invariant=False, dependent=dependent)
            return part_TPX
        logit_TX = scratch.empty(tokens, experts, dtype=torch.float32)
        self.linear(x_TE, weight_XE, logit_TX)
        return logit_TX

    def summed(self, x_TI: Tensor, weight_EI: Weight, out_TE: Tensor, scratch: Scratch) -> None:
        """out = x · weight^T, summed over ranks."""
        part_TE = self.group.part(out_TE)
        linear(x_TI, weight_EI.plain, part_TE)
        self.group.all_reduce(part_TE, out_TE)

    def experts(self, x_TE: Tensor, mixture: Mixture, norm: AddNorm, out_TE: Tensor, scratch: Scratch) -> None:
        """residual += the weighted sum of a token's experts, summed over ranks; out = rms_norm(residual)."""
        part_TE, workspace = self.group.part(out_TE), None
        if x_TE.is_cuda:
            shape = moe.experts_shape(x_TE, mixture.id_TK, mixture.down_XEI.plain, shared=mixture.shared)
            workspace = scratch.empty(moe.workspace_bytes(shape), dtype=torch.uint8)
        choice, weights = (mixture.id_TK, mixture.weight_TK), (mixture.gate_up_XFE.plain, mixture.down_XEI.plain)
        # Few tokens' kernels are so short that the gaps between them count; they stand side by side.
        dependent = launches_dependently(x_TE.device)
        alone = self.group.size == 1
        moe.experts(
            x_TE,
            *choice,
            *weights,
            part_TE,
            shared=mixture.shared,
            add_norm=norm if alone else None,
            workspace=workspace,
            dependent=dependent,
        )
        if not alone:
            self.group.all_reduce(part_TE, out_TE)
            self.add_norm(out_TE, norm, out_TE)


class InvariantProducts(Products):
    """Every product in one way, whatever it is computed with.

    A sum over ranks is a sum over 8 groups of input features (the largest power of two that divides them, if that is
    less), each summed in fp32, then added up as a balanced binary tree. A rank has neighbouring groups, which are a
    subtree: so the tree is the same for 1, 2, 4 and 8 ranks.
    """

    invariant = True

    def __init__(self, group: TensorParallel) -> None:
        if group.size not in (1, 2, 4, 8):
            raise ValueError(
                f"invariant mode has one order of sums for 1, 2, 4 and 8 ranks; tensor_parallel = {group.size} is none "
                "of them"
            )
        super().__init__(group)

    def linear(self, x_TE: Tensor, weight_FE: Weight, out_TF: Tensor, *, dependent: bool = False) -> None:
        """As in `Products`."""
        linear(x_TE, weight_FE.plain, out_TF, invariant=True, dependent=dependent)

    def head_linear(self, x_THN: Tensor, weight_HNL: Tensor, out_THL: Tensor) -> None:
        """As in `Products`."""
        head_linear(x_THN, weight_HNL, out_THL, invariant=True)

    def summed(self, x_TI: Tensor, weight_EI: Weight, out_TE: Tensor, scratch: Scratch) -> None:
        """As in `Products`."""
        with scratch.scope():
            part_TGE = self._parts(x_TI.shape[0], self._groups(x_TI.shape[1]), out_TE.shape[1], scratch)
            grouped_linear(x_TI, weight_EI.plain, part_TGE)
            self._sum(part_TGE, out_TE, scratch)

    def experts(self, x_TE: Tensor, mixture: Mixture, norm: AddNorm, out_TE: Tensor, scratch: Scratch) -> None:
        """As in `Products`; a group's sum has the token's experts in the order of its choice, the shared ones last."""
        groups = self._groups(mixture.down_XEI.shape[2])
        tokens, hidden = x_TE.shape
        step = max(1, PART_BYTES // (mixture.id_TK.shape[1] * groups * hidden * 4))
        for begin in range(0, tokens, step):
            part = slice(begin, begin + step)
            with scratch.scope():
                id_TK, weight_TK = mixture.id_TK[part], mixture.weight_TK[part]
                weights, workspace = (mixture.gate_up_XFE.plain, mixture.down_XEI.plain), None
                if x_TE.is_cuda:
                    size = moe.workspace_bytes(moe.experts_shape(x_TE[part], id_TK, weights[1], groups=groups))
                    workspace = scratch.empty(size, dtype=torch.uint8)
                part_TGE = self._parts(id_TK.shape[0], groups, hidden, scratch)
                part_TGE.zero_()
                moe.add_experts(x_TE[part], id_TK, weight_TK, *weights, part_TGE, workspace=workspace)
                self._sum(part_TGE, out_TE[part], scratch)
        self.add_norm(out_TE, norm, out_TE)

    def _groups(self, features: int) -> int:
        """Groups of this rank, which has `features` of the input features."""
        features, groups = features * self.group.size, GROUPS
        while features % groups:
            groups //= 2
        return groups // self.group.size

    @staticmethod
    def _parts(tokens: int, groups: int, features: int, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, groups, features, dtype=torch.float32)

    def _sum(self, part_TGE: Tensor, out_TE: Tensor, scratch: Scratch) -> None:
        """The tree: this rank's groups, then the ranks."""
        part_GTE, ranks = part_TGE.transpose(0, 1), self.group.size
        if ranks == 1:
            ordered_sum(part_GTE, out_TE)
            return
        own_TE = scratch.empty(*out_TE.shape, dtype=torch.float32)
        ordered_sum(part_GTE, own_TE)
        self.group.ordered_sum(own_TE, scratch.empty(ranks, *out_TE.shape, dtype=torch.float32), out_TE)
