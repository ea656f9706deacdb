"""Random routing cases, some with exact ties, and whether their answer is beyond rounding."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.moe import launch, reference
from kernels.routing_rule import RoutingRule
from kernels.routing_table import GivenExperts


@dataclass
class Routing:
    """One call. With `ties`, many experts copy another's logit and bias, and their groups may tie as well."""

    tokens: int
    experts: int = 64
    chosen: int = 6
    groups: int = 1
    top_groups: int = 1
    scoring: str = "softmax"
    biased: bool = False
    normalize: bool = False
    scale: float = 1.0
    closed_at_zero: bool = False
    shared: int = 0
    padded: tuple[int, ...] = ()
    """Rows of padding, of `rows` rows."""
    rows: int = 0
    ties: bool = False
    parts: int = 0
    """Parts of the logits; their sum is exact."""
    given: bool = False
    """The experts are not chosen. Of one in ten there is none, and some tokens have one twice."""
    device: str = "cpu"
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator().manual_seed(self.seed)
        logit = torch.randn(self.tokens, self.experts, generator=random) * 2
        bias = torch.randn(self.experts, generator=random) * 0.3
        if self.ties:
            copy = torch.randint(0, self.experts, (self.experts,), generator=random) % max(self.experts // 3, 1)
            logit, bias = logit[:, copy], bias[copy]
        if self.parts:
            logit = (logit * 4096).round() / 4096
            others = torch.randint(-4, 5, (self.tokens, self.parts - 1, self.experts), generator=random)
            logit = torch.cat([logit.unsqueeze(1) - others.sum(1, keepdim=True), others], 1)
        live = torch.ones(self.rows or self.tokens, dtype=torch.int32)
        live[list(self.padded)] = 0
        columns = (self.tokens, self.chosen + self.shared)
        given = torch.rand(self.tokens, self.experts, generator=random).argsort(1)[:, : self.chosen]
        twice = torch.rand(self.tokens, generator=random) < 0.3
        from_, to = torch.randint(0, self.chosen, (2,), generator=random).tolist()
        given[twice, to] = given[twice, from_]
        nobody = torch.rand(given.shape, generator=random) < 0.1
        given = given.masked_fill(nobody, -1 if self.seed % 2 else self.experts)
        row = torch.randperm(2 * self.tokens, generator=random)[: self.tokens]
        table = torch.full((2 * self.tokens, self.chosen), -7, dtype=torch.int32)
        table[row] = given.to(torch.int32)
        self.tensors = {
            "given": given.to(self.device),
            "table": table.to(self.device),
            "row": row.to(self.device),
            "logit": logit.to(self.device),
            "bias": bias.to(self.device),
            "live": live.to(self.device),
            "id": torch.full(columns, 2**40, device=self.device),
            "weight": torch.full(columns, torch.nan, device=self.device),
        }
        self.inputs = {name: tensor.clone() for name, tensor in self.tensors.items()}

    def refill(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(self.inputs[name])

    def run(self, dependent: bool = False) -> None:
        t = self.tensors
        live = t["live"] if self.padded else None
        given = self._table(t) if self.given else None
        launch.route(*self._call(t["logit"], t["bias"], t["id"], t["weight"]), live, given, dependent=dependent)

    @staticmethod
    def _table(tensors: dict[str, Tensor]) -> GivenExperts:
        """The given experts, in a table that has them in another order, and rows between that nobody has."""
        return GivenExperts(tensors["table"], tensors["row"])

    def _call(self, logit: Tensor, bias: Tensor, ids: Tensor, weight: Tensor) -> tuple[object, ...]:
        bias_or_none = bias if self.biased else None
        rule = RoutingRule(self.scoring, self.groups, self.top_groups, self.normalize, self.scale, self.closed_at_zero)
        return (logit, bias_or_none, ids, weight, rule, self.shared)

    def expected(self) -> tuple[Tensor, Tensor]:
        """(ids, weights) of the reference in float64."""
        t = {name: tensor.cpu() for name, tensor in self.inputs.items()}
        ids, weight = torch.empty_like(t["id"]), torch.empty_like(t["weight"], dtype=torch.float64)
        live = t["live"] if self.padded else None
        given = self._table(t) if self.given else None
        reference.route(*self._call(t["logit"].double(), t["bias"].double(), ids, weight), live, given)  # type: ignore[arg-type]
        return ids, weight

    def check(self, least_clear: float = 0.5) -> None:
        """Ids exactly those of the reference in float64 (whose vectorised and scalar parts differ by an ulp, so that it
        breaks some ties), unless rounding decides; weights to a few ulp."""
        want_ids, want_weight = self.expected()
        clear = self.beyond_rounding()
        assert clear.float().mean() >= least_clear
        ids, weight = self.tensors["id"].cpu(), self.tensors["weight"].cpu()
        assert torch.equal(ids[clear], want_ids[clear])
        torch.testing.assert_close(weight[clear].double(), want_weight[clear], rtol=3e-6, atol=1e-9)
        assert bool(((ids >= -1) & (ids < self.experts + self.shared)).all())
        if self.given:
            self._check_sums(ids, weight)

    def _check_sums(self, ids: Tensor, weight: Tensor) -> None:
        """What each expert counts for is what it is named for, as often as it is, and no token has one twice."""
        given, logit = self.inputs["given"].long().cpu(), self.inputs["logit"].double().cpu()
        logit = logit.sum(1) if self.parts else logit
        there = (given >= 0) & (given < self.experts)
        score = SCORES[self.scoring](logit).gather(1, given.where(there, 0)) * there
        score = score / (score.sum(1, keepdim=True) + 1e-20) if self.normalize else score
        live = self.inputs["live"].cpu().repeat_interleave(self.tokens // (self.rows or self.tokens)) > 0
        score *= self.scale * (live | (not self.padded)).unsqueeze(1)
        want = torch.zeros(self.tokens, self.experts + 1, dtype=torch.float64)
        want.scatter_add_(1, given.where(there, self.experts), score)
        ids, weight = ids[:, : self.chosen], weight[:, : self.chosen].double()
        found = torch.zeros_like(want).scatter_add_(1, ids.where(ids >= 0, self.experts), weight)
        torch.testing.assert_close(found, want, rtol=3e-6, atol=1e-9)
        one_hot = torch.zeros_like(want).scatter_add_(1, ids.where(ids >= 0, self.experts), torch.ones_like(weight))
        assert bool((one_hot[:, : self.experts] <= 1).all())

    def beyond_rounding(self) -> Tensor:
        """Tokens whose best scores, and whose groups' ranks, are equal or further apart than fp32 rounds."""
        logit, bias = self.inputs["logit"].double().cpu(), self.inputs["bias"].double().cpu()
        logit = logit.sum(1) if self.parts else logit
        if self.given:
            return torch.ones(self.tokens, dtype=torch.bool)
        score = SCORES[self.scoring](logit)
        choice = score + bias if self.biased else score
        clear = torch.ones(self.tokens, dtype=torch.bool)
        if self.groups > 1:
            member = choice.view(self.tokens, self.groups, -1)
            rank = member.topk(2, -1).values.sum(-1) if self.biased else member.amax(-1)
            clear &= _apart(rank, self.top_groups)
            best = rank.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_groups]
            opened = member.gather(1, best.unsqueeze(-1).expand(-1, -1, member.shape[-1])).flatten(1)
            closed = torch.zeros(self.tokens, (self.groups - self.top_groups) * member.shape[-1], dtype=opened.dtype)
            choice = torch.cat([opened, closed], 1) if self.closed_at_zero else opened
        return clear & _apart(choice, self.chosen)


SCORES = {
    "softmax": lambda logit: torch.softmax(logit, -1),
    "sigmoid": torch.sigmoid,
    "sqrt_softplus": lambda logit: torch.nn.functional.softplus(logit).sqrt(),
}


def _apart(x: Tensor, count: int) -> Tensor:
    best = x.sort(-1, descending=True).values[:, : count + 1]
    gap = -best.diff(dim=-1)
    return ((gap == 0) | (gap > 1e-6 * best.abs()[:, 1:].clamp(min=1e-6))).all(-1)


V2_LITE = {"experts": 64, "chosen": 6}
V2 = {"experts": 160, "chosen": 6, "groups": 8, "top_groups": 3, "scale": 16.0}
V3 = {
    "experts": 256,
    "chosen": 8,
    "groups": 8,
    "top_groups": 4,
    "scoring": "sigmoid",
    "biased": True,
    "normalize": True,
    "scale": 2.5,
}
KIMI = {"experts": 384, "chosen": 8, "scoring": "sigmoid", "biased": True, "normalize": True, "scale": 2.827}
DEMO = {**V3, "experts": 8, "chosen": 2, "groups": 4, "top_groups": 2}
AXK2 = {**V3, "experts": 32, "groups": 4, "top_groups": 1, "closed_at_zero": True}
"""With experts so few that some tokens choose of closed groups."""
V4 = {"experts": 256, "chosen": 6, "scoring": "sqrt_softplus", "biased": True, "normalize": True, "scale": 1.5}
MODELS = {"V2-Lite": V2_LITE, "V2": V2, "V3": V3, "Kimi": KIMI, "demo": DEMO, "A.X K2": AXK2, "V4": V4}
MODELS["V4, by table"] = {**V4, "biased": False, "given": True}
