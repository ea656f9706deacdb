"""The deterministic path: the bits of a token do not depend on the batch, the width or the number of ranks.

Shape legend: T tokens, E hidden features, F output features, I intermediate features of this rank, X experts, K experts
per token, G groups of this rank, R ranks.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels import moe
from kernels.linear import grouped_linear, linear
from kernels.ordered_sum import ordered_sum
from kernels.rms_norm import AddNorm
from kernels.runtime.ahead import distinct
from workers.memory.scratch import Scratch
from workers.models.general import GeneralOps, Rows, dependent, plain, tensor_of
from workers.models.layer_ops import Gated, Mixture
from workers.parallel.group import Group
from workers.parallel.mesh import INVARIANT_RANKS
from workers.weights.weight import Weight

GROUPS: Final = 8
"""Parts of every sum over ranks, all ranks together; so many ranks at most."""
PART_BYTES: Final = 1 << 29
"""Most bytes of experts' parts at once; more tokens take turns."""


class DeterministicOps(GeneralOps):
    """Every product in one way, whatever it is computed with.

    A sum over ranks is a sum over 8 groups of input features (the largest power of two that divides them, if that is
    less), each summed in fp32, then added up as a balanced binary tree. A rank has neighbouring groups, which are a
    subtree: so the tree is the same for 1, 2, 4 and 8 ranks.
    """

    invariant = True

    def __init__(self, group: Group) -> None:
        if (ranks := group.summed.size) not in INVARIANT_RANKS:
            raise ValueError(
                f"invariant mode has one order of sums for 1, 2, 4 and 8 ranks; tensor_parallel = {ranks} is none "
                "of them"
            )
        super().__init__(group)

    @override
    def linear(self, x: Rows, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        x_TE = tensor_of(x)
        with scratch.scope():
            # Also of what is dequantized in the launch before: this product reads its weights after its wait.
            linear(x_TE, plain(weight_FE, x_TE.dtype, scratch), out_TF, invariant=True, dependent=dependent(x_TE))

    @override
    def router(self, x_TE: Tensor, weight_XE: Weight, scratch: Scratch) -> Tensor:
        (tokens, hidden), experts = x_TE.shape, weight_XE.shape[0]
        if x_TE.is_cuda and x_TE.dtype.itemsize == 2 and hidden % (16 * GROUPS) == 0:
            # So few outputs are the work of a few multiprocessors, unless they share the sums: of all tokens alike.
            part_TPX = self._parts(tokens, GROUPS, experts, scratch)
            grouped_linear(x_TE, weight_XE.plain, part_TPX, dependent=dependent(x_TE))
            return part_TPX
        logit_TX = scratch.empty(tokens, experts, dtype=torch.float32)
        self.linear(x_TE, weight_XE, logit_TX, scratch)
        return logit_TX

    @override
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: Rows, scratch: Scratch) -> None:
        out_TE = tensor_of(out)
        with scratch.scope():
            part_TGE = self._parts(x_TF.shape[0], self._groups(x_TF.shape[1]), out_TE.shape[1], scratch)
            # As of `linear`.
            grouped_linear(x_TF, plain(weight_EF, x_TF.dtype, scratch), part_TGE, dependent=dependent(x_TF))
            self._sum(part_TGE, out_TE, scratch)
        self.add_norm(out_TE, norm, out)

    @override
    def shared_experts(
        self, x: Rows, shared: Gated, norm: AddNorm, out: Rows, scratch: Scratch, limit: float = 0.0
    ) -> None:
        """Add the output of shared experts, which have a sum over ranks of their own, in its order.
        NotImplementedError for a `limit`, which no model with this path has."""
        if limit:
            raise NotImplementedError("shared experts that are clamped have no invariant path")
        self.add_gated(x, shared.gate_up_FE, shared.down_EI, norm.sum_alone, out, scratch)

    @override
    def experts(
        self,
        x: Rows,
        id_TK: Tensor,
        weight_TK: Tensor,
        mixture: Mixture,
        norm: AddNorm,
        out: Rows,
        scratch: Scratch,
        own_TE: Tensor | None = None,
    ) -> None:
        """Add the sum over experts, without `own_TE`; a group's sum has the token's experts in the order of its choice,
        the shared ones last."""
        gate_up_XFE, down_XEI = mixture.gate_up_XFE.matrix, mixture.down_XEI.matrix
        x_TE, out_TE, limit = tensor_of(x), tensor_of(out), mixture.routing.limit
        groups, (tokens, hidden) = self._groups(down_XEI.shape[2]), x_TE.shape
        step = max(1, PART_BYTES // (id_TK.shape[1] * groups * hidden * 4))
        for begin in distinct(range(0, tokens, step)):
            turn = slice(begin, begin + step)
            with scratch.scope():
                choice, workspace = (id_TK[turn], weight_TK[turn]), None
                if x_TE.is_cuda:
                    size = moe.workspace_bytes(moe.experts_shape(x_TE[turn], choice[0], down_XEI, groups=groups))
                    workspace = scratch.empty(size, dtype=torch.uint8)
                part_TGE = self._parts(choice[0].shape[0], groups, hidden, scratch)
                how: dict[str, Any] = {"add": False, "dependent": dependent(x_TE[turn])}
                tensors = x_TE[turn], *choice, gate_up_XFE, down_XEI, part_TGE
                moe.add_experts(*tensors, workspace=workspace, limit=limit, **how)
                self._sum(part_TGE, out_TE[turn], scratch)
        self.add_experts_sum(out, mixture, norm)

    def _groups(self, features: int) -> int:
        """Groups of this rank, which has `features` of the input features."""
        features, groups = features * self.group.summed.size, GROUPS
        while features % groups:
            groups //= 2
        return groups // self.group.summed.size

    @staticmethod
    def _parts(tokens: int, groups: int, features: int, scratch: Scratch) -> Tensor:
        return scratch.empty(tokens, groups, features, dtype=torch.float32)

    def _sum(self, part_TGE: Tensor, out_TE: Tensor, scratch: Scratch) -> None:
        """The tree: this rank's groups, then the ranks."""
        part_GTE, ranks = part_TGE.transpose(0, 1), self.group.summed.size
        if ranks == 1:
            ordered_sum(part_GTE, out_TE, dependent=dependent(out_TE))
            return
        own_TE = scratch.empty(*out_TE.shape, dtype=torch.float32)
        ordered_sum(part_GTE, own_TE)
        self.group.ordered_sum(own_TE, scratch.empty(ranks, *out_TE.shape, dtype=torch.float32), out_TE)
