"""Calls of the experts with activations in FP8, kernel by kernel, each judged by what the one before has really left.

Whole calls could only be judged by a wide bound: what a sum in few bits moves a little may be rounded to the other of
two numbers, which differ by up to an eighth.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
import torch.nn.functional as F
from experts_case import Experts, exact
from torch import Tensor

from kernels.moe import schedule, w4a8_launch, w8a8_launch
from kernels.moe.schedule import ExpertTiling
from kernels.quantize import GROUP, LEAST_SCALE, MOST, quantize_reference

BLOCKS: Final = ((128, 128), (128, 128))
IN_TENSOR_CORES: Final = 2**-10
"""Bound of what sums of random numbers lose there, relative to the magnitudes of the products that are summed: the
cores add up 32 products and the sum so far, 4 times for 128 features, and drop what lies 13 bits below the largest of
these."""
IN_FP32: Final = 2**-18
"""The same where sums are fp32, as the emulator's are."""
ALL: Final = 2**-3
"""Bound of what both roundings to FP8 may lose, as a share of a whole result's norm: each loses a fortieth of what is
rounded, more where a few numbers are most of it. A pair that goes wrong is off by all of its norm."""


def tiled(case: Experts, programs: int, **product: Any) -> ExpertTiling:
    """The tiling for activations in FP8, with changes of both products."""
    of = schedule.w4a8 if case.stored[0].format == "mxfp4" else schedule.w8a8
    tiling = of(case.shape, programs, case.stored)
    return replace(tiling, gate_up=replace(tiling.gate_up, **product), down=replace(tiling.down, **product))


@dataclass(frozen=True)
class Stages:
    """Output of each kernel of a call."""

    case: Experts
    pair: Tensor
    """Pair at every place in the sorted order."""
    tokens: tuple[Tensor, Tensor]
    inputs: tuple[Tensor, Tensor]
    """Numbers and scales, as those of the tokens."""
    results: Tensor
    """Results of every pair."""
    in_bf16: bool
    """Whether inputs of `down` are rounded to bf16 before they are rounded to FP8."""

    @staticmethod
    def run(case: Experts, tiling: ExpertTiling) -> Stages:
        """Launch the kernels of a call one after the other."""
        call = case.call(tiling, case.workspace(tiling))
        scratch, shape = call.scratch, case.shape
        call.sort()
        call.quantize()
        number, scale = (w4a8_launch if tiling.w4a8 else w8a8_launch).tokens(scratch, shape)
        tokens = _copy(number), scale.clone()
        if tiling.w4a8:
            call.gather()
        call.gate_up()
        number, scale = (w4a8_launch if tiling.w4a8 else w8a8_launch).inputs(scratch, shape)
        if tiling.w4a8:  # those of a group lie side by side
            scale = scale.t()
        inputs = _copy(number), scale.clone()
        call.down()
        call.combine()
        wanted = int((case.tensors["id"] >= 0).sum())
        return Stages(
            case, scratch.sorted_Y[:wanted].long(), tokens, inputs, scratch.partial_YGE[:, 0].clone(), tiling.w4a8
        )

    def check(self, lost: float) -> None:
        """Every kernel's share, and the whole. `lost`: of a sum's magnitudes."""
        self._check_tokens()
        live = self.case.tensors["id"].flatten()[self.pair]
        for expert in live.unique().tolist():
            place = (live == expert).nonzero().squeeze(1)
            self._check_inputs(expert, place, lost)
            self._check_results(expert, place, lost)
        self._check_nothing_else_is_written()
        self._check_sums()

    def _check_tokens(self) -> None:
        """The same bits as the reference, of every token that is no padding."""
        number, scale = (part.cpu() for part in self.tokens)
        want = torch.empty_like(number), torch.empty_like(scale)
        quantize_reference(self.case.tensors["x"].cpu(), *want)  # a GPU's torch does not divide by a number exactly
        live = (self.case.tensors["id"] >= 0).any(1).cpu()
        assert torch.equal(number[live].view(torch.uint8), want[0][live].view(torch.uint8))
        assert torch.equal(scale[live], want[1][live])

    def _check_inputs(self, expert: int, place: Tensor, lost: float) -> None:
        assert self.case.weights is not None
        x = dequantized(*self.tokens)[self.pair[place] // self.case.chosen]
        gate_up = exact(self.case.weights[0], expert)
        gate, up = F.linear(x, gate_up).chunk(2, 1)
        off_gate, off_up = (lost * part for part in F.linear(x.abs(), gate_up.abs()).chunk(2, 1))
        want = self.case.activated(gate, up)  # a clamp moves nothing further apart
        off = 1.1 * off_gate * (up.abs() + off_up) + F.silu(gate).abs() * off_up  # silu is nowhere steeper than 1.1
        if self.in_bf16:
            off = off + 2**-8 * (want.abs() + off)
        number, scale = self.inputs[0][place], self.inputs[1][place].double()
        largest, grouped = partial(torch.amax, dim=-1), partial(Tensor.unflatten, dim=1, sizes=(-1, GROUP))
        most, unsure = largest(grouped(want.abs())), largest(grouped(off))
        assert bool(((MOST * scale - most).abs() <= unsure + 2**-20 * most + MOST * LEAST_SCALE).all())
        # Half of the distance between two numbers of e4m3: normal ones, and those near zero.
        step = 2**-4 * (want.abs() + off) + 2**-10 * scale.repeat_interleave(GROUP, 1)
        assert bool(((dequantized(number, scale) - want).abs() <= 1.001 * step + off).all())

    def _check_results(self, expert: int, place: Tensor, lost: float) -> None:
        """Rounded to bf16 at the end."""
        assert self.case.weights is not None
        act, down = dequantized(self.inputs[0][place], self.inputs[1][place]), exact(self.case.weights[1], expert)
        want, off = F.linear(act, down), lost * F.linear(act.abs(), down.abs())
        found = self.results[self.pair[place]].double()
        assert bool(((found - want).abs() <= off + 2**-8 * (want.abs() + off)).all())
        assert float(((found - want).norm(dim=1) / want.norm(dim=1).clamp(min=1e-30)).max()) < 2**-8

    def _check_nothing_else_is_written(self) -> None:
        idle = torch.ones(len(self.results), dtype=torch.bool, device=self.results.device)
        idle[self.pair] = False
        assert bool(self.inputs[1][len(self.pair) :].isnan().all())
        assert bool(self.inputs[0][len(self.pair) :].float().isnan().all())
        assert not self.results[~idle].isnan().any()

    def _check_sums(self) -> None:
        """Check the sums against what the pairs' results really are, and all in all against what is exact."""
        id, weight, out = (self.case.tensors[name] for name in ("id", "weight", "out"))
        results = self.results.double().view(*id.shape, -1)
        terms = torch.where((id >= 0).unsqueeze(2), results * weight.double().unsqueeze(2), 0.0)
        want, size = terms.sum(1), terms.abs().sum(1)
        if self.case.added:
            before = self.case.inputs["before"].double()
            want, size = want + before, size + before.abs()
        assert bool(((out.double() - want).abs() <= 2**-8 * want.abs() + 2**-20 * size).all())
        exactly = self.case.expected()
        error = (out.double() - exactly).norm(dim=1)
        worst = int((error - ALL * exactly.norm(dim=1)).nan_to_num(torch.inf).argmax())
        facts = float(error[worst]), float(exactly[worst].norm()), id[worst].tolist(), weight[worst].tolist()
        assert bool((error <= ALL * exactly.norm(dim=1)).all()), (worst, *facts)


def dequantized(number: Tensor, scale: Tensor) -> Tensor:
    """Dequantize activations in FP8 to float64."""
    return number.double() * scale.double().repeat_interleave(GROUP, 1)


def _copy(number: Tensor) -> Tensor:
    return number.view(torch.uint8).clone().view(number.dtype)
