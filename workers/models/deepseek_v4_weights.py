"""The weights of DeepSeek V4 on one rank, by the names of its checkpoints.

Heads and groups of heads are shared out over the ranks along `heads`, intermediate features along `experts`. Indexers,
compressors and routers are whole on every rank, because what they decide is the same for all heads.

Shape legend: E hidden features, A features of a query's latent, H heads of this rank, D features of an entry,
Q = H * D, C features that a compressor makes of a token, R tokens of a
compressed entry, J heads of an indexer, I features of its keys, G groups of heads of this rank, U features of a group's
projected output, X experts, K experts of a token, Y vocabulary, F rows of a gate and an up projection.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.matrix import MicroScaled4
from kernels.residual_streams import StreamGates
from workers.models.config import CompressedLayer, ModelConfig, Routing
from workers.models.layer_ops import Gated
from workers.models.streams import load_streams
from workers.weights.checkpoint import WeightsError
from workers.weights.part import Part, Shard
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


@dataclass(frozen=True)
class Compressor:
    """The weights that make one compressed entry of several tokens."""

    both_FE: Weight
    """C rows for what is averaged, then C rows for the logits of its weights. C is twice the features of an entry where
    tokens of the entry before take part: their features come first."""
    bias_RC: Tensor
    """fp32: added to those logits, by the place of a token among those of its entry."""
    norm_D: Tensor
    overlapping: bool
    """Whether tokens of the entry before take part."""

    @property
    def ratio(self) -> int:
        """Tokens for which there is one entry."""
        return self.bias_RC.shape[0]

    @property
    def reach(self) -> int:
        """Tokens of which an entry is made."""
        return self.ratio * (2 if self.overlapping else 1)


@dataclass(frozen=True)
class CompressedIndexer:
    """The weights that select the compressed entries of a query."""

    q_FA: Weight
    """J * I rows."""
    weight_JE: Weight
    compressor: Compressor


@dataclass(frozen=True)
class CompressedAttention:
    """The weights of a layer's attention."""

    latent_FE: Weight
    """A rows for a query's latent, then D rows for the entry: one product makes both."""
    q_norm_A: Tensor
    q_up_QA: Weight
    kv_norm_D: Tensor
    sink_H: Tensor
    """fp32."""
    out_FD: Weight
    """G * U rows: each group of them reads the output of the heads of one group."""
    out_EF: Weight
    compressor: Compressor | None
    indexer: CompressedIndexer | None
    made_FE: Weight | None
    """The rows of both compressors and of the indexer's weights, in this order, in the same memory: one product makes
    all that these need of a token. None where there is no compressor."""

    @property
    def q_down_AE(self) -> Weight:
        """The rows of a query's latent alone."""
        return self.latent_FE[: len(self.q_norm_A)]

    @property
    def kv_DE(self) -> Weight:
        """The rows of the entry alone."""
        return self.latent_FE[len(self.q_norm_A) :]


@dataclass(frozen=True)
class CompressedExperts:
    """The weights of a layer's experts."""

    router_XE: Weight
    bias_X: Tensor | None
    """fp32; None in layers that have a table."""
    expert_YK: Tensor | None
    """int32: the experts of each token id; None where the router chooses."""
    gate_up_XFE: Weight
    down_XEI: Weight
    shared: Gated

    @property
    def in_fp8(self) -> bool:
        """Whether both matrices are in MXFP4 and are known to be FP8 times a power of two for each row."""
        matrices = self.gate_up_XFE.matrix, self.down_XEI.matrix
        return all(isinstance(matrix, MicroScaled4) and matrix.least is not None for matrix in matrices)


@dataclass(frozen=True)
class CompressedBlock:
    """The weights of a layer."""

    attention_streams: StreamGates
    attention_norm_E: Tensor
    attention: CompressedAttention
    feed_forward_streams: StreamGates
    feed_forward_norm_E: Tensor
    experts: CompressedExperts


def load_block(
    source: WeightSource, config: ModelConfig, prefix: str, layer: CompressedLayer, *, hashed: bool
) -> CompressedBlock:
    """Load the layer whose names begin with `prefix`. `hashed`: whether a table says which experts a token has.
    `WeightsError` for a table with experts that there are not."""
    hidden = config.hidden_size
    return CompressedBlock(
        attention_streams=_streams(source, f"{prefix}hc_attn_", config),
        attention_norm_E=source.load(f"{prefix}attn_norm.weight", hidden),
        attention=_attention(source, f"{prefix}attn.", config, layer),
        feed_forward_streams=_streams(source, f"{prefix}hc_ffn_", config),
        feed_forward_norm_E=source.load(f"{prefix}ffn_norm.weight", hidden),
        experts=_experts(source, f"{prefix}ffn.", config, hashed=hashed),
    )


def _streams(source: WeightSource, prefix: str, config: ModelConfig) -> StreamGates:
    gates = load_streams(source, prefix, config, added=True)
    assert gates is not None
    return gates


def _attention(source: WeightSource, prefix: str, config: ModelConfig, layer: CompressedLayer) -> CompressedAttention:
    compression, hidden, latent = config.compression, config.hidden_size, config.q_lora_rank
    assert compression is not None
    assert latent is not None
    heads, entry = config.num_heads, config.cache_width
    groups, rank = compression.output_groups, compression.output_rank
    own = source.mesh.heads.share(heads, "num_attention_heads")
    by_heads, by_groups = Shard(0, "heads"), Shard(1, "heads")
    sink_H = source.empty(own.stop - own.start, dtype=torch.float32)
    source.fill_part(sink_H, f"{prefix}attn_sink", (heads,), (own,))
    compressor, indexer, made_FE = None, None, None
    if layer.ratio:
        name, of_index = f"{prefix}compressor.", f"{prefix}indexer.compressor."
        features, count = compression.index_features, compression.index_heads
        parts = _compressor_parts(name, hidden, entry, overlapping=layer.indexed)
        if layer.indexed:
            parts += _compressor_parts(of_index, hidden, features, overlapping=True)
            parts.append(Part(f"{prefix}indexer.weights_proj.weight", count, hidden))
        made_FE = source.matrix(*parts)
        rows = 2 * entry * (2 if layer.indexed else 1)
        compressor = _compressor(source, name, made_FE[:rows], layer.ratio, entry, overlapping=layer.indexed)
        if layer.indexed:
            end = rows + 4 * features
            indexer = CompressedIndexer(
                source.matrix(Part(f"{prefix}indexer.wq_b.weight", count * features, latent)),
                made_FE[end:],
                _compressor(source, of_index, made_FE[rows:end], layer.ratio, features, overlapping=True),
            )
    return CompressedAttention(
        latent_FE=source.matrix(
            Part(f"{prefix}wq_a.weight", latent, hidden), Part(f"{prefix}wkv.weight", entry, hidden)
        ),
        q_norm_A=source.load(f"{prefix}q_norm.weight", latent),
        q_up_QA=source.matrix(Part(f"{prefix}wq_b.weight", heads * entry, latent, shard=by_heads)),
        kv_norm_D=source.load(f"{prefix}kv_norm.weight", entry),
        sink_H=sink_H,
        out_FD=source.matrix(Part(f"{prefix}wo_a.weight", groups * rank, heads * entry // groups, shard=by_heads)),
        out_EF=source.matrix(Part(f"{prefix}wo_b.weight", hidden, groups * rank, shard=by_groups)),
        compressor=compressor,
        indexer=indexer,
        made_FE=made_FE,
    )


def _compressor_parts(prefix: str, hidden: int, features: int, *, overlapping: bool) -> list[Part]:
    made = features * (2 if overlapping else 1)
    return [Part(f"{prefix}{name}.weight", made, hidden) for name in ("wkv", "wgate")]


def _compressor(
    source: WeightSource, prefix: str, both_FE: Weight, ratio: int, features: int, *, overlapping: bool
) -> Compressor:
    made = features * (2 if overlapping else 1)
    return Compressor(
        both_FE,
        source.load(f"{prefix}ape", ratio, made, dtype=torch.float32),
        source.load(f"{prefix}norm.weight", features),
        overlapping,
    )


def _experts(source: WeightSource, prefix: str, config: ModelConfig, *, hashed: bool) -> CompressedExperts:
    routing, hidden, width = config.routing, config.hidden_size, config.moe_intermediate_size
    assert routing is not None
    gate = f"{prefix}gate.weight"

    def network(name: str, features: int) -> tuple[list[Part], list[Part]]:
        """The parts of a network's two matrices: the gate is called w1, the up projection w3."""
        rows, columns = Shard(0, "experts"), Shard(1, "experts")
        gate_up = [Part(f"{name}w{number}.weight", features, hidden, shard=rows) for number in (1, 3)]
        return gate_up, [Part(f"{name}w2.weight", hidden, features, shard=columns)]

    routed = [network(f"{prefix}experts.{expert}.", width) for expert in range(routing.experts)]
    gate_up, down = network(f"{prefix}shared_experts.", routing.shared_experts * width)
    return CompressedExperts(
        router_XE=Weight(source.load(gate, routing.experts, hidden, dtype=source.lossless(gate))),
        bias_X=None if hashed else source.load(f"{prefix}gate.bias", routing.experts, dtype=torch.float32),
        expert_YK=_table(source, f"{prefix}gate.tid2eid", config.vocab_size, routing) if hashed else None,
        gate_up_XFE=source.experts([gate_up for gate_up, _ in routed]),
        down_XEI=source.experts([down for _, down in routed]),
        shared=Gated(source.matrix(*gate_up), source.matrix(*down)),
    )


def _table(source: WeightSource, name: str, vocab: int, routing: Routing) -> Tensor:
    expert_YK = source.empty(vocab, routing.experts_per_token, dtype=torch.int32)
    source.fill_part(expert_YK, name, tuple(expert_YK.shape), (slice(0, vocab), slice(0, routing.experts_per_token)))
    source.settle()
    if not expert_YK.is_meta and not bool(((expert_YK >= 0) & (expert_YK < routing.experts)).all()):
        raise WeightsError(f"{name} names experts outside of 0 to {routing.experts - 1}. Is the download complete?")
    return expert_YK
