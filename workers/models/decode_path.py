"""The path of pure decode steps of few tokens: the model's layers in as few, and as early, kernels as they can be.

What it computes is what the layers compute (`segments`); what differs is where kernels begin and end. Norms are pending
between kernels (`kernels.pending_norm`), the residual stream is fp32, every weight matrix is streamed once by kernels
that begin with it before their predecessor has finished (programmatic dependent launch). Between ranks, sums go through
all-reduces, and the kernel after one is launched plainly.

Shape legend: T tokens, R decode rows, W width, E hidden features, H heads of this rank, N / O non-rope / rope features
of a query, D = N + O, L latent features, C = L + O cached features, V value features, A features of the query's latent,
P pages, K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kernels import few_experts, pending_norm
from kernels.dependent import launches_dependently
from kernels.few_experts import ChosenExperts
from kernels.linear import MOST_STREAMED, gated_linear, linear, linear_to_residual, normed_linear
from kernels.pending_norm import PIECE, PendingNorm
from kernels.rms_norm import rms_norm
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch
from workers.models.attention.decode_rows import LATENT_NORM_EPS, DecodeMemory, DecodeRows, Entering
from workers.models.attention.latent import LatentAttention
from workers.models.batch import Batch, DecodeBatch
from workers.models.config import ModelConfig
from workers.models.feed_forward import DenseFeedForward, MixtureOfExperts
from workers.models.layer import DecoderLayer
from workers.models.products import Products
from workers.parallel.group import TensorParallel


@cache
def unsupported(config: ModelConfig, ranks: int) -> str:
    """Why a model of this shape cannot take the path on a GPU; empty if it can."""
    rank_features = {
        "hidden_size": config.hidden_size,
        "kv_lora_rank + qk_rope_head_dim": config.kv_lora_rank + config.qk_rope_head_dim,
        "q_lora_rank": config.q_lora_rank or PIECE,
        "query features": config.num_heads // ranks * config.qk_head_dim,
        "value features": config.num_heads // ranks * config.v_head_dim,
        "intermediate_size": config.intermediate_size // ranks,
        "moe_intermediate_size": config.moe_intermediate_size // ranks,
    }
    for name, features in rank_features.items():
        if features % PIECE:
            return f"{name} on a rank is {features}, no multiple of {PIECE}"
    for name, features in {"kv_lora_rank": config.kv_lora_rank, "qk_rope_head_dim": config.qk_rope_head_dim}.items():
        if features < 16 or features & (features - 1):
            return f"{name} = {features} is no power of two of at least 16"
    if config.moe_intermediate_size // ranks > 4096:
        return f"moe_intermediate_size on a rank is {config.moe_intermediate_size // ranks}, more than 4096"
    routing = config.routing
    if not few_experts.choosable(routing.experts, routing.rule.groups):
        return f"{routing.experts} experts in {routing.rule.groups} groups are more than a warp chooses from"
    return ""


@dataclass(frozen=True)
class Stream:
    """What layers hand on: the residual, and its norm for whoever reads it next."""

    residual_TE: Tensor
    """fp32."""
    pending: PendingNorm


@dataclass(frozen=True)
class Step:
    """What every layer of one pass reads."""

    batch: Batch
    rows: DecodeBatch
    rotation_PO: Tensor
    scratch: Scratch
    dependent: bool
    """Programmatic dependent launch."""

    @property
    def tokens(self) -> int:
        """Tokens of the pass."""
        return self.batch.layout.decode_tokens


class FewTokenModel(Protocol):
    """What the path reads of a model."""

    config: ModelConfig
    products: Products
    group: TensorParallel
    embedding_YE: Tensor
    layers: list[DecoderLayer]
    norm_E: Tensor
    rotation_PO: Tensor


class DecodePath:
    """The few-token path through one model."""

    def __init__(self, model: FewTokenModel) -> None:
        self.model = model

    def takes(self, batch: Batch) -> bool:
        """Whether this pass can go here: a pure decode step of few tokens, on a GPU with dependent launch, in bf16."""
        model, table_YE = self.model, self.model.embedding_YE
        return (
            not model.products.invariant
            and batch.decode is not None
            and batch.prefill is None
            and 0 < batch.layout.tokens <= MOST_STREAMED
            and table_YE.dtype == torch.bfloat16
            and launches_dependently(table_YE.device)
            and not unsupported(model.config, model.group.size)
        )

    def forward(self, token_T: Tensor, batch: Batch, cache: PagedCache, scratch: Scratch) -> Tensor:
        """As `Model.forward`."""
        model = self.model
        own = cache.layers[: len(model.layers)]
        return self.run(lambda _: (model.embedding_YE, token_T), model.layers, model.norm_E, own, batch, scratch)

    def run(
        self,
        source: Callable[[Scratch], tuple[Tensor, Tensor | None]],
        layers: Sequence[DecoderLayer],
        norm_E: Tensor,
        caches: Sequence[Tensor],
        batch: Batch,
        scratch: Scratch,
    ) -> Tensor:
        """A pass over `layers`, whose caches are `caches`: hidden states after the final norm, [T, E]. What enters is
        what `source` gives: rows of a matrix, by their int64 indices [T], or a matrix of T rows."""
        hidden_TE = self._hidden(batch, scratch)
        with scratch.scope():
            step = self._step(batch, scratch)
            stream = self._enter(*source(scratch), layers[0].attention_norm_E, step)
            next_norms_E = [layer.attention_norm_E for layer in layers[1:]] + [norm_E]
            for layer, next_norm_E, cache_PKC in zip(layers, next_norms_E, caches, strict=True):
                stream = self._layer(layer, stream, next_norm_E, cache_PKC, step)
            self._leave(stream, norm_E, hidden_TE, step)
        return hidden_TE

    def _hidden(self, batch: Batch, scratch: Scratch) -> Tensor:
        model = self.model
        return scratch.empty(batch.layout.tokens, model.config.hidden_size, dtype=model.embedding_YE.dtype)

    def _step(self, batch: Batch, scratch: Scratch) -> Step:
        batch = self.model.layers[0].attention.plan(batch, scratch)
        rows = batch.decode
        if rows is None or batch.prefill is not None:
            raise ValueError("this path is for pure decode steps")
        return Step(batch, rows, self.model.rotation_PO, scratch, dependent=rows.length_R.is_cuda)

    def _pending(self, step: Step) -> PendingNorm:
        config, dtype = self.model.config, self.model.embedding_YE.dtype
        return PendingNorm.empty(step.tokens, config.hidden_size, config.rms_norm_eps, dtype, step.scratch.empty)

    def _enter(self, source_YE: Tensor, token_T: Tensor | None, norm_E: Tensor, step: Step) -> Stream:
        residual_TE = step.scratch.empty(step.tokens, self.model.config.hidden_size, dtype=torch.float32)
        pending = self._pending(step)
        pending_norm.enter(source_YE, token_T, residual_TE, norm_E, pending, dependent=step.dependent)
        return Stream(residual_TE, pending)

    def _leave(self, stream: Stream, norm_E: Tensor, hidden_TE: Tensor, step: Step) -> None:
        eps = self.model.config.rms_norm_eps
        rms_norm(stream.residual_TE, norm_E, hidden_TE, eps=eps, dependent=step.dependent)

    def _layer(self, layer: DecoderLayer, stream: Stream, next_norm_E: Tensor, cache_PKC: Tensor, step: Step) -> Stream:
        """One layer: attention, then feed-forward, each added to the residual."""
        residual_TE, scratch = stream.residual_TE, step.scratch
        between, after = self._pending(step), stream.pending
        with scratch.scope():
            attended_TF = self._attention(layer.attention, stream, cache_PKC, step)
            self._add(attended_TF, layer.attention.out_EF.plain, residual_TE, layer.feed_forward_norm_E, between, step)
        with scratch.scope():
            if isinstance(layer.feed_forward, DenseFeedForward):
                act_TI = scratch.empty(step.tokens, layer.feed_forward.down_EI.shape[1], dtype=between.x_TE.dtype)
                gated_linear(between, layer.feed_forward.gate_up_FE.plain, act_TI, dependent=step.dependent)
                self._add(act_TI, layer.feed_forward.down_EI.plain, residual_TE, next_norm_E, after, step)
            else:
                self._experts(layer.feed_forward, between, residual_TE, next_norm_E, after, step)
        return Stream(residual_TE, after)

    def _attention(self, attention: LatentAttention, stream: Stream, cache_PKC: Tensor, step: Step) -> Tensor:
        """This rank's heads, [T, H * V]."""
        tokens, scratch, dependent = step.tokens, step.scratch, step.dependent
        heads, dtype = attention.heads, stream.pending.x_TE.dtype
        down_TF = scratch.empty(tokens, attention.down_FE.shape[0], dtype=dtype)
        width = heads.latent + heads.rope
        query_TF, kv_TC = down_TF[:, :-width], down_TF[:, -width:]
        if attention.q_up_QA is None or attention.q_norm_A is None:
            normed_linear(stream.pending, attention.down_FE.plain, down_TF, dependent=dependent)
        else:
            square_TP = scratch.empty(tokens, query_TF.shape[1] // PIECE, dtype=torch.float32)
            query = PendingNorm(query_TF, square_TP, LATENT_NORM_EPS)
            down_FE, norm_A = attention.down_FE.plain, attention.q_norm_A
            normed_linear(stream.pending, down_FE, down_TF, norm_A=norm_A, next=query, dependent=dependent)
            query_TF = scratch.empty(tokens, attention.q_up_QA.shape[0], dtype=dtype)
            normed_linear(query, attention.q_up_QA.plain, query_TF, dependent=dependent)
        batch = step.batch
        q_THD = query_TF.view(tokens, heads.count, heads.nope + heads.rope)
        entering = Entering(q_THD, kv_TC, step.rotation_PO, batch.position_T, batch.cache_slot_T)
        memory = DecodeMemory.of(heads, batch.layout.decode_rows, batch.layout.width, scratch)
        out_THV = scratch.empty(tokens, heads.count, heads.value, dtype=dtype)
        rows = DecodeRows(step.rows, batch.first, q_THD, entering, memory, out_THV, few=dependent)
        rows.attend(heads, cache_PKC)
        return out_THV.flatten(1)

    def _experts(
        self,
        experts: MixtureOfExperts,
        x: PendingNorm,
        residual_TE: Tensor,
        norm_E: Tensor,
        out: PendingNorm,
        step: Step,
    ) -> None:
        scratch, dependent, given = step.scratch, step.dependent, experts.routing
        logit_TX = scratch.empty(step.tokens, given.experts, dtype=torch.float32)
        few_experts.router(x, experts.router_XE.plain, logit_TX, dependent=dependent)
        choice = ChosenExperts.empty(step.tokens, given.experts, given.experts_per_token, scratch.empty)
        few_experts.choose(logit_TX, experts.bias_X, step.rows.length_R, choice, given.rule, dependent=dependent)
        sum_TE = part_TE = None
        if self.model.group.size > 1:
            sum_TE = scratch.empty(*x.x_TE.shape, dtype=x.x_TE.dtype)
            part_TE = self.model.group.part(sum_TE)
        few_experts.experts(
            x,
            choice,
            experts.gate_up_XFE.plain,
            experts.down_XEI.plain,
            residual_TE if part_TE is None else None,
            norm_E,
            out if part_TE is None else part_TE,
            scratch.empty,
            dependent=dependent,
        )
        if part_TE is not None and sum_TE is not None:
            self._reduce(part_TE, sum_TE, residual_TE, norm_E, out)

    def _add(
        self, x_TF: Tensor, weight_EF: Tensor, residual_TE: Tensor, norm_E: Tensor, out: PendingNorm, step: Step
    ) -> None:
        """residual += the sum over ranks of x · weight^T; `out` = its pending norm."""
        if self.model.group.size == 1:
            linear_to_residual(x_TF, weight_EF, residual_TE, norm_E, out, dependent=step.dependent)
            return
        sum_TE = step.scratch.empty(*out.x_TE.shape, dtype=out.x_TE.dtype)
        part_TE = self.model.group.part(sum_TE)
        linear(x_TF, weight_EF, part_TE, dependent=step.dependent)
        self._reduce(part_TE, sum_TE, residual_TE, norm_E, out)

    def _reduce(self, part_TE: Tensor, sum_TE: Tensor, residual_TE: Tensor, norm_E: Tensor, out: PendingNorm) -> None:
        self.model.group.all_reduce(part_TE, sum_TE)
        pending_norm.add(sum_TE, residual_TE, norm_E, out)  # launched plainly: the all-reduce is not ours
