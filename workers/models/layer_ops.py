"""Token-wise work of layers: products with weights, norms, experts, sums over ranks.

Layers ask one object for it, and know neither a mode nor a number of tokens. There is one class for many tokens
(`general`), one for few (`small_batch`) and one whose bits are always the same (`invariant`); `execution_paths` chooses
one for each pass.

Shape legend: T tokens, E hidden features, F output features, I intermediate features of this rank, X experts (in
weights the shared ones behind the others), A features of a norm, P parts of a sum, Y rows of a table, R features of a
norm's gate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from kernels.rms_norm import AddNorm
from workers.memory.scratch import Scratch
from workers.models.choices import Choices
from workers.models.config import Routing
from workers.parallel.group import Group
from workers.weights.weight import Weight

N = TypeVar("N")
"""Tokens' features behind a norm, as a path keeps them: layers hand them on and do not look inside."""


@dataclass(frozen=True)
class Gated:
    """The weights of down · (silu(gate · x) * (up · x)), this rank's share of the intermediate features."""

    gate_up_FE: Weight
    """The gate rows, then the up rows."""
    down_EI: Weight


@dataclass(frozen=True)
class Mixture:
    """The weights of a mixture of experts, this rank's share of the intermediate features."""

    routing: Routing
    router_XE: Weight
    """Router's rows for the experts that tokens choose from."""
    bias_X: Tensor | None
    """fp32."""
    gate_up_XFE: Weight
    """For each expert, its gate rows, then its up rows."""
    down_XEI: Weight
    shared: Gated | None = None
    """The shared experts where they are a network of their own; else they are behind the others."""
    norm_E: Tensor | None = None
    """Weight of a norm of the sum of all experts, shared ones included, before it is added to the residual stream.
    Where there is one, the shared experts are behind the others. The small-batch path has none."""


@dataclass(frozen=True)
class NormGate:
    """The weights of a norm's gate: y = x * sigmoid(up · silu(down · x)), of a norm x of the residual stream. Every
    rank has all of them. The small-batch path has none."""

    down_RE: Weight
    """Plain."""
    up_ER: Weight
    """Plain."""


class LayerOps(ABC, Generic[N]):
    """An execution path: computes what is token-wise. Memory comes from `scratch`, results are the same on every rank.

    AddNorm names a residual stream, the weights of the norm that is read next, and its epsilon.
    """

    group: Group
    """Group for sums over ranks: attention's along the heads, those of feed-forward parts along the experts."""
    choices: Choices | None = None
    """Receives every choice of experts; None unless passes are compared."""
    decode_alone = False
    """Whether it is for passes of decode rows alone whose attention reads queries and latents neither roped nor normed,
    and writes the cache itself: see `Entering`."""
    invariant = False
    """Whether a token's bits are the same in any batch."""

    @abstractmethod
    def allocate_residual(self, tokens: int, hidden: int, dtype: torch.dtype, scratch: Scratch) -> Tensor:
        """Memory for a residual stream, [T, E], of a model in `dtype`."""

    @abstractmethod
    def allocate_normed(self, tokens: int, hidden: int, dtype: torch.dtype, eps: float, scratch: Scratch) -> N:
        """Memory for a norm of the residual stream."""

    @abstractmethod
    def enter(self, rows_YE: Tensor, id_T: Tensor | None, norm: AddNorm, out: N) -> None:
        """residual = rows `id_T` (int64) of `rows_YE`, or without ids `rows_YE` itself; `out` = its norm."""

    @abstractmethod
    def linear(self, x: N, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """out = x · weight^T; this rank's rows of the weight give its columns of the output. `out_TF` may be memory for
        `parts`."""

    def narrow_linear(self, x: N, weight_FE: Weight, out_TF: Tensor, scratch: Scratch) -> None:
        """`linear` with a plain weight of a few hundred rows, which is all there is to keep a GPU busy; out in fp32."""
        self.linear(x, weight_FE, out_TF, scratch)

    @abstractmethod
    def latent_linear(
        self,
        x: N,
        weight_FE: Weight,
        norm_A: Tensor,
        eps: float,
        out_TF: Tensor,
        scratch: Scratch,
        scale_T: Tensor | None = None,
    ) -> N:
        """out = x · weight^T; returned is the norm of weight `norm_A` of its first A columns, each token's times its
        `scale_T` (fp32) if there is one."""

    @abstractmethod
    def gate(self, x: N, gate: NormGate, scratch: Scratch) -> None:
        """`x`, a norm of the residual stream, times its gate, in place."""

    @abstractmethod
    def beside(self, normed: N, x_TA: Tensor, scratch: Scratch) -> N:
        """`normed` of `latent_linear`, and `x_TA` side by side, [T, 2 A]."""

    def parts(self, tokens: int, weight_FE: Weight) -> int:
        """Parts, [T, P, F] in fp32, in which `linear` leaves sums where the kernel behind adds them up; 0 where it adds
        them up itself."""
        return 0

    @abstractmethod
    def gated(self, x: N, gate_up_FE: Weight, scratch: Scratch) -> Tensor:
        """silu(gate) * up of gate, up = x · weight^T, [T, I]."""

    @abstractmethod
    def add(self, x_TF: Tensor, weight_EF: Weight, norm: AddNorm, out: N, scratch: Scratch) -> None:
        """residual += x · weight^T, summed over ranks; `out` = its norm."""

    def add_gated(self, x: N, gate_up_FE: Weight, down_EI: Weight, norm: AddNorm, out: N, scratch: Scratch) -> None:
        """residual += `gated` · down^T, summed over ranks; `out` = its norm, which shares no memory with `x`."""
        self.add(self.gated(x, gate_up_FE, scratch), down_EI, norm, out, scratch)

    @abstractmethod
    def add_experts(
        self, x: N, mixture: Mixture, norm: AddNorm, out: N, scratch: Scratch, live_R: Tensor | None
    ) -> None:
        """residual += the weighted sum of a token's experts, and its shared ones, summed over ranks, or its norm where
        the mixture has one; `out` = the norm of the residual, which shares no memory with `x`.

        `live_R` (integers, None: all are live): token t belongs to row t // (T // R), and the tokens of rows with 0 are
        padding, for which no expert computes.
        """

    @abstractmethod
    def last(self, normed: N, out_TE: Tensor) -> N:
        """Return the place where the last layer leaves the final norm, for `leave`: `normed` or `out_TE`."""

    @abstractmethod
    def leave(self, norm: AddNorm, last: N, out_TE: Tensor) -> None:
        """`out_TE` = the final norm of the residual stream."""
