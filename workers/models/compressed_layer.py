"""A layer of DeepSeek V4 as segments have it: what is token-wise before its attention, and what is behind it.

The plain forward pass is `deepseek_v4.through`. `project` holds the products of `deepseek_v4.attention`, and `finish`
its projection of the output, and the experts.

Shape legend: T tokens, E hidden features, A features of a query's latent, H heads of this rank, D features of an entry,
F features that a compressor makes of a token, J heads and I features of an indexer, O rope features, G groups of heads
of this rank, U features of a group's projected output, S residual streams, K experts of a token, Y positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.compressed import rope_queries
from kernels.moe import GivenExperts
from kernels.residual_streams import StreamGates, StreamMemory
from kernels.rms_norm import AddNorm
from workers.memory.scratch import Scratch
from workers.models.attention.compressed_rows import CompressedInputs, LayerAttention
from workers.models.compressed_kernels import project_groups
from workers.models.config import CompressedLayer, Compression, ModelConfig
from workers.models.deepseek_v4_weights import CompressedBlock
from workers.models.general import GeneralOps, Rows, dependent, tensor_of
from workers.models.layer_ops import Mixture
from workers.weights.formats import PLAIN


@dataclass(frozen=True)
class CompressedBuffers:
    """Buffers that segments and attention hand on to each other. There is one set for all layers: each part is dead
    when the next layer writes it."""

    ops: GeneralOps
    normed: Rows
    """The norm of a sum of the streams that the next layer reads."""
    residual_TSE: Tensor
    streams: StreamMemory
    token_T: Tensor
    """int64: tables say by it which experts a token has."""
    rotation_TO: Tensor
    """Rotations of the tokens in layers with a window alone."""
    compressed_rotation_TO: Tensor
    """The same in layers with compressed entries."""
    q_THD: Tensor
    latent_TF: Tensor
    """Behind a query's latent what an entry is made of; the latent is dead behind the product that reads it."""
    made_X: Tensor
    """fp32: room for what the compressors of any layer make of each token, and behind that an indexer's weights,
    without the factor that all scores have."""
    index_q_TJI: Tensor
    attended_THD: Tensor
    ended: bool
    """Whether the last layer ends for all tokens of a pass, because more than its norm is read of them."""

    @staticmethod
    def empty(
        config: ModelConfig,
        heads: int,
        dtype: torch.dtype,
        ops: GeneralOps,
        tokens: int,
        scratch: Scratch,
        *,
        ended: bool,
    ) -> CompressedBuffers:
        """Memory for passes of so many tokens; `heads` of this rank."""
        compression, streams, entry = config.compression, config.streams, config.cache_width
        assert compression is not None
        assert streams is not None
        hidden, rope = config.hidden_size, config.qk_rope_head_dim
        indexed = any(layer.indexed for layer in compression.layers)
        index_heads, features = (compression.index_heads, compression.index_features) if indexed else (0, 0)
        of_index = 2 * entry + 4 * features + index_heads
        rows = (2 * entry + (of_index if layer.indexed else 0) for layer in compression.layers if layer.ratio)

        def wide(*shape: int) -> Tensor:
            return scratch.empty(*shape, dtype=torch.float32)

        return CompressedBuffers(
            ops=ops,
            normed=ops.allocate_normed(tokens, hidden, dtype, config.rms_norm_eps, scratch),
            residual_TSE=scratch.empty(tokens, streams.count, hidden, dtype=dtype),
            streams=StreamMemory.empty(tokens, streams.count, hidden, scratch.empty, mixing=True),
            token_T=scratch.empty(tokens, dtype=torch.int64),
            rotation_TO=wide(tokens, rope),
            compressed_rotation_TO=wide(tokens, rope),
            q_THD=scratch.empty(tokens, heads, entry, dtype=dtype),
            latent_TF=scratch.empty(tokens, (config.q_lora_rank or 0) + entry, dtype=dtype),
            made_X=wide(tokens * max(rows, default=0)),
            index_q_TJI=scratch.empty(tokens, index_heads, features, dtype=dtype),
            attended_THD=scratch.empty(tokens, heads, entry, dtype=dtype),
            ended=ended,
        )

    @property
    def kv_TD(self) -> Tensor:
        """What an entry is made of; rows are strided."""
        return self.latent_TF[:, -self.q_THD.shape[2] :]

    def norm(self, weight_E: Tensor, eps: float, gates: StreamGates) -> AddNorm:
        """What is read next of the streams."""
        return AddNorm(self.residual_TSE, weight_E, eps, gates, self.streams)

    def to_finish(self, tokens: int, scratch: Scratch) -> CompressedBuffers:
        """Buffers like these that have room for what is `finished` of so many tokens."""
        _, streams, hidden = self.residual_TSE.shape
        if self.ended:
            return replace(self, normed=scratch.empty(tokens, hidden, dtype=self.residual_TSE.dtype))
        return replace(
            self,
            residual_TSE=scratch.empty(tokens, streams, hidden, dtype=self.residual_TSE.dtype),
            streams=StreamMemory.empty(tokens, streams, hidden, scratch.empty, mixing=True),
            token_T=scratch.empty(tokens, dtype=torch.int64),
            attended_THD=scratch.empty(tokens, *self.attended_THD.shape[1:], dtype=self.attended_THD.dtype),
        )

    @property
    def finished(self) -> tuple[Tensor, ...]:
        """What the end of a pass reads of a token: what `CompressedDecoderLayer.finish` does, or the final norm."""
        if self.ended:
            return (tensor_of(self.normed),)
        assert self.streams.mix_TSS is not None
        return self.residual_TSE, self.streams.open_TS, self.streams.mix_TSS, self.attended_THD, self.token_T


class CompressedDecoderLayer:
    """Attention and experts, each behind a norm of a sum of the streams, and added to all of them."""

    def __init__(
        self,
        config: ModelConfig,
        kind: CompressedLayer,
        block: CompressedBlock,
        rotation_YO: Tensor,
    ) -> None:
        """`rotation_YO`: rotations by position in a layer of this kind."""
        assert config.compression is not None
        assert config.routing is not None
        self.kind, self.block, self._eps = kind, block, config.rms_norm_eps
        self._compression: Compression = config.compression
        self.attention = LayerAttention(kind, block.attention, rotation_YO)
        experts, routing = block.experts, replace(config.routing, shared_experts=0)
        weights = experts.router_XE, experts.bias_X, experts.gate_up_XFE, experts.down_XEI
        self._mixture = Mixture(routing, *weights, shared=experts.shared)

    def inputs(self, buffers: CompressedBuffers) -> CompressedInputs:
        """What `project` leaves for attention."""
        attention = self.block.attention
        made = index_made = index_q = index_weight = None
        if attention.compressor is not None and (all_TF := self._made(buffers)) is not None:
            rows = attention.compressor.both_FE.shape[0]
            made = all_TF[:, :rows]
            if attention.indexer is not None:
                end = rows + attention.indexer.compressor.both_FE.shape[0]
                index_made, index_q, index_weight = all_TF[:, rows:end], buffers.index_q_TJI, all_TF[:, end:]
        rotation_TO = buffers.compressed_rotation_TO if self.kind.ratio else buffers.rotation_TO
        queried = buffers.q_THD, buffers.kv_TD, rotation_TO
        return CompressedInputs(*queried, made, index_made, index_q, index_weight)

    def project(self, buffers: CompressedBuffers, scratch: Scratch) -> None:
        """Token-wise, before attention: from the norm of the streams to what `inputs` has."""
        ops, x, attention, inputs = buffers.ops, buffers.normed, self.block.attention, self.inputs(buffers)
        asked = [(attention.q_up_QA, inputs.q_THD.flatten(1))]
        if attention.indexer is not None and inputs.index_q_TJI is not None:
            asked.append((attention.indexer.q_FA, inputs.index_q_TJI.flatten(1)))
        made = x, attention.latent_FE, attention.q_norm_A, self._eps, buffers.latent_TF
        ops.through_latent(*made, asked, scratch)
        if attention.made_FE is not None and (made_TF := self._made(buffers)) is not None:
            # A plain weight may be in fp32 in a model that is not. Weights of an indexer come without the factor that
            # all scores of a model have: whatever it is, the same entries are the best.
            product = ops.narrow_linear if attention.made_FE.format is PLAIN else ops.linear
            product(x, attention.made_FE, made_TF, scratch)
        if inputs.index_q_TJI is not None:
            rope_queries(inputs.index_q_TJI, inputs.rotation_TO, dependent=dependent(inputs.rotation_TO))

    def _made(self, buffers: CompressedBuffers) -> Tensor | None:
        """Room for what one product makes of each token beside the latent, fp32."""
        made_FE, tokens = self.block.attention.made_FE, len(buffers.token_T)
        return None if made_FE is None else buffers.made_X[: tokens * made_FE.shape[0]].view(tokens, -1)

    def finish(
        self, buffers: CompressedBuffers, norm: AddNorm, out: Rows, live_R: Tensor | None, scratch: Scratch
    ) -> None:
        """Token-wise, after attention: adds it, then the experts, to the streams; `out`, which may be `buffers.normed`,
        becomes the `norm` of a sum of them. `live_R`: see `LayerOps.add_experts`."""
        ops, block, attended_THD = buffers.ops, self.block, buffers.attended_THD
        tokens, features, dtype = len(attended_THD), self._compression.output_rank, attended_THD.dtype
        between = buffers.norm(block.feed_forward_norm_E, self._eps, block.feed_forward_streams)
        hidden = buffers.residual_TSE.shape[-1]
        x = ops.allocate_normed(tokens, hidden, dtype, self._eps, scratch)
        with scratch.scope():
            groups = block.attention.out_FD.shape[0] // features
            out_TGU = scratch.empty(tokens, groups, features, dtype=dtype)
            of_groups = attended_THD.view(tokens, groups, -1)
            rounds = ops.quantize_activations
            project_groups(of_groups, block.attention.out_FD, out_TGU, scratch, quantize_activations=rounds)
            ops.add(out_TGU.flatten(1), block.attention.out_EF, between, x, scratch)
        table_YK = block.experts.expert_YK
        given = None if table_YK is None else GivenExperts(table_YK, buffers.token_T)
        ops.add_experts(x, self._mixture, norm, out, scratch, live_R, given)


def shallow_layers(layers: Sequence[CompressedDecoderLayer]) -> list[int]:
    """Indices of a few layers that launch every kernel that all of them launch: one of each kind, then another of the
    last one's, so that one of them has a layer behind it. Kinds differ by the kernels of their experts, too."""
    experts = [layer.block.experts for layer in layers]
    kinds = [(layer.kind, own.expert_YK is None, own.in_fp8) for layer, own in zip(layers, experts, strict=True)]
    return sorted({*(kinds.index(kind) for kind in kinds), len(kinds) - 1})
