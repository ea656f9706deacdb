"""A layer, latent attention and a feed-forward part (DeepSeek-V2, 2024), and the buffers that layers hand on.

A layer of a pass (`segments`) is three calls: `LatentAttention.project`, which is token-wise, `LatentAttention.attend`,
and `DecoderLayer.finish`, which is token-wise again. `Segments.forward` makes them one behind the other, as the loop of
`deepseek.forward` does; a pass that is captured in segments is cut between them.

Shape legend: T tokens, padding included, E hidden features, H heads of this rank, V value features, O rope features,
R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from kernels.residual_streams import StreamGates, StreamMemory
from kernels.rms_norm import AddNorm
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention, MlaInputs
from workers.models.feed_forward import FeedForward, MixtureOfExperts
from workers.models.layer_ops import LayerOps, N, NormGate


@dataclass(frozen=True)
class PassBuffers(Generic[N]):
    """Buffers that segments and attention hand on to each other. There is one set for all layers: each part is dead
    when the next layer writes it."""

    ops: LayerOps[N]
    """Token-wise work of the pass; the memory here is made for it."""
    normed: N
    """The norm of `residual_TE` that the next layer reads."""
    residual_TE: Tensor
    """The residual stream, or several of them, [T, S, E]."""
    rotation_TO: Tensor | None
    """Rotations of the tokens. None in passes of decode rows alone, whose attention rotates."""
    query_scale_T: Tensor | None
    """fp32: what each token's query is multiplied by, of models whose queries are scaled by their position."""
    projected: MlaInputs
    attended_THV: Tensor
    streams: StreamMemory | None = None
    """Of several residual streams; None where there is one."""

    @property
    def finished(self) -> tuple[Tensor, ...]:
        """What `DecoderLayer.finish` reads of a token: its residual, what it attended to, and the gates of that, and of
        residual streams, where there are such."""
        gate_THV, streams = self.projected.gate_THV, self.streams
        gates = () if gate_THV is None else (gate_THV,)
        return (self.residual_TE, self.attended_THV, *gates, *(() if streams is None else (streams.open_TS,)))


@dataclass(frozen=True)
class PassTensors:
    """The inputs, the output and the memory of one pass."""

    token_T: Tensor
    """int64 ids below the vocabulary size; padding feeds any."""
    position_T: Tensor
    """int64 rope positions; padding has any."""
    cache_slot_T: Tensor
    """int64 index into the flattened cache; padding points into the null page."""
    live_R: Tensor | None
    """Integers: token t belongs to row t // (T // R), and the tokens of rows with 0 or less are padding, which no
    expert computes. None: no token is padding."""
    source_TE: Tensor | None
    """Hidden states that the draft layer reads beside the tokens."""
    out_TE: Tensor | None
    """Hidden states after the final norm; None where `gather` and `end` take the last segment's place."""
    buffers: PassBuffers[Any]
    aux_hidden: tuple[tuple[int, Tensor], ...] = ()
    """Layers, and where the residual stream that enters each is copied to, [T, E]. None of several streams."""


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    The first norm is taken where the layer before ends, which its sum and the norm can do in one kernel."""

    def __init__(
        self,
        eps: float,
        attention_norm_E: Tensor,
        attention: LatentAttention,
        feed_forward_norm_E: Tensor,
        feed_forward: FeedForward,
        *,
        attention_gate: NormGate | None = None,
        feed_forward_gate: NormGate | None = None,
        attention_streams: StreamGates | None = None,
        feed_forward_streams: StreamGates | None = None,
    ) -> None:
        """`attention_gate`, `feed_forward_gate`: of the norms of those names, where they have one.
        `attention_streams`, `feed_forward_streams`: by which they read the residual streams and add to them, where
        there are several."""
        self.eps = eps
        self.attention_gate, self.feed_forward_gate = attention_gate, feed_forward_gate
        self.attention_streams, self.feed_forward_streams = attention_streams, feed_forward_streams
        self.attention_norm_E, self.attention = attention_norm_E, attention
        self.feed_forward_norm_E, self.feed_forward = feed_forward_norm_E, feed_forward

    def finish(self, buffers: PassBuffers[N], norm: AddNorm, out: N, live_R: Tensor | None, scratch: Scratch) -> None:
        """Token-wise, after attention: adds it, then the feed-forward part, to the residual; `out`, which may be
        `buffers.normed`, becomes the `norm` of that. Holds (11) to (12) of `deepseek`, and both norms."""
        ops, attended_THV, residual_TE = buffers.ops, buffers.attended_THV, buffers.residual_TE
        between = AddNorm(residual_TE, self.feed_forward_norm_E, self.eps, self.feed_forward_streams, buffers.streams)
        x = ops.allocate_normed(len(residual_TE), residual_TE.shape[-1], attended_THV.dtype, self.eps, scratch)
        self.attention.output(ops, attended_THV, between, x, scratch, buffers.projected.gate_THV)
        if self.feed_forward_gate is not None:
            ops.gate(x, self.feed_forward_gate, scratch)
        if isinstance(self.feed_forward, MixtureOfExperts):
            ops.add_experts(x, self.feed_forward.mixture, norm, out, scratch, live_R)
        else:
            ops.add_gated(x, self.feed_forward.gate_up_FE, self.feed_forward.down_EI, norm, out, scratch)
