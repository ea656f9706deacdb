"""Layers: latent attention and a feed-forward part (DeepSeek-V2, 2024).

`DecoderLayer.forward` is the whole layer, the body of the loop in `deepseek.forward`. A layer states its own
boundaries: `project` and `finish` are token-wise, attention runs between them. `segments` cuts a pass there.

Shape legend: T tokens, E hidden features, C cached features, R rows, P pages, K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from kernels.rms_norm import AddNorm
from workers.memory.scratch import Scratch
from workers.models.attention.latent import LatentAttention
from workers.models.feed_forward import FeedForward
from workers.models.flow import Flow
from workers.models.token_wise import N


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
    ) -> None:
        self.eps = eps
        self.attention_norm_E, self.attention = attention_norm_E, attention
        self.feed_forward_norm_E, self.feed_forward = feed_forward_norm_E, feed_forward

    def forward(
        self,
        flow: Flow[N],
        attend: Callable[[], None],
        cache_slot_T: Tensor,
        cache_PKC: Tensor,
        norm: AddNorm,
        out: N,
        live_R: Tensor | None,
        scratch: Scratch,
    ) -> None:
        """The whole layer, as passes run that are not cut into segments: `project`, attention of the pass's rows, which
        `attend` launches, and `finish`. Each of the two token-wise parts has all of `scratch`'s free memory."""
        with scratch.scope():
            self.project(flow, cache_slot_T, cache_PKC, scratch)
        attend()
        with scratch.scope():
            self.finish(flow, norm, out, live_R, scratch)

    def project(self, flow: Flow[N], cache_slot_T: Tensor, cache_PKC: Tensor, scratch: Scratch) -> None:
        """Token-wise, before attention: `flow.normed`, of `attention_norm_E`, to what attention reads. Holds
        `deepseek.attention` down to (9)."""
        where = flow.rotation_TO, cache_slot_T, cache_PKC
        self.attention.project(flow.way, flow.normed, *where, flow.projected, scratch)

    def finish(self, flow: Flow[N], norm: AddNorm, out: N, live_R: Tensor | None, scratch: Scratch) -> None:
        """Token-wise, after attention: adds it, then the feed-forward part, to the residual; `out`, which may be
        `flow.normed`, becomes the `norm` of that. Holds (11) to (12) of `deepseek`, and both norms."""
        between = AddNorm(flow.residual_TE, self.feed_forward_norm_E, self.eps)
        tokens, hidden = flow.residual_TE.shape
        x = flow.way.allocate_normed(tokens, hidden, flow.attended_THV.dtype, self.eps, scratch)
        self.attention.output(flow.way, flow.attended_THV, between, x, scratch)
        self.feed_forward(flow.way, x, norm, out, scratch, live_R)
