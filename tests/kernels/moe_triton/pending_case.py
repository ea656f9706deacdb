"""Calls of INT4 experts between pending norms, over poisoned scratch memory, and their answer in float64."""

from __future__ import annotations

from typing import Any

import torch
from experts_case import Experts
from torch import Tensor

from kernels.linear.launch import stream_gate_up
from kernels.moe import launch, schedule
from kernels.moe.pending import PendingExperts
from kernels.moe.schedule import Workspace
from kernels.pending_norm import PIECE, PendingNorm

EPS = 1e-3


class Pending:
    """An `Experts` whose tokens are a pending norm: rows times a weight, and the squares of the rows without it."""

    def __init__(self, tokens: int, multiprocessors: int, before: bool = True, **sizes: Any) -> None:
        self.case = case = Experts(tokens, formats=("int4", "int4"), **sizes)
        random = torch.Generator(case.device).manual_seed(case.seed + 2)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=random, device=case.device) + 0.5

        rows = case.tensors["x"].float() * 3 * uniform(tokens, 1)
        self.x = PendingNorm(case.tensors["x"], rows.square().view(tokens, -1, PIECE).sum(-1), EPS)
        self.inverse = torch.rsqrt(rows.double().square().mean(1, keepdim=True) + EPS)
        self.norm = uniform(case.hidden).bfloat16()
        self.before = self.kept = None
        if before:
            # Of its own stride; padding holds numbers there.
            wide = torch.randn(tokens, case.hidden + 32, generator=random, device=case.device)
            self.before, self.kept = wide[:, 16:-16], wide[:, 16:-16].clone()
        alone = tokens == 1
        self.tiling = (schedule.four_bit_alone if alone else schedule.four_bit_tiled)(
            case.shape, multiprocessors, case.stored
        )
        self.workspace = case.workspace(self.tiling)
        # A product that the way has between the choice and the experts.
        self.weight = torch.randn(32, case.hidden, generator=random, device=case.device).bfloat16()
        self.between = torch.full((tokens, 16), torch.nan, dtype=torch.bfloat16, device=case.device)

    def run(self, out: PendingNorm | Tensor, *, settled: bool, dependent: bool = True) -> None:
        case = self.case
        assert case.weights is not None
        scratch = Workspace.over(self.workspace, case.shape, self.tiling)
        tensors = (self.x.x_TE, case.tensors["id"], case.tensors["weight"], *case.weights, self.x.x_TE)
        launches = launch.ExpertLaunches(*tensors, scratch, case.shape, self.tiling, dependent)
        call = PendingExperts(self.x, *tensors[1:5], launches)
        call.sort()
        if settled:
            stream_gate_up(self.x, self.weight, self.between, early=False, dependent=dependent)
        call.add(self.before, self.norm, out, settled=settled)

    def pending(self) -> PendingNorm:
        """Memory that holds poison."""

        def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.full(shape, torch.nan, dtype=dtype, device=self.case.device)

        return PendingNorm.empty(self.case.tokens, self.case.hidden, EPS, torch.bfloat16, poisoned)

    def expected(self) -> Tensor:
        """Compute what stood before, plus the experts of the divided rows."""
        case = self.case
        x = case.tensors["x"]
        case.tensors["x"] = x.double() * self.inverse
        try:
            return case.expected() + (0 if self.kept is None else self.kept.double())
        finally:
            case.tensors["x"] = x

    def check(self, out: PendingNorm | Tensor) -> None:
        """Check what is added, as `Experts.check` does: what stood before is in fp32, and so is the sum."""
        alive = ~(self.case.tensors["id"] < 0).all(1)
        want = self.expected()
        got = out
        if isinstance(out, PendingNorm):
            assert self.before is not None
            assert self.kept is not None
            got = self.before
            assert torch.equal(got[~alive], self.kept[~alive])
            assert torch.equal(out.x_TE, (got * self.norm.float()).bfloat16())
            squares = got.double().square().view(*out.square_TP.shape, PIECE).sum(-1)
            torch.testing.assert_close(out.square_TP.double(), squares, atol=0, rtol=1e-6)
        added = want - (0 if self.kept is None else self.kept.double())
        bound = 2**-7 * added.norm(dim=1)
        if not isinstance(out, PendingNorm):
            bound += 2**-9 * want.norm(dim=1)
        error = (got.double() - want).norm(dim=1)
        assert bool((error[alive] <= bound[alive]).all()), (error / bound)[alive].max()
