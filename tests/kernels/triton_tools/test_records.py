"""Constants and pointers that kernels take together, as a NamedTuple: they compile as if each came alone, every process
finds what one has compiled, and the kernels' own are made of fields alone."""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from tests.support.hopper import compile_only

ROOMS = ("head_linear", "mla_decode", "mla_prefill", "sampling", "linear", "few_experts")
"""Families of kernels that take constants together."""
MOST_PARAMETERS = 22


class Cut(NamedTuple):
    lanes: int
    columns: int
    stride: int
    parts: int
    precision: str
    halved: bool


class Pointers(NamedTuple):
    x: Any
    y: Any


class Nothing(NamedTuple):
    pass


@triton.jit
def add_together(at, mask, CUT: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0)
    PARTS: tl.constexpr = CUT.parts
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * CUT.stride, mask=mask, other=0.0)
    return x


@triton.jit
def add_apart(at, mask, STRIDE: tl.constexpr, PARTS: tl.constexpr):
    x = tl.load(at, mask=mask, other=0.0)
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * STRIDE, mask=mask, other=0.0)
    return x


@triton.jit(do_not_specialize=["rows"])
def together(pointers, rows, CUT: tl.constexpr):
    i = tl.arange(0, CUT.lanes)
    for first in range(0, rows, CUT.lanes):
        at = (first + i[:, None]) * CUT.stride + i[None, :]
        x = add_together(pointers.x + at, (i < CUT.columns)[None, :], CUT)
        if CUT.halved and CUT.parts > 1:
            x = x * (CUT.parts - 1) / CUT.parts
        tl.store(pointers.y + at, tl.dot(x, x, input_precision=CUT.precision))


@triton.jit(do_not_specialize=["rows"])
def apart(
    x_at,
    y_at,
    rows,
    LANES: tl.constexpr,
    COLUMNS: tl.constexpr,
    STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
    HALVED: tl.constexpr,
):
    i = tl.arange(0, LANES)
    for first in range(0, rows, LANES):
        at = (first + i[:, None]) * STRIDE + i[None, :]
        x = add_apart(x_at + at, (i < COLUMNS)[None, :], STRIDE, PARTS)
        if HALVED and PARTS > 1:
            x = x * (PARTS - 1) / PARTS
        tl.store(y_at + at, tl.dot(x, x, input_precision=PRECISION))


CUTS = [Cut(32, 20, 64, 3, "ieee", True), Cut(32, 32, 64, 1, "tf32", False)]


def instructions(kernel: Any) -> list[str]:
    """The lines of a compiled kernel's PTX, but for its name and for what debuggers read."""
    body = kernel.asm["ptx"].replace(kernel.metadata.name, "kernel").partition(".section")[0]
    lines = [line.partition("//")[0].strip() for line in body.splitlines()]
    return [line for line in lines if line and not line.startswith((".loc", ".file", "$L__tmp", "$L__func"))]


def compiled(cut: Cut) -> Any:
    x = torch.zeros(64, 64)
    with compile_only() as kernels:
        together[(1,)](Pointers(x, x), 50, cut)
    return kernels[0]


@pytest.mark.parametrize("cut", CUTS)
def test_together_or_apart_compile_to_the_same(cut: Cut) -> None:
    x = torch.zeros(64, 64)
    with compile_only() as kernels:
        apart[(1,)](x, x, 50, *cut)
    assert instructions(kernels[0]) == instructions(compiled(cut))


def test_every_constant_counts_for_what_is_kept() -> None:
    """Another value compiles another kernel; the same values, made anew, compile nothing."""
    others = [CUTS[0]._replace(lanes=64), CUTS[0]._replace(columns=21), CUTS[0]._replace(halved=False)]
    assert len({compiled(cut).hash for cut in [CUTS[0], *others]}) == 4
    assert compiled(Cut(*CUTS[0])) is compiled(CUTS[0])


@pytest.mark.long
def test_other_processes_find_what_one_has_compiled() -> None:
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    program = f"import sys; sys.path[:0] = {paths}; import test_records as t; print(t.compiled(t.CUTS[0]).hash)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.split() == [compiled(CUTS[0]).hash], done.stderr


def test_a_hook_of_tritons_can_write_them_down(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook is set while graphs are captured, for example. Then Triton writes all constants as JSON before it
    compiles."""
    seen: list[Any] = []
    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", lambda **about: seen.append(about["compile"]["constants"]))
    compiled(Cut(16, 16, 64, 2, "ieee", False))
    assert Cut(16, 16, 64, 2, "ieee", False) in seen[0].values()


def members(room: str) -> Iterator[Any]:
    """Everything that the modules of a family of kernels define."""
    package = import_module(f"kernels.{room}")
    for info in iter_modules(package.__path__, f"{package.__name__}."):
        module = import_module(info.name)
        yield from (member for member in vars(module).values() if getattr(member, "__module__", "") == info.name)


@pytest.mark.parametrize("room", ROOMS)
def test_signatures_stay_short(room: str) -> None:
    kernels = [member for member in members(room) if isinstance(member, triton.JITFunction)]
    assert kernels
    for kernel in kernels:
        assert len(kernel.params) <= MOST_PARAMETERS, f"{kernel.fn.__name__} has {len(kernel.params)} parameters"


@pytest.mark.parametrize("room", ROOMS)
def test_they_have_fields_alone(room: str) -> None:
    """A property's or a method's result would be compiled in, and Triton would not notice when its code has changed."""
    records = [member for member in members(room) if inspect.isclass(member) and hasattr(member, "_fields")]
    assert records
    for record in records:
        # `pickle` leaves `__slotnames__` behind.
        more = set(vars(record)) - set(vars(Nothing)) - set(record._fields) - {"__slotnames__"}
        assert not more, f"{record.__name__} has {sorted(more)}"
        own = {"value", "values", "type"} & set(record._fields)
        assert not own, f"{record.__name__}.{own} would be what Triton's wrapper of a constant or a tuple calls so"
