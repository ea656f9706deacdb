"""Layers: latent attention and a feed-forward part (DeepSeek-V2, 2024).

A layer of a pass (`segments`) is three calls: `DecoderLayer.project`, which is token-wise, attention, and
`DecoderLayer.finish`, which is token-wise again. `Segments.forward` makes them one behind the other, as the loop of
`deepseek.forward` does; a pass that is captured in segments is cut between them.

Shape legend: T tokens, E hidden features, R rows, P pages, K = 64 entries per page, C cached features.
"""

from __future__ import annotations

from torch import Tensor

from kernels.residual_streams import StreamGates
from kernels.rms_norm import AddNorm
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.feed_forward import FeedForward
from workers.models.layer_ops import N, NormGate
from workers.models.pass_buffers import PassBuffers


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

    def project(self, buffers: PassBuffers[N], cache_slot_T: Tensor, cache_PKC: Tensor, scratch: Scratch) -> None:
        """Token-wise, before attention: from the norm of the residual to queries, keys and latents."""
        ops, x = buffers.ops, buffers.normed
        if self.attention_gate is not None:
            ops.gate(x, self.attention_gate, scratch)
        where = buffers.rotation_TO, cache_slot_T, cache_PKC
        self.attention.project(ops, x, *where, buffers.projected, scratch, buffers.query_scale_T)

    def finish(self, buffers: PassBuffers[N], norm: AddNorm, out: N, live_R: Tensor | None, scratch: Scratch) -> None:
        """Token-wise, after attention: adds it, then the feed-forward part, to the residual; `out`, which may be
        `buffers.normed`, becomes the `norm` of that. Holds (11) to (12) of `deepseek`, and both norms."""
        between = buffers.norm(self.feed_forward_norm_E, self.eps, self.feed_forward_streams)
        tokens, hidden = len(buffers.residual_TE), buffers.residual_TE.shape[-1]
        x = buffers.ops.allocate_normed(tokens, hidden, buffers.attended_THV.dtype, self.eps, scratch)
        gate_THV = buffers.projected.gate_THV
        self.attention.output(buffers.ops, buffers.attended_THV, between, x, scratch, gate_THV)
        if self.feed_forward_gate is not None:
            buffers.ops.gate(x, self.feed_forward_gate, scratch)
        self.feed_forward(buffers.ops, x, norm, out, scratch, live_R)
