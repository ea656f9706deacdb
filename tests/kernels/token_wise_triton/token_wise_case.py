"""Random inputs of the token-wise kernels in strided rows between poison, and their answers by torch in float64.

A case runs its kernel into its own tensors and checks them. fp32: a few roundings and a sum over a row. bfloat16: one
rounding of a value that fp32 may have put on the other side of a rounding boundary.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.attention_sink import launch_attention_sink
from kernels.latent_entry import launch_rope_cache
from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamGates, StreamMemory, launch_add_to_streams
from kernels.rms_norm import launch_add_rms_norm, launch_rms_norm
from kernels.sigmoid_mul import launch_sigmoid_mul
from kernels.silu_mul import launch_silu_mul
from tests.support.fp8_entries import agree, encoded, read, used

TOLERANCE = {torch.float32: (1e-6, 1e-5), torch.bfloat16: (1e-6, 2**-8), torch.float16: (1e-6, 2**-11 * 1.1)}


def strided(rows: Tensor, device: str, dtype: torch.dtype) -> Tensor:
    """`rows` as a slice of wider rows that hold NaN."""
    wide = torch.full((*rows.shape[:-1], rows.shape[-1] + 24), torch.nan, dtype=dtype, device=device)
    part = wide[..., 16:-8]
    part.copy_(rows)
    return part


def close(got: Tensor, want: Tensor) -> None:
    atol, rtol = TOLERANCE[got.dtype]
    torch.testing.assert_close(got.double().cpu(), want, atol=atol, rtol=rtol)


def ordered_sum(parts: list[Tensor]) -> Tensor:
    """Add up all parts, one after the other."""
    return functools.reduce(torch.add, parts)


class Case(Protocol):
    tensors: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: list[str]

    def run(self, dependent: bool = False) -> None: ...

    def check(self) -> None: ...


@dataclass
class _Tensors:
    tokens: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cpu"
    seed: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def random(self, *shape: int) -> Tensor:
        self.seed += 1
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.seed)).to(self.dtype)

    def keep(self, **tensors: Tensor) -> None:
        """Tensors of the call, and copies of what they hold before it."""
        for name, tensor in tensors.items():
            self.tensors[name] = tensor
            self.inputs[name] = tensor.clone()

    def refill(self) -> None:
        """Put back what the tensors held before the call."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.inputs[name])

    def wide(self, name: str) -> Tensor:
        return self.inputs[name].double().cpu()


@dataclass
class Norm(_Tensors):
    features: int = 64
    add: bool = True
    eps: float = 1e-3
    parts: int = 0
    """Parts of x, in fp32."""

    def __post_init__(self) -> None:
        shape = (self.tokens, self.features)
        x = strided(self.random(*shape), self.device, self.dtype)
        if self.parts:
            x = strided(self.random(self.tokens, self.parts, self.features).float(), self.device, torch.float32)
        self.keep(
            x=x,
            residual=strided(self.random(*shape), self.device, self.dtype),
            weight=(self.random(self.features) * 0.1 + 1).to(self.device),
            out=torch.full(shape, torch.nan, dtype=self.dtype, device=self.device),
        )
        self.outputs = ["out", "residual"]

    def run(self, dependent: bool = False) -> None:
        t = self.tensors
        if self.add:
            launch_add_rms_norm(t["x"], t["residual"], t["weight"], t["out"], self.eps, dependent=dependent)
        else:
            launch_rms_norm(t["x"], t["weight"], t["out"], self.eps, dependent=dependent)

    def check(self) -> None:
        x = self.inputs["x"]
        if self.parts:
            x = ordered_sum([*x.unbind(1)]).to(self.dtype)
        if self.add:
            x = self.inputs["residual"] + x
        assert torch.equal(self.tensors["residual"], x if self.add else self.inputs["residual"])
        close(self.tensors["out"], F.rms_norm(x.double().cpu(), (self.features,), self.wide("weight"), self.eps))


@dataclass
class OutputGate(_Tensors):
    """Heads, each of whose gates lies behind `before` other features in memory. Of one head and nothing else it is a
    norm's gate. `alone`: the gate is what is gated."""

    heads: int = 4
    features: int = 24
    before: int = 40
    alone: bool = False

    def __post_init__(self) -> None:
        shape, made = (self.tokens, self.heads, self.features), self.before + self.features
        made_TF = strided(self.random(self.tokens, self.heads * made) * 3, self.device, self.dtype)
        self.keep(x=(self.random(*shape) * 3).to(self.device, self.dtype), made=made_TF)
        self.outputs = ["x"]

    def run(self, dependent: bool = False) -> None:
        x = self.tensors["x"]
        gate = x if self.alone else self._gate(self.tensors["made"])
        launch_sigmoid_mul(x, gate, x, dependent=dependent)

    def _gate(self, made_TF: Tensor) -> Tensor:
        return made_TF.view(self.tokens, self.heads, -1)[..., self.before :]

    def check(self) -> None:
        gate = self.wide("x") if self.alone else self._gate(self.wide("made"))
        close(self.tensors["x"], self.wide("x") * gate.sigmoid())


@dataclass
class Sink(_Tensors):
    """Heads of attention's output, `before` other features between them; the first token has seen no key, and its
    output is poison."""

    heads: int = 4
    features: int = 24
    before: int = 0

    def __post_init__(self) -> None:
        wide = (self.random(self.tokens, self.heads, self.before + self.features) * 3).to(self.device)
        lse = (self.random(self.tokens, self.heads).float() * 5).to(self.device)
        # A token without keys, and in one place what attention leaves where all keys had NaN in them.
        lse[0], wide[0, ..., : self.before], wide[0, ..., self.before :] = -torch.inf, torch.nan, 0.0
        wide[0, 0, self.before] = torch.nan
        sink = (self.random(self.heads).float() * 5).to(self.device)
        self.keep(out=wide, lse=lse, sink=sink)
        self.outputs = ["out"]

    def run(self, dependent: bool = False) -> None:
        """Launched plainly."""
        t = self.tensors
        launch_attention_sink(t["out"][..., self.before :], t["lse"], t["sink"])

    def check(self) -> None:
        exp = self.wide("lse").exp()
        want = self.wide("out") * (exp / (exp + self.wide("sink").exp())).unsqueeze(-1)
        want[0] = 0.0
        out = self.tensors["out"][..., self.before :]
        assert out[0, 0, 0].isnan()
        close(
            out.masked_fill(out.isnan() & self.inputs["out"][..., self.before :].isnan(), 0.0),
            want[..., self.before :].nan_to_num(),
        )
        left = self.tensors["out"][..., : self.before]
        assert torch.equal(left.nan_to_num(7), self.inputs["out"][..., : self.before].nan_to_num(7))


@dataclass
class Streams(_Tensors):
    """Residual streams. `gates`: 2 for each stream, 1 as at a model's end, 0 where nothing is read, 3 where the streams
    are mixed, for which there are as many gates as streams for each stream."""

    features: int = 64
    streams: int = 4
    gates: int = 2
    eps: float = 1e-3
    mixed: bool = False
    """Whether the streams are mixed before anything is added; so they are with three kinds of gates."""
    keeps: bool = False
    """Whether the sum that is read is wanted as well as its norm."""
    invariant: bool = False

    def __post_init__(self) -> None:
        self.mixed |= self.gates == 3
        shape, made = (self.tokens, self.features), min(self.gates, 2) * self.streams
        made += self.streams**2 * (self.gates == 3)
        memory = StreamMemory.empty(
            self.tokens,
            self.streams,
            self.features,
            lambda *of, dtype: torch.full(of, torch.nan, dtype=dtype),
            mixing=self.mixed,
        )
        self.keep(
            x=strided(self.random(*shape), self.device, self.dtype),
            residual=self.random(self.tokens, self.streams, self.features).to(self.device),
            open=(self.random(self.tokens, self.streams).float() + 1).to(self.device),
            mix=self.random(self.tokens, self.streams, self.streams).float().to(self.device),
            part=memory.part_TPX.to(self.device),
            made=(self.random(made, self.streams * self.features).float() * 0.1).to(self.device),
            base=self.random(made).float().to(self.device),
            scale=(self.random(self.gates).float() + 2).to(self.device),
            weight=(self.random(self.features) * 0.1 + 1).to(self.device),
            out=strided(torch.zeros(shape), self.device, self.dtype),
            sum=torch.zeros(shape, dtype=self.dtype, device=self.device),
        )
        self.outputs = ["out", "residual", "open", "mix", "sum"]

    def run(self, dependent: bool = False) -> None:
        t = self.tensors
        steps = 20 * (self.gates == 3)
        gates = StreamGates(t["made"], t["base"], t["scale"], 2.0, 1e-2, 1e-4, steps) if self.gates else None
        memory = StreamMemory(t["open"], t["part"], t["mix"] if self.mixed else None, t["sum"] if self.keeps else None)
        into = t["residual"], memory, gates, t["weight"], t["out"], self.eps
        launch_add_to_streams(t["x"], *into, invariant=self.invariant, dependent=dependent)

    def check(self) -> None:
        added = self.inputs["open"].unsqueeze(2) * self.inputs["x"].float().unsqueeze(1)
        before = self.wide("residual")
        if self.mixed:
            before = self.inputs["mix"].double().cpu().transpose(1, 2) @ before
        close(self.tensors["residual"], before + added.double().cpu())
        if self.gates < 3:
            assert torch.equal(self.tensors["mix"], self.inputs["mix"])
        if not self.gates:
            assert torch.equal(self.tensors["open"], self.inputs["open"])
            assert torch.equal(self.tensors["out"], self.inputs["out"])
            assert torch.equal(self.tensors["sum"], self.inputs["sum"])
            return
        # What the kernel reads is what it has rounded.
        residual, count = self.tensors["residual"].double().cpu(), self.streams
        normed = F.rms_norm(residual.flatten(1), (count * self.features,), None, 1e-4)
        kinds = torch.tensor([count, count, count**2][: self.gates])
        made = normed @ self.wide("made").t() * self.wide("scale").repeat_interleave(kinds) + self.wide("base")
        if self.gates == 3:
            torch.testing.assert_close(self.tensors["mix"].double().cpu(), mixing(made, count), atol=1e-5, rtol=1e-4)
        gate = made[:, : 2 * count].sigmoid()
        read = (gate[:, :count, None] + 1e-2).mul(residual).sum(1)
        want = self.wide("open") if self.gates == 1 else 2.0 * gate[:, count:] + 1e-2 * (self.gates == 2)
        torch.testing.assert_close(self.tensors["open"].double().cpu(), want, atol=1e-5, rtol=1e-5)
        atol, rtol = TOLERANCE[self.dtype]
        # Roundings of the products and of their sum in fp32 move a gate, and with it what is read of each stream: most
        # in the middle of the sigmoid.
        rounding = 8 * 2.0**-24 * (normed.square() @ self.wide("made").square().t()).sqrt()
        moved = rounding * self.wide("scale").abs().repeat_interleave(kinds)
        moved = (moved[:, : 2 * count] * gate * (1 - gate))[:, :count, None].mul(residual.abs()).sum(1)
        if self.keeps:
            error = (self.tensors["sum"].double().cpu() - read).abs()
            assert bool((error <= moved + atol + rtol * read.abs()).all()), error.max()
        else:
            assert torch.equal(self.tensors["sum"], self.inputs["sum"])
        # The sum of the streams is rounded before its norm is.
        moved *= self.wide("weight").abs() / (read.square().mean(1, keepdim=True) + self.eps).sqrt()
        want = F.rms_norm(read, (self.features,), self.wide("weight"), self.eps)
        error = (self.tensors["out"].double().cpu() - want).abs()
        assert bool((error <= moved + 2 * atol + 3 * rtol * want.abs()).all()), error.max()


def check_tokens_alone(case: Streams) -> None:
    """A token's bits are the same in a call on the same path that has it elsewhere, and others beside it."""
    case.run()
    other = replace(case, seed=case.seed + 50, tensors={}, inputs={}, outputs=[])
    for name, tensor in case.inputs.items():
        moves = name in {"x", "residual", "open", "mix"}
        other.tensors[name][: -3 if moves else None].copy_(tensor[3 if moves else 0 :])
    other.run()
    for name in case.outputs:
        assert torch.equal(other.tensors[name][:-3], case.tensors[name][3:]), name


def check_invariant(case: Streams) -> None:
    """A token's bits are those of a call of its own."""
    assert case.invariant
    case.run()
    for token in (0, case.tokens // 2, case.tokens - 1):
        alone = replace(case, tokens=1, tensors={}, inputs={}, outputs=[])
        for name in ("x", "residual", "open", "mix"):
            alone.tensors[name].copy_(case.inputs[name][token : token + 1])
        for name in ("made", "base", "scale", "weight"):
            alone.tensors[name].copy_(case.inputs[name])
        alone.run()
        for name in case.outputs:
            assert torch.equal(alone.tensors[name][0], case.tensors[name][token]), name


def mixing(made: Tensor, count: int) -> Tensor:
    """Return the mixing matrices of gates in float64."""
    mix = made[:, 2 * count :].unflatten(1, (count, count)).softmax(2) + 1e-2
    mix = mix / (mix.sum(1, keepdim=True) + 1e-2)
    for _ in range(19):
        mix = mix / (mix.sum(2, keepdim=True) + 1e-2)
        mix = mix / (mix.sum(1, keepdim=True) + 1e-2)
    return mix


@dataclass
class Gate(_Tensors):
    features: int = 64
    limit: float = 0.0

    def __post_init__(self) -> None:
        self.keep(
            gate_up=strided(self.random(self.tokens, 2 * self.features) * 3, self.device, self.dtype),
            out=torch.full((self.tokens, self.features), torch.nan, dtype=self.dtype, device=self.device),
        )
        self.outputs = ["out"]

    def run(self, dependent: bool = False) -> None:
        launch_silu_mul(self.tensors["gate_up"], self.tensors["out"], limit=self.limit, dependent=dependent)

    def check(self) -> None:
        gate, up = self.wide("gate_up").chunk(2, -1)
        if self.limit:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        close(self.tensors["out"], F.silu(gate) * up)


@dataclass
class RopeCache(_Tensors):
    """Slots: every third token's is suppressed (into the null page), every fourth's lies outside the cache."""

    heads: int = 3
    latent: int = 32
    rope: int = 16
    eps: float = 1e-6
    fp8: bool = False
    """Whether the cache has FP8 entries; they are compared with those of a plain cache."""

    def __post_init__(self) -> None:
        tokens, width = self.tokens, self.latent + self.rope
        pages = 2 + -(-tokens // PAGE_TOKENS)
        random = torch.Generator().manual_seed(self.seed + 99)
        slot = torch.randperm((pages - 1) * PAGE_TOKENS, generator=random)[:tokens] + PAGE_TOKENS
        slot[2::3] = 0
        slot[3::4] = torch.where(torch.arange(len(slot[3::4])) % 2 == 0, -1, pages * PAGE_TOKENS)
        angle = torch.rand(tokens, self.rope // 2, generator=random) * 6
        turn = torch.stack([angle.cos(), angle.sin()], -1).flatten(1)
        q = strided(self.random(tokens, self.heads, self.rope), self.device, self.dtype)
        self.keep(
            q=q,
            kv=strided(self.random(tokens, width), self.device, self.dtype),
            weight=(self.random(self.latent) * 0.1 + 1).to(self.device),
            rotation=turn.to(self.device),
            slot=slot.to(self.device),
            latent=torch.full((tokens, width), torch.nan, dtype=self.dtype, device=self.device),
            cache=self._cache(pages),
        )
        self.outputs = ["q", "latent", "owned"]
        self.tensors["owned"] = self.tensors["cache"][1:]  # many write to the null page, in any order
        self.inputs["owned"] = self.inputs["cache"][1:]

    def _cache(self, pages: int) -> Tensor:
        if not self.fp8:
            plain = torch.full((1, self.latent + self.rope), 7.0, dtype=self.dtype)
            return plain.expand(pages, PAGE_TOKENS, -1).to(self.device, copy=True)
        size = encoded(torch.zeros(1, self.latent + self.rope, dtype=self.dtype), self.latent).shape[1]
        return torch.full((pages, PAGE_TOKENS, size), 7, dtype=torch.uint8, device=self.device)

    def run(self, dependent: bool = False) -> None:
        t = self.tensors
        order = ("q", "kv", "weight", "rotation", "slot", "latent", "cache")
        launch_rope_cache(*(t[name] for name in order), self.eps, dependent=dependent)

    def check_fp8(self) -> None:
        """Against the kernel that writes plain entries: the same, rounded."""
        plain = replace(self, fp8=False, tensors={}, inputs={}, outputs=[])
        plain.inputs |= {name: self.inputs[name] for name in ("q", "kv", "weight", "rotation", "slot")}
        plain.refill()
        plain.run()
        entry = encoded(plain.tensors["latent"].cpu(), self.latent)
        sizes = self.latent, self.rope, self.dtype
        torch.testing.assert_close(self.tensors["q"], plain.tensors["q"])
        flat, slot, end = self.tensors["cache"].flatten(0, 1), self.tensors["slot"].cpu(), used(*sizes)
        written = (slot >= PAGE_TOKENS) & (slot < len(flat))
        between = slice(self.latent, -(-self.latent // 4) * 4)
        entry[:, between] = 7
        found = flat[slot[written].to(flat.device)]
        assert agree(found, entry[written], *sizes)
        flat = flat.cpu()
        # Attention to the chunk's own tokens sees what attention to the cache will see.
        assert torch.equal(self.tensors["latent"].cpu()[written], read(flat[slot[written]], *sizes))
        assert bool((flat[:, end:] == 7).all())
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[:1] = not bool((slot == 0).any())
        untouched[slot[written]] = False
        assert bool((flat[untouched] == 7).all())

    def check(self) -> None:
        if self.fp8:
            self.check_fp8()
            return
        turn = _pairs(self.wide("rotation"))
        kv = self.wide("kv")
        normed = F.rms_norm(kv[:, : self.latent], (self.latent,), self.wide("weight"), self.eps)
        atol = 2e-2 if self.dtype == torch.bfloat16 else 1e-5  # differences of products may cancel
        self._near("latent", torch.cat([normed, _turned(kv[:, self.latent :], turn)], -1), atol)
        self._near("q", _turned(self.wide("q"), turn[:, None]), atol)
        close(self.tensors["latent"][:, : self.latent], normed)
        flat, slot = self.tensors["cache"].cpu().flatten(0, 1), self.tensors["slot"].cpu()
        written = (slot >= PAGE_TOKENS) & (slot < len(flat))
        assert torch.equal(flat[slot[written]], self.tensors["latent"].cpu()[written])
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[:1] = not bool((slot == 0).any())
        untouched[slot[written]] = False
        assert bool((flat[untouched] == 7.0).all())

    def _near(self, name: str, want: Tensor, atol: float) -> None:
        torch.testing.assert_close(self.tensors[name].double().cpu(), want, atol=atol, rtol=2**-8)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().view(*x.shape[:-1], -1, 2))


def _turned(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(_pairs(x) * turn).flatten(-2)
