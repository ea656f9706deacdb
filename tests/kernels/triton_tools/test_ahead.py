"""Kernels compiled ahead, by several threads: for Hopper, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import ModuleType

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import build

from kernels.ahead import compile_ahead
from tests.support.hopper import compile_only

CPU = torch.device("cpu")


@triton.jit
def scale(x, N: tl.constexpr, BY: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) * BY)


@triton.jit
def odd(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0.0)  # N must be a power of two


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is compiled during the test, from an empty cache."""
    names: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (scale, odd):
        kernel.device_caches.clear()
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: names.append(src.name))
    yield names
    for kernel in (scale, odd):
        kernel.device_caches.clear()


def test_kernels_are_compiled_once_and_nothing_runs(compiled: list[str]) -> None:
    x = torch.ones(64)
    with compile_only() as launched:
        with compile_ahead(CPU, threads=2) as done:
            for _ in range(3):
                for by in (2, 3, 4):
                    scale[(1,)](x, 64, by)
        assert done.kernels == 3
        assert compiled == ["scale"] * 3
        for by in (2, 3, 4):
            scale[(1,)](x, 64, by)
        with compile_ahead(CPU, threads=2) as again:
            scale[(1,)](x, 64, 2)
    assert again.kernels == 0
    assert len(compiled) == 3
    assert all(kernel.asm["cubin"] for kernel in launched[-3:])
    assert torch.equal(x, torch.ones(64))


def test_a_kernel_that_does_not_compile_raises_where_it_is_launched(compiled: list[str]) -> None:
    x = torch.ones(64)
    with compile_only():
        with compile_ahead(CPU, threads=1):
            odd[(1,)](x, 48)
            scale[(1,)](x, 64, 2)
        assert compiled == ["scale"]
        with pytest.raises(triton.CompilationError, match="power of 2"):
            odd[(1,)](x, 48)


def test_threads_get_the_launchers_of_their_own_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has one module for all launchers that it loads for the second time: two threads that load one each, and
    look into it when both are loaded, find the later of the two unless each gets its own."""
    shared, both = ModuleType("launcher"), Barrier(2)

    def load(name: str, path: str) -> ModuleType:
        vars(shared)["launch"] = path
        with suppress(BrokenBarrierError):  # the other thread may not come in
            both.wait(0.2)
        return shared

    monkeypatch.setattr(build, "_load_module_from_path", load)
    files = ["gate_up.so", "down.so"]
    with compile_ahead(CPU, threads=1), ThreadPoolExecutor(2) as threads:
        modules = list(threads.map(lambda file: build._load_module_from_path("launcher", file), files))
    assert [module.launch for module in modules] == files
    assert build._load_module_from_path is load
