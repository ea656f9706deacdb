"""Launches the kernels of the mixture of experts into memory that the caller gives.

Nothing here allocates device memory or waits for the device, so all of it may be captured into a CUDA graph.
`dependent` launches with programmatic dependent launch (compute capability 9.0 and above). It is always safe where
every kernel before waits for its own predecessor, as all kernels here do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.matrix import BlockScaled, FourBits, Matrix, MicroScaled4
from kernels.moe import kernel, routing, scaled_launch, single, sorting, w4a8_launch, w8a8_launch
from kernels.moe.schedule import (
    FEW,
    FEW_EXPERTS,
    FEW_TOKENS,
    SEGMENTS,
    SPAN,
    ExpertsShape,
    ExpertTiling,
    Product,
    Workspace,
)
from kernels.quantize import Fp8Rows, launch_quantize
from kernels.rms_norm import AddNorm, launch_add_rms_norm
from kernels.routing_rule import RoutingRule
from kernels.routing_table import GivenExperts

MOST_EXPERTS = 512
MOST_CHOSEN = 16
"""Most experts that routing chooses for a token."""


def route(
    logit_TX: Tensor,
    bias_X: Tensor | None,
    id_TK: Tensor,
    weight_TK: Tensor,
    rule: RoutingRule,
    shared: int = 0,
    live_R: Tensor | None = None,
    given: GivenExperts | None = None,
    *,
    dependent: bool = False,
) -> None:
    tokens, *parts, experts = logit_TX.shape
    groups = rule.groups
    columns = id_TK.shape[1]
    chosen = columns - shared
    if not tokens:
        return
    if experts > MOST_EXPERTS or not 0 < chosen <= min(experts, MOST_CHOSEN) or experts % groups:
        raise ValueError(f"cannot choose {chosen} of {experts} experts in {groups} groups")
    routing.route[(tokens,)](
        logit_TX,
        logit_TX if bias_X is None else bias_X,
        id_TK if live_R is None else live_R,
        id_TK if given is None else given.expert_YK,
        id_TK if given is None else given.row_T,
        id_TK,
        weight_TK,
        1 if live_R is None else tokens // live_R.shape[0],
        rule.scale,
        LOGIT_STRIDE=logit_TX.stride(0),
        PART_STRIDE=logit_TX.stride(-2) if parts else 0,
        PARTS=parts[0] if parts else 1,
        EXPERTS=experts,
        GROUPS=groups,
        GROUP_BLOCK=triton.next_power_of_2(groups),
        MEMBER_BLOCK=triton.next_power_of_2(experts // groups),
        TOP_GROUPS=rule.top_groups,
        CHOSEN=chosen,
        CHOSEN_BLOCK=triton.next_power_of_2(chosen),
        SHARED=shared,
        COLUMNS=columns,
        SCORING=rule.scoring,
        BIASED=bias_X is not None and given is None,
        NORMALIZE=rule.normalize,
        CLOSED_AT_ZERO=rule.closed_at_zero,
        LIVE=live_R is not None,
        GIVEN=given is not None,
        DEPENDENT=dependent,
        num_warps=1,
        **_options(dependent),
    )


@dataclass(frozen=True)
class ExpertLaunches:
    """One call of `kernels.moe.experts` or `add_experts`: `run` launches its kernels one after the other."""

    x_TE: Tensor
    id_TK: Tensor
    weight_TK: Tensor
    gate_up_XFE: Matrix
    down_XEI: Matrix
    out_TE: Tensor
    """Output that is added to; with groups [T, G, E]."""
    scratch: Workspace
    shape: ExpertsShape
    tiling: ExpertTiling
    dependent: bool = False
    """Whether launches are dependent. For tall tiles only the sort of few tokens is: a launch costs nothing beside
    their products, and early starts disturb those."""
    add_norm: AddNorm | None = None
    """Norm after the sum; None: `out_TE` gets the sum itself."""
    rounded: tuple[Tensor, Tensor] | None = None
    """The tokens in FP8 and their scales, where they have been rounded before; see `kernels.moe.experts`."""
    before_TE: Tensor | None = None
    """What a token's sum is added to, where there is no norm after it; see `kernels.moe.experts`."""
    round_to: Fp8Rows | None = None
    """Where the norm is rounded to FP8; None: it is not."""

    @property
    def _dependent(self) -> bool:
        return self.dependent and self.tiling.rows < 128

    def run(self) -> None:
        """Launch everything."""
        if not self.shape.tokens:
            return
        if self.tiling.rows == 0 and not self.tiling.programs:
            self.gate_up_singly()
            self.down_singly()
            if self.add_norm is not None:
                norm = (self.add_norm.residual_TE, self.add_norm.weight_E, self.out_TE, self.add_norm.eps)
                launch_add_rms_norm(self.out_TE, *norm, dependent=self._dependent)
                if self.round_to is not None:
                    into = self.round_to.of(self.shape.tokens)
                    launch_quantize(self.out_TE, *into, self.round_to.by_token_TG, dependent=self._dependent)
        else:
            if self.tiling.rows:
                self.sort()
            if self.tiling.w8a8 and self.rounded is None:
                self.quantize()
            if self.tiling.w4a8:
                self.gather()
            if self.tiling.rearranged:
                self.rearrange()
            self.gate_up()
            self.down()
            if self.add_norm is None:
                self.combine()
            else:
                self.combine_norm(self.add_norm)

    def sort(self, span: int = SPAN, few: int = FEW) -> None:
        """Sort the pairs by expert and describe the tiles. `few`: most choices for the kernel for few tokens;
        `span`: most pairs a program of the others looks at at once."""
        pairs, scratch = self.shape.pairs, self.scratch
        tokens, columns = max(triton.next_power_of_2(self.shape.tokens), 16), triton.next_power_of_2(self.shape.chosen)
        routed = self.shape.experts - self.shape.shared
        settled = routed if self.tiling.spread else self.shape.experts
        if tokens * columns <= few and tokens <= FEW_TOKENS and routed <= FEW_EXPERTS:
            sorting.sort_few[(self.shape.experts, 2)](
                self.id_TK,
                scratch.sorted_Y,
                scratch.table,
                self.shape.tokens,
                self.tiling.rows.bit_length() - 1,
                settled,
                EXPERTS=self.shape.experts,
                SHARED=self.shape.shared,
                COLUMNS=self.shape.chosen,
                COLUMN_BLOCK=columns,
                WORDS=triton.next_power_of_2(triton.cdiv(routed, 32)),
                TOKENS=tokens,
                DEPENDENT=self.dependent,
                num_warps=min(max(tokens * columns // 128, 1), 4) if tokens * columns <= 2048 else 8,
                **_options(self.dependent),
            )
            return
        span = min(max(triton.next_power_of_2(pairs), 128), span)
        length = triton.cdiv(triton.cdiv(pairs, span), SEGMENTS) * span
        segments = triton.cdiv(pairs, length)
        several = length < pairs
        sizes: dict[str, Any] = {
            "EXPERTS": self.shape.experts,
            "BINS": max(triton.next_power_of_2(self.shape.experts), 32),
            "SPAN": span,
            "DEPENDENT": self._dependent,
            # A program that is alone on its multiprocessor waits for its own instructions: the more warps, the fewer.
            "num_warps": max(span // (256 if several else 128), 1),
            **_options(self._dependent),
        }
        if several:
            sorting.count[(segments,)](self.id_TK, scratch.counts, pairs, length, **sizes)
        sorting.place[(self.shape.experts, segments)](
            self.id_TK,
            scratch.counts,
            scratch.sorted_Y,
            scratch.table,
            pairs,
            length,
            segments,
            settled,
            SEGMENTS=SEGMENTS if several else 1,
            ROWS=self.tiling.rows,
            **sizes,
        )

    def quantize(self) -> None:
        """Round the tokens to FP8."""
        quantize = w4a8_launch.quantize if self.tiling.w4a8 else w8a8_launch.quantize
        quantize(self.x_TE, self.scratch, self.shape)

    def gather(self) -> None:
        """Bring the tokens that have been rounded into the order of the sorted pairs."""
        w4a8_launch.gather(self.rounded, self.scratch, self.shape)

    def rearrange(self) -> None:
        """Bring the tokens' features into the order of Hopper's kernels for many tokens with weights of four bits."""
        scaled_launch.rearrange(self.x_TE, self.scratch, self.shape)

    def gate_up(self) -> None:
        """Gate and up of the sorted pairs."""
        product, shape, scratch = self.tiling.gate_up, self.shape, self.scratch
        if self.tiling.w8a8 and isinstance(self.gate_up_XFE, BlockScaled):
            w8a8_launch.gate_up(self.gate_up_XFE, self.rounded, scratch, shape, self.tiling)
            return
        if self.tiling.w4a8 and isinstance(self.gate_up_XFE, MicroScaled4):
            w4a8_launch.gate_up(self.gate_up_XFE, scratch, shape, self.tiling)
            return
        if not self.tiling.rows and isinstance(self.gate_up_XFE, FourBits):
            call = (shape, self.tiling, self._dependent)
            scaled_launch.four_bit_singly(self.x_TE, self.id_TK, self.gate_up_XFE, scratch.act_YI, *call, settled=False)
            return
        if self.tiling.programs and isinstance(self.gate_up_XFE, FourBits):
            if self.tiling.rearranged:
                tokens_TE = scaled_launch.tokens(scratch, shape)
                scaled_launch.four_bit_grouped(tokens_TE, self.gate_up_XFE, scratch.act_YI, scratch, shape, self.tiling)
                return
            where = (scratch.act_YI, scratch, shape, self.tiling)
            scaled_launch.four_bit_tiled(self.x_TE, self.gate_up_XFE, *where, self._dependent, settled=False)
            return
        if not isinstance(self.gate_up_XFE, Tensor):
            scaled_launch.gate_up(self.x_TE, self.gate_up_XFE, scratch, shape, self.tiling, self._dependent)
            return
        if self.tiling.programs:
            sizes = {"GATE": True, "K": shape.hidden, "FEATURES": shape.intermediate, "WIDTH": product.block}
            self._by_hopper(product, self.gate_up_XFE, scratch.act_YI, sizes)
            return
        kernel.gate_up[(self.tiling.tiles(shape) * product.blocks(shape.intermediate),)](
            self.x_TE,
            self.gate_up_XFE,
            _box(self.gate_up_XFE, product),
            scratch.sorted_Y,
            scratch.table,
            scratch.act_YI,
            X_STRIDE=self.x_TE.stride(0),
            COLUMNS=shape.chosen,
            K=shape.hidden,
            FEATURES=shape.intermediate,
            LIMIT=shape.limit,
            **self._tile(product),
        )

    def down(self) -> None:
        """Down of the sorted pairs."""
        product, shape, scratch = self.tiling.down, self.shape, self.scratch
        if self.tiling.w8a8 and isinstance(self.down_XEI, BlockScaled):
            w8a8_launch.down(self.down_XEI, scratch, shape, self.tiling)
            return
        if self.tiling.w4a8 and isinstance(self.down_XEI, MicroScaled4):
            w4a8_launch.down(self.down_XEI, scratch, shape, self.tiling)
            return
        if not self.tiling.rows and isinstance(self.down_XEI, FourBits):
            call = (shape, self.tiling, self._dependent)
            into = scratch.partial_YGE[:, 0]
            scaled_launch.four_bit_singly(scratch.act_YI, self.id_TK, self.down_XEI, into, *call, settled=True)
            return
        if self.tiling.programs and isinstance(self.down_XEI, FourBits):
            where = (scratch.partial_YGE[:, 0], scratch, shape, self.tiling)
            if self.tiling.rearranged:
                scaled_launch.four_bit_grouped(scratch.act_YI, self.down_XEI, *where)
                return
            scaled_launch.four_bit_tiled(scratch.act_YI, self.down_XEI, *where, self._dependent, settled=True)
            return
        if not isinstance(self.down_XEI, Tensor):
            scaled_launch.down(self.down_XEI, scratch, shape, self.tiling, self._dependent)
            return
        if self.tiling.programs:
            sizes = {"GATE": False, "K": shape.intermediate, "FEATURES": shape.hidden, "WIDTH": product.block // 2}
            self._by_hopper(product, self.down_XEI, scratch.partial_YGE, sizes)
            return
        if self.tiling.down_programs:
            self._sums_of_groups(product, self.down_XEI)
            return
        kernel.down[(self.tiling.tiles(shape) * product.blocks(shape.hidden) * shape.parts,)](
            scratch.act_YI,
            self.down_XEI,
            _box(self.down_XEI, product),
            scratch.sorted_Y,
            scratch.table,
            scratch.partial_YGE,
            K=shape.intermediate,
            FEATURES=shape.hidden,
            GROUPS=shape.parts,
            **self._tile(product),
        )

    def combine(self) -> None:
        """The weighted sum over every token's pairs, added to what comes before it."""
        shape = self.shape
        before = self.out_TE if self.before_TE is None else self.before_TE
        block = min(triton.next_power_of_2(shape.hidden), 1024)
        kernel.combine[(shape.tokens, triton.cdiv(shape.hidden, block), shape.parts)](
            self.scratch.partial_YGE,
            self.id_TK,
            self.weight_TK,
            before,
            self.out_TE,
            BEFORE_STRIDE=before.stride(0),
            OUT_STRIDE=self.out_TE.stride(0),
            COLUMNS=shape.chosen,
            EXPERTS=shape.experts,
            FEATURES=shape.hidden,
            GROUPS=shape.parts,
            ADD=self.before_TE is not None,
            **self.sums(block),
        )

    def combine_norm(self, norm: AddNorm) -> None:
        """The weighted sum over every token's pairs, onto the residual, and its norm."""
        shape, rounded = self.shape, self.round_to
        number, scale, column = self.out_TE, self.out_TE, 0
        if rounded is not None:
            number, scale = rounded.of(shape.tokens)
            column = scale.stride(1)
        by_token = scale if rounded is None or rounded.by_token_TG is None else rounded.by_token_TG
        kernel.combine_norm[(shape.tokens,)](
            self.scratch.partial_YGE,
            self.id_TK,
            self.weight_TK,
            norm.residual_TE,
            norm.weight_E,
            self.out_TE,
            number,
            scale,
            by_token,
            norm.eps,
            column,
            RESIDUAL_STRIDE=norm.residual_TE.stride(0),
            OUT_STRIDE=self.out_TE.stride(0),
            COLUMNS=shape.chosen,
            EXPERTS=shape.experts,
            FEATURES=shape.hidden,
            ROUND=rounded is not None,
            TWICE=rounded is not None and rounded.by_token_TG is not None,
            **self.sums(triton.next_power_of_2(shape.hidden)),
        )

    def gate_up_singly(self) -> None:
        """Gate and up, pair by pair."""
        product, shape = self.tiling.gate_up, self.shape
        if not isinstance(self.gate_up_XFE, Tensor):
            call = (shape, self.tiling, self._dependent)
            scaled_launch.gate_up_singly(self.x_TE, self.id_TK, self.gate_up_XFE, self.scratch, *call)
            return
        single.gate_up[(shape.pairs * product.blocks(shape.intermediate),)](
            self.x_TE,
            self.gate_up_XFE,
            self.id_TK,
            self.scratch.act_YI,
            X_STRIDE=self.x_TE.stride(0),
            K=shape.hidden,
            FEATURES=shape.intermediate,
            LIMIT=shape.limit,
            **self._rows(product),
        )

    def down_singly(self) -> None:
        """Down, pair by pair, and the weighted sum, with what comes before it."""
        product, shape, before = self.tiling.down, self.shape, self.before_TE
        if not isinstance(self.down_XEI, Tensor):
            call = (self.scratch, shape, self.tiling, self._dependent, before)
            scaled_launch.down_singly(self.id_TK, self.weight_TK, self.down_XEI, self.out_TE, *call)
            return
        single.down[(shape.tokens * product.blocks(shape.hidden),)](
            self.scratch.act_YI,
            self.down_XEI,
            self.id_TK,
            self.weight_TK,
            self.out_TE if before is None else before,
            self.out_TE,
            BEFORE_STRIDE=0 if before is None else before.stride(0),
            OUT_STRIDE=self.out_TE.stride(0),
            K=shape.intermediate,
            FEATURES=shape.hidden,
            ADD=before is not None,
            **self._rows(product),
        )

    def _by_hopper(self, product: Product, weight: Tensor, out: Tensor, sizes: dict[str, int]) -> None:
        from kernels.linear.hopper import box  # a machine without Hopper GPUs need not have Gluon
        from kernels.moe import hopper

        if self.x_TE.data_ptr() % 16 or self.x_TE.stride(0) % 8:
            raise ValueError("rows of x_TE must begin at multiples of 16 bytes")
        hopper.product[(self.tiling.programs,)](
            self.x_TE,
            box(self.scratch.act_YI, self.tiling.rows // 2),
            box(weight.flatten(0, 1), sizes["WIDTH"]),
            self.scratch.sorted_Y,
            self.scratch.table,
            out,
            X_STRIDE=self.x_TE.stride(0),
            COLUMNS=self.shape.chosen,
            BLOCKS=product.blocks(sizes["FEATURES"]),
            GROUP=product.group,
            STAGES=product.stages,
            LIMIT=self.shape.limit,
            num_warps=product.warps,
            **sizes,
        )

    def _sums_of_groups(self, product: Product, weight: Tensor) -> None:
        from kernels.moe import group_sums  # a machine without Hopper GPUs need not have Gluon

        shape, scratch = self.shape, self.scratch
        group_sums.group_sums[(self.tiling.down_programs,)](
            group_sums.box(scratch.act_YI, shape.parts, group_sums.ROWS.value),
            group_sums.box(scratch.act_YI, shape.parts, group_sums.FEW.value),
            group_sums.box(weight.flatten(0, 1), shape.parts, product.block),
            scratch.sorted_Y,
            scratch.table,
            scratch.partial_YGE,
            COUNT=shape.features_of_a_group,
            FEATURES=shape.hidden,
            GROUPS=shape.parts,
            WALK=self.tiling.walked,
            BLOCKS=product.blocks(shape.hidden),
            STAGES=product.stages,
            DEPENDENT=self._dependent,
            num_warps=product.warps,
            **_options(self._dependent),
        )

    def _tile(self, product: Product) -> dict[str, Any]:
        return {
            "ROWS": self.tiling.rows,
            "BLOCK": product.block,
            "BLOCK_K": product.block_k,
            "STAGES": product.stages,
            "GROUP": product.group,
            "TMA": product.tma,
            "PRECISION": "ieee" if self.shape.dtype == torch.float32 else "tf32",
            "DEPENDENT": self._dependent,
            "num_warps": product.warps,
            **_options(self._dependent),
        }

    def sums(self, block: int) -> dict[str, Any]:
        """Return the options of programs that sum up `block` features: as many results at once as 64 registers of a
        thread hold. With many tokens it is the many programs on a multiprocessor that keep loads of results in
        flight."""
        warps = min(max(block // 256, 1), 16)
        held = warps * 32 * 256 // (block * self.tiling.partial.itemsize)
        return {
            "BLOCK": block,
            "BATCH": 0 if self.tiling.rows >= 128 else min(max(held, 1), self.shape.chosen),
            "DEPENDENT": self._dependent,
            "num_warps": warps,
            **_options(self._dependent),
        }

    def _rows(self, product: Product) -> dict[str, Any]:
        return {
            "COLUMNS": self.shape.chosen,
            "EXPERTS": self.shape.experts,
            "BLOCK": product.block,
            "BLOCK_K": product.block_k,
            "DEPENDENT": self._dependent,
            "num_warps": product.warps,
            **_options(self._dependent),
        }


def _box(weight: Tensor, product: Product) -> Tensor | TensorDescriptor:
    """Make the descriptor with which the copy engine fetches a tile of the experts' rows, laid end to end."""
    if not product.tma:
        return weight
    return TensorDescriptor.from_tensor(weight.flatten(0, 1), [product.block, product.block_k])


def _options(dependent: bool) -> dict[str, bool]:
    """The launch attribute exists on CUDA only, and the interpreter knows none."""
    return {"launch_pdl": True} if dependent else {}
