"""Random calls of the experts over poisoned scratch memory, and their answer in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.matrix import GROUP, BlockScaled, GroupScaled, Matrix, MicroScaled, MicroScaled4
from kernels.moe import launch, schedule
from kernels.moe.records import Stored, stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Workspace
from kernels.quantize import Fp8Rows
from kernels.rms_norm import AddNorm

WEIGHTS = 1 << 20
"""Distance between the seeds of a case's tokens and of its weights."""
Format = Literal["int4", "mxfp8", "mxfp4"] | tuple[int, int] | None
"""INT4; MXFP8; MXFP4; FP8 with a scale for every block of so many rows and features; or weights in the call's dtype."""


def matrix(shape: tuple[int, ...], format: Format, dtype: torch.dtype, random: torch.Generator) -> Matrix:
    """Random experts' matrices of standard deviation 1 / sqrt(input features)."""
    device, scale = random.device, shape[-1] ** -0.5

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=random, device=device)

    plain = torch.randn(shape, generator=random, device=device)
    if format is None:
        return (plain * scale).to(dtype)
    if format == "int4":
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=random, device=device).to(torch.uint8)
        return GroupScaled(data, ((uniform(*shape[:-1], shape[-1] // GROUP) + 0.5) * scale / 4.6).bfloat16())
    if format == "mxfp8":
        groups = (*shape[:-1], shape[-1] // GROUP)
        exponent = torch.randint(-8, -5, groups, generator=random, device=device)
        exponent += round(math.log2(scale))
        # Far from the largest number, beyond which there is NaN: large matrices have numbers of six deviations.
        return MicroScaled((plain * 48).to(torch.float8_e4m3fn), (exponent + 127).to(torch.uint8))
    if format == "mxfp4":
        data = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=random, device=device).to(torch.uint8)
        exponent = torch.randint(-3, 0, (*shape[:-1], shape[-1] // GROUP), generator=random, device=device)
        return MicroScaled4(data, (exponent + round(math.log2(scale)) + 127).to(torch.uint8)).with_least()
    rows, features = format
    codes = plain * 64
    codes[uniform(*shape) < 0.1] *= 2**-13  # zero and subnormal numbers
    scales = (uniform(*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // features)) + 0.5) * scale / 64
    return BlockScaled(codes.to(torch.float8_e4m3fn), scales, rows, features)


def exact(matrix: Matrix, expert: int) -> Tensor:
    """An expert's matrix in float64, in which no product of a number and its scale is rounded."""
    if isinstance(matrix, Tensor):
        return matrix[expert].double()
    if isinstance(matrix, GroupScaled | MicroScaled | MicroScaled4):
        return matrix[expert].float().double()
    assert isinstance(matrix, BlockScaled)
    rows, features = matrix.shape[1:]
    scales = matrix.scales[expert].double().repeat_interleave(matrix.rows, 0)[:rows]
    return matrix.data[expert].double() * scales.repeat_interleave(matrix.features, 1)[:, :features]


@dataclass
class Experts:
    """One call. Tokens in `padded` have ids -1 and inputs NaN; some pairs of the others are -1 too with `holes`."""

    tokens: int
    chosen: int = 2
    experts: int = 8
    hidden: int = 64
    intermediate: int = 32
    dtype: torch.dtype = torch.bfloat16
    groups: int = 0
    """Above 0 the output is [T, groups, E], holds random numbers and is added to."""
    shared: int = 0
    """The last so many of the experts are the last of every token's."""
    padded: tuple[int, ...] = ()
    holes: bool = False
    skewed: bool = False
    """All tokens choose among the first few experts."""
    device: str = "cpu"
    seed: int = 0
    weights: tuple[Matrix, Matrix] | None = None
    """gate_up and down, to share large ones among cases."""
    formats: tuple[Format, Format] = (None, None)
    """Formats of gate_up and of down, where there are none to share."""
    quantize_activations: bool = False
    """Whether activations may be quantized to FP8: `w8a8_stages` checks such calls."""
    adds: bool = True
    """Whether sums of groups are added to what the output holds."""
    added: bool = False
    """Sums are added to rows that stand somewhere else."""
    limit: float = 0.0
    """Where above 0 gate and up are clamped, which are of the order of 1."""
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        random = torch.Generator(self.device).manual_seed(self.seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random, device=self.device)

        hidden, inner = self.hidden, self.intermediate
        if self.weights is None:
            # From a seed of their own: tokens of cases that share weights would be the rows of the first expert.
            theirs = torch.Generator(self.device).manual_seed(self.seed + WEIGHTS)
            gate_up = matrix((self.experts, 2 * inner, hidden), self.formats[0], self.dtype, theirs)
            down = matrix((self.experts, hidden, inner), self.formats[1], self.dtype, theirs)
            self.weights = gate_up, down
        x = torch.full((self.tokens, hidden + 32), torch.nan, dtype=self.dtype, device=self.device)[:, 16:-16]
        x.copy_(normal(self.tokens, hidden))
        routed, own = self.experts - self.shared, self.chosen - self.shared
        among = own + 1 if self.skewed else routed
        id = torch.rand(self.tokens, among, generator=random, device=self.device).argsort(-1)[:, :own]
        last = torch.arange(routed, self.experts, device=self.device).expand(self.tokens, -1)
        id = torch.cat([id, last], 1)
        weight = torch.rand(id.shape, generator=random, device=self.device)
        if self.holes:
            id[torch.rand(id.shape, generator=random, device=self.device) < 0.3] = -1
        for token in self.padded:
            id[token], x[token], weight[token] = -1, torch.nan, torch.nan
        behind = torch.zeros(self.tokens + 64, self.chosen, dtype=torch.int64, device=self.device)
        behind[: self.tokens] = id  # what lies behind the ids are ids
        self.tensors = {
            "x": x,
            "id": behind[: self.tokens],
            "weight": weight,
            "out": torch.full((self.tokens, hidden + 16), torch.nan, dtype=self.dtype, device=self.device)[:, :-16],
        }
        if self.groups:
            self.tensors["out"] = normal(self.tokens, self.groups, hidden)
        if self.added:
            self.tensors["before"] = normal(self.tokens, hidden + 32).to(self.dtype)[:, :-32]
        self.inputs = {name: tensor.clone() for name, tensor in self.tensors.items()}

    @property
    def shape(self) -> ExpertsShape:
        return ExpertsShape(
            self.tokens,
            self.chosen,
            self.experts,
            self.hidden,
            self.intermediate,
            self.dtype,
            self.groups,
            self.shared,
            quantize_activations=self.quantize_activations,
            limit=self.limit,
        )

    def refill(self) -> None:
        for name, tensor in self.tensors.items():
            tensor.copy_(self.inputs[name])

    @property
    def stored(self) -> tuple[Stored, Stored]:
        assert self.weights is not None
        return stored(self.weights[0]), stored(self.weights[1])

    def tiling(self, **changes: object) -> ExpertTiling:
        """The one that serves the call, with changes."""
        served = schedule.tiling(self.shape, self.stored)
        return schedule.fitted(replace(served, **changes), self.shape)  # type: ignore[arg-type]

    def tall_tiling(self) -> ExpertTiling:
        """The Triton kernels as they serve many tokens, pairs' results rounded however few there are."""
        gate_up, down = schedule.PRODUCTS[128]
        return self.tiling(rows=128, gate_up=gate_up, down=down, partial=self.dtype)

    def workspace(self, tiling: ExpertTiling) -> Tensor:
        """Full of NaN and of ids and counts that no memory has."""
        buffer = torch.empty(Workspace.bytes(self.shape, tiling), dtype=torch.uint8, device=self.device)
        self.poison(buffer, tiling)
        return buffer

    def poison(self, buffer: Tensor, tiling: ExpertTiling) -> None:
        buffer.fill_(0x7F)
        scratch = Workspace.over(buffer, self.shape, tiling)
        scratch.act_YI.fill_(torch.nan)
        scratch.partial_YGE.fill_(torch.nan)
        if self.quantize_activations:  # bytes that are NaN in any format
            buffer[scratch.act_YI.data_ptr() - buffer.data_ptr() :].fill_(0xFF)

    def norm(self) -> AddNorm:
        """Make the norm of a residual with rows of its own stride."""
        random = torch.Generator(self.device).manual_seed(self.seed + 1)
        wide = torch.randn(self.tokens, self.hidden + 16, generator=random, device=self.device).to(self.dtype)
        weight = torch.rand(self.hidden, generator=random, device=self.device).to(self.dtype)
        return AddNorm(wide[:, :-16], weight, 1e-3)

    def check_norm(self, norm: AddNorm, sum: Tensor) -> None:
        """Check the residual and its norm after a call with `norm`: the residual is what `sum`, rounded as it is, has
        been added to, bit for bit."""
        want = (self.norm().residual_TE.float() + sum.float()).to(self.dtype)
        assert torch.equal(norm.residual_TE, want)
        normed = F.rms_norm(want.double(), (self.hidden,), norm.weight_E.double(), norm.eps)
        rtol = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-11 * 1.1}[self.dtype]
        torch.testing.assert_close(self.tensors["out"].double(), normed, atol=1e-6, rtol=rtol)

    def call(
        self,
        tiling: ExpertTiling,
        workspace: Tensor,
        dependent: bool = False,
        norm: AddNorm | None = None,
        rounded: tuple[Tensor, Tensor] | None = None,
        round_to: Fp8Rows | None = None,
    ) -> launch.ExpertLaunches:
        assert self.weights is not None
        t, scratch = self.tensors, Workspace.over(workspace, self.shape, tiling)
        tensors = (t["x"], t["id"], t["weight"], *self.weights, t["out"])
        before = t["out"] if self.groups and self.adds else t.get("before")
        how = (dependent, norm, rounded, before, round_to)
        return launch.ExpertLaunches(*tensors, scratch, self.shape, tiling, *how)

    def run(
        self,
        tiling: ExpertTiling | None = None,
        dependent: bool = False,
        norm: AddNorm | None = None,
        rounded: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        tiling = tiling or schedule.tiling(self.shape, self.stored)
        self.call(tiling, self.workspace(tiling), dependent, norm, rounded).run()
        return self.tensors["out"]

    def expected(self) -> Tensor:
        """Expert by expert in float64, [T, E]; with groups group by group, [T, groups, E]."""
        assert self.weights is not None
        gate_up, down = self.weights
        x, id, weight = (self.tensors[name] for name in ("x", "id", "weight"))
        parts = max(self.groups, 1)
        out = torch.zeros(self.tokens, parts, self.hidden, dtype=torch.float64, device=self.device)
        for expert in range(self.experts):
            token, column = (id == expert).nonzero(as_tuple=True)
            if len(token):
                gate, up = F.linear(x[token].double(), exact(gate_up, expert)).chunk(2, -1)
                act = self.activated(gate, up).unflatten(1, (parts, -1))
                y = torch.einsum("tgi,egi->tge", act, exact(down, expert).unflatten(1, (parts, -1)))
                out.index_add_(0, token, y * weight[token, column].double()[:, None, None])
        if self.added:
            out += self.inputs["before"].double().unsqueeze(1)
        if self.groups and self.adds:
            out += self.inputs["out"].double()
        return out if self.groups else out[:, 0]

    def activated(self, gate: Tensor, up: Tensor) -> Tensor:
        """What `down` reads, not rounded."""
        if self.limit:
            gate, up = gate.minimum(gate.new_tensor(self.limit)), up.clip(-self.limit, self.limit)
        return F.silu(gate) * up

    def check(self) -> None:
        """bfloat16: what the gate makes, and at times a pair's result, is rounded to 8 bits, and the output once more;
        independent errors, so the norm of a row's error is about 2**-8.5 of the row's. INT4 weights times their scale
        are rounded, too, each by at most 2**-9 of itself and independently, so a sum of them by about 2**-10 of its
        norm. FP8 weights are not. fp32: sums of a few thousand."""
        out, want = self.tensors["out"].double(), self.expected()
        nobody = (self.tensors["id"] < 0).all(1)
        assert torch.equal(out[nobody], want[nobody])
        error = torch.linalg.vector_norm(out - want, dim=-1)
        norm = torch.linalg.vector_norm(want, dim=-1)
        tolerance = {torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}[self.dtype]
        assert bool((error <= tolerance * norm).all()), (error / norm).nan_to_num().max()
