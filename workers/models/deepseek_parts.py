"""Parts of the readable forward pass (`workers.models.deepseek`): products, norms, rope, and the paged cache, which it
reads row by row.

Shape legend: T tokens, E input features, F output features, O rope features, R rows, P pages, K = 64 entries per page,
C features or bytes of an entry, S entries of a row, A features of a query's latent, H heads of this rank, N features
without rope, V value features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.page import PAGE_TOKENS, pages_for
from kernels.residual_streams import StreamGates
from workers.models.attention.latent import LatentAttention
from workers.models.config import ResidualStreams
from workers.models.layer_ops import NormGate
from workers.weights.weight import Weight


@dataclass(frozen=True)
class PagedTokens:
    """Tokens of any rows, in any order and number. A token's entry lies at its own position."""

    row_T: Tensor
    """int64: whose page table is a token's."""
    position_T: Tensor
    """int64: of a token in its row."""
    page_RP: Tensor
    """int32 page tables. What stands in them behind a row's last token is never read."""

    @property
    def slot_T(self) -> Tensor:
        """Index of each token's entry in the flattened cache [P * 64], int64."""
        page_T = self.page_RP[self.row_T, self.position_T // PAGE_TOKENS].long()
        return page_T * PAGE_TOKENS + self.position_T % PAGE_TOKENS

    def contexts(self, cache_PKC: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield for every row: its own tokens, bool [T]; its entries up to the last of these, [S, C]; and the entries
        that each of its tokens sees, bool [own tokens, S]: those up to its own."""
        for row in torch.unique(self.row_T).tolist():
            own_T = self.row_T == row
            last = int(self.position_T[own_T].max())
            page_P = self.page_RP[row, : pages_for(last + 1)]
            seen_TS = torch.arange(last + 1) <= self.position_T[own_T].unsqueeze(1)
            yield own_T, cache_PKC[page_P].flatten(0, 1)[: last + 1], seen_TS


def linear(x_TE: Tensor, weight_FE: Weight) -> Tensor:
    """x · weight^T, of a matrix in any format."""
    return F.linear(x_TE, weight_FE.dequantized(torch.float32))


def norm(x_TE: Tensor, weight_E: Tensor, eps: float, gate: NormGate | None = None) -> Tensor:
    """RMSNorm (Zhang and Sennrich, 2019), times its `gate` where it has one, as in A.X K2."""
    x_TE = F.rms_norm(x_TE, weight_E.shape, weight_E.float(), eps)
    return x_TE if gate is None else x_TE * linear(F.silu(linear(x_TE, gate.down_RE)), gate.up_ER).sigmoid()


def sunk(score_HTS: Tensor, sink_H: Tensor | None) -> Tensor:
    """softmax of each token's scores; in Hy4 with one more in its denominator, of no token: a sink of each head."""
    if sink_H is None:
        return score_HTS.softmax(2)
    sink_HT1 = sink_H.view(-1, 1, 1).expand(-1, score_HTS.shape[1], 1)
    return torch.cat([score_HTS, sink_HT1], 2).softmax(2)[..., :-1]


def both(normed_TA: Tensor, x_TA: Tensor, layer: LatentAttention) -> Tensor:
    """What queries are made of: a latent behind its norm; in A.X K2, which makes gates with them, also before it."""
    return torch.cat([normed_TA, x_TA], 1) if layer.gated else normed_TA


def by_head(q_TF: Tensor, x_TE: Tensor, layer: LatentAttention) -> tuple[Tensor, ...]:
    """Each head's query, without and with rope, and the gate of its output, which has no features where there is none:
    [T, H, N], [T, H, O] and [T, H, V]. A.X K2 makes gates with the queries, Hy4 of the layer's input."""
    heads, tokens = layer.heads, len(q_TF)
    q_THF = q_TF.view(tokens, heads.count, -1)
    if layer.gate_FE is not None:
        q_THF = torch.cat([q_THF, linear(x_TE, layer.gate_FE).view(tokens, heads.count, heads.value)], 2)
    return q_THF.tensor_split([heads.nope, heads.nope + heads.rope], 2)


def opened(out_THV: Tensor, gate_THV: Tensor) -> Tensor:
    """The heads' output, times the sigmoid of its gate where it has one."""
    return out_THV * gate_THV.sigmoid() if gate_THV.shape[2] else out_THV


def swiglu(gate_up_TF: Tensor, limit: float) -> Tensor:
    """silu(gate) * up (Shazeer, 2020), of which Hy4's routed experts clamp both."""
    gate_TI, up_TI = gate_up_TF.chunk(2, 1)
    if limit > 0:
        gate_TI, up_TI = gate_TI.clamp(max=limit), up_TI.clamp(-limit, limit)
    return F.silu(gate_TI) * up_TI


class Residual:
    """The residual stream, or in Hy4 several of them, [T, S, E], all of which begin as the embedding."""

    def __init__(self, x_TE: Tensor, streams: ResidualStreams | None) -> None:
        self.h_TSE = x_TE.unsqueeze(1).repeat(1, 1 if streams is None else streams.count, 1)
        self._open_TS1 = torch.ones(1, 1, 1)

    def read(self, gates: StreamGates | None) -> Tensor:
        """What the next part of a layer reads, [T, E]: a sum of the streams, whose weights are sigmoids of a product
        with all of them. Other such sigmoids are the weights of what is added next."""
        if gates is None:
            return self.h_TSE.squeeze(1)
        count, flat_TF = self.h_TSE.shape[1], self.h_TSE.flatten(1)
        m_TM = F.linear(F.rms_norm(flat_TF, flat_TF.shape[1:], None, gates.norm_eps), gates.weight_MF)
        open_TM1 = (m_TM * gates.scale_G.repeat_interleave(count) + gates.base_M).sigmoid().unsqueeze(2)
        self._open_TS1 = gates.magnitude * open_TM1[:, count:] + gates.eps
        return ((open_TM1[:, :count] + gates.eps) * self.h_TSE).sum(1)

    def add(self, x_TE: Tensor) -> None:
        """Add a part's output to each stream."""
        self.h_TSE = self.h_TSE + self._open_TS1 * x_TE.unsqueeze(1)


def rope(x_TO: Tensor, turn_TO: Tensor) -> Tensor:
    """Turn pairs of features (2i, 2i + 1) by the i-th angle, given as (cos, sin) (Su et al., RoFormer, 2021). Where a
    checkpoint pairs (i, i + half), rows of weights were brought into this order when they were loaded."""
    pair, turn = (torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) for x in (x_TO, turn_TO))
    return torch.view_as_real(pair * turn).flatten(-2)
