"""Layers: latent attention and a feed-forward part (DeepSeek-V2, 2024).

A layer states its own boundaries: `project` and `finish` are token-wise, attention runs between them. `segments` cuts a
pass there.

Shape legend: T tokens, E hidden features, C cached features, R rows, P pages, K = 64 entries per page.
"""

from __future__ import annotations

from torch import Tensor

from kernels.moe import AddNorm
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.feed_forward import FeedForward
from workers.models.flow import Flow
from workers.models.products import Products


class DecoderLayer:
    """Attention and feed-forward, each behind a norm and added to the residual stream.

    The first norm is taken where the layer before ends, which its sum and the norm can do in one kernel."""

    def __init__(
        self,
        products: Products,
        eps: float,
        attention_norm_E: Tensor,
        attention: LatentAttention,
        feed_forward_norm_E: Tensor,
        feed_forward: FeedForward,
    ) -> None:
        self.products, self.eps = products, eps
        self.attention_norm_E, self.attention = attention_norm_E, attention
        self.feed_forward_norm_E, self.feed_forward = feed_forward_norm_E, feed_forward

    def project(self, flow: Flow, cache_slot_T: Tensor, cache_PKC: Tensor, scratch: Scratch) -> None:
        """Token-wise, before attention: `flow.normed_TE`, of `attention_norm_E`, to what attention reads."""
        self.attention.project(flow.normed_TE, flow.rotation_TO, cache_slot_T, cache_PKC, flow.projected, scratch)

    def finish(self, flow: Flow, norm_E: Tensor, out_TE: Tensor, live_R: Tensor | None, scratch: Scratch) -> None:
        """Token-wise, after attention: adds it, then the feed-forward part, to the residual; `out_TE`, which may be
        `flow.normed_TE`, becomes the residual's norm with weights `norm_E`."""
        x_TE = scratch.empty(*out_TE.shape, dtype=out_TE.dtype)
        norm = AddNorm(flow.residual_TE, self.feed_forward_norm_E, self.eps)
        decode_alone = flow.projected.latent_TC is None
        self.attention.output(flow.attended_THV, norm, x_TE, scratch, decode_alone=decode_alone)
        self.feed_forward(x_TE, AddNorm(flow.residual_TE, norm_E, self.eps), out_TE, scratch, live_R)
