"""Share of the positions selected by scores in float64 that an index cache in INT8 finds, from the outputs of the
indexer's products to the selection.

Shape legend: T tokens that ask, S cached ones, J heads, I features, O rope features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import sparse
from kernels.index_rope import index_rope
from kernels.page import PAGE_TOKENS

HEADS, FEATURES, ROPE, SELECTED, EPS = 64, 128, 64, 2048, 1e-6
KINDS = ["normal", "needles", "heavy tails", "one large feature"]


class Drawn:
    """Outputs of an indexer's products: queries of `tokens`, and keys of `context` tokens, random in every feature.
    Needles are as many keys as are selected, which lean to the queries."""

    def __init__(self, kind: str, tokens: int, context: int, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.q_TJI = torch.randn(tokens, HEADS, FEATURES).bfloat16()
        self.weight_TJ = torch.randn(tokens, HEADS)
        self.key_SI = torch.randn(context, FEATURES)
        self.norm_I, self.bias_I = torch.ones(FEATURES), torch.zeros(FEATURES)
        self.angle_TO, self.angle_SO = torch.rand(tokens, ROPE // 2) * 6.28, torch.rand(context, ROPE // 2) * 6.28
        if kind == "needles":
            self.q_TJI, self.weight_TJ = (x[:1].repeat_interleave(tokens, 0) for x in (self.q_TJI, self.weight_TJ))
            self.angle_TO, self.angle_SO = torch.zeros_like(self.angle_TO), torch.zeros_like(self.angle_SO)
            lean_I = self.q_TJI[0, self.weight_TJ[0] > 0].float().mean(0)
            self.key_SI[torch.randperm(context)[:SELECTED]] += 5 * lean_I
        elif kind == "heavy tails":
            self.key_SI = torch.distributions.StudentT(3.0).sample(self.key_SI.shape)
        elif kind == "one large feature":
            self.norm_I[17] = 20.0

    def exact(self) -> Tensor:
        """Scores in float64, [T, S]."""
        key_SI = torch.nn.functional.layer_norm(self.key_SI.double(), (FEATURES,), eps=EPS)
        key_SI = _turned(key_SI * self.norm_I + self.bias_I, self.angle_SO)
        q_TJI = _turned(self.q_TJI.double(), self.angle_TO.unsqueeze(1))
        dots = (q_JI @ key_SI.t() for q_JI in q_TJI)
        return torch.stack([weight_J @ dot.relu() for weight_J, dot in zip(self.weight_TJ.double(), dots, strict=True)])

    def selected(self, device: str) -> Tensor:
        """Positions that the project selects, int32 [T, 2048]."""
        tokens, context = len(self.q_TJI), len(self.key_SI)
        index_PKE = torch.zeros(context // PAGE_TOKENS, PAGE_TOKENS, FEATURES + 4, dtype=torch.uint8, device=device)
        no_S = torch.zeros(context, 1)
        key_SI, *_ = self._roped(no_S.unsqueeze(2).repeat(1, 1, FEATURES), no_S, self.key_SI, self.angle_SO, device)
        sparse.write_index_keys(key_SI, torch.arange(context, device=device), index_PKE)
        none_TI = torch.zeros(tokens, FEATURES)
        _, code_TJI, weight_TJ = self._roped(self.q_TJI, self.weight_TJ, none_TI, self.angle_TO, device)
        page_RP = torch.arange(context // PAGE_TOKENS, dtype=torch.int32, device=device).unsqueeze(0)
        row_T, bound_T = (torch.full((tokens,), n, dtype=torch.int32, device=device) for n in (0, context))
        score_TN, fault_1 = (
            torch.empty(tokens, context, device=device),
            torch.zeros(1, dtype=torch.int64, device=device),
        )
        sparse.index_scores(code_TJI, weight_TJ, index_PKE, page_RP, row_T, bound_T, score_TN, fault_1)
        selected_TS = torch.empty(tokens, SELECTED, dtype=torch.int32, device=device)
        workspace = sparse.SelectWorkspace.allocate(
            tokens, context, lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=device)
        )
        sparse.select_positions(score_TN, bound_T, selected_TS, fault_1, workspace)
        assert int(fault_1) == 0
        return selected_TS.cpu()

    def _roped(
        self, q_TJI: Tensor, weight_TJ: Tensor, key_TI: Tensor, angle_TO: Tensor, device: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, and codes and weights of queries."""
        rotation_TO = torch.stack([angle_TO.cos(), angle_TO.sin()], -1).flatten(1).to(device)
        out = torch.empty_like(key_TI, dtype=torch.bfloat16, device=device), torch.empty_like(weight_TJ, device=device)
        code_TJI = torch.empty_like(q_TJI, dtype=torch.int8, device=device)
        both_TX = torch.cat([key_TI, weight_TJ], 1).to(device)
        norms = self.norm_I.to(device), self.bias_I.to(device)
        q_TJI = q_TJI.bfloat16().to(device)
        index_rope(q_TJI, both_TX, *norms, rotation_TO, *out, eps=EPS, factor=1.0, code_TJI=code_TJI)
        return out[0], code_TJI, out[1]


def _turned(x: Tensor, angle: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of the first features turned by the i-th angle."""
    pair = torch.view_as_complex(x[..., :ROPE].contiguous().view(*x.shape[:-1], -1, 2))
    turned = torch.view_as_real(pair * torch.polar(torch.ones_like(angle), angle).to(torch.complex128))
    return torch.cat([turned.flatten(-2), x[..., ROPE:]], -1)


def recall(kind: str, tokens: int, context: int, device: str = "cpu", seed: int = 0) -> float:
    """Return the recall of all tokens together."""
    drawn = Drawn(kind, tokens, context, seed)
    want_TS, got_TS = drawn.exact().topk(SELECTED).indices, drawn.selected(device)
    found = sum(len({*want.tolist()} & {*got.tolist()}) for want, got in zip(want_TS, got_TS, strict=True))
    return found / want_TS.numel()
