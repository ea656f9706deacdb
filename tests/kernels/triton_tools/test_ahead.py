"""Kernels compiled ahead, by several threads: for Hopper, without a GPU."""

from __future__ import annotations

import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Barrier, BrokenBarrierError
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.runtime import build, cache, jit
from triton.runtime.jit import JITFunction

from kernels.runtime.ahead import Share, compile_ahead, distinct, launches_compute, read_version, still_compiled
from tests.support.hopper import compile_only

CPU = torch.device("cpu")


@triton.jit
def scale(x, N: tl.constexpr, BY: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, tl.load(x + i) * BY)


@triton.jit
def odd(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), 0.0)  # N must be a power of two


@triton.jit
def place(a, b, c, d, begin, size):
    pass


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collect what is compiled during the test, from an empty cache."""
    names: list[str] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for kernel in (scale, odd):
        kernel.device_caches.clear()
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: names.append(src.name))
    yield names
    for kernel in (scale, odd):
        kernel.device_caches.clear()


def test_it_is_known_whether_kernels_are_still_in_the_cache(compiled: list[str], tmp_path: Path) -> None:
    x = torch.ones(64)
    with compile_only(), compile_ahead(CPU, threads=2) as done:
        for by in (2, 3):
            scale[(1,)](x, 64, by)
    assert len(done.folders) == 2
    assert still_compiled(done.folders)
    scale.device_caches.clear()
    with compile_only(), compile_ahead(CPU, threads=2) as again:
        scale[(1,)](x, 64, 2)  # which is found in the cache
    assert len(again.folders) == 1
    assert again.folders < done.folders
    shutil.rmtree(tmp_path / next(iter(again.folders)))
    assert not still_compiled(done.folders)
    assert still_compiled(done.folders - again.folders)


def test_the_version_of_triton_is_read_beside_other_work() -> None:
    key = cache.triton_key()
    cache.triton_key.cache_clear()
    read_version()
    for thread in threading.enumerate():
        if thread.name == "Triton's version":
            thread.join()
    assert cache.triton_key.cache_info().currsize == 1
    assert cache.triton_key() == key


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


def test_what_failed_is_tried_again_where_it_is_launched(compiled: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that runs out of memory beside others may not when it is alone."""
    listener = knobs.compilation.listener

    def fail(**given: Any) -> None:
        monkeypatch.setattr(knobs.compilation, "listener", listener)
        raise OSError("no memory for the compiler")

    x = torch.ones(64)
    monkeypatch.setattr(knobs.compilation, "listener", fail)
    with compile_only() as launched:
        with compile_ahead(CPU, threads=1):
            scale[(1,)](x, 64, 2)
        assert compiled == []
        scale[(1,)](x, 64, 2)
    assert compiled == ["scale"]
    assert launched[-1].asm["cubin"]


def test_a_kernel_is_looked_up_once_however_often_it_is_launched(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To hash its source and options takes many times as long as a launch that finds it at once."""
    looked_up, look_up = [], jit.get_cache_key

    def key_of(*what: Any) -> str:
        looked_up.append(what)
        return look_up(*what)

    monkeypatch.setattr(jit, "get_cache_key", key_of)
    x = torch.ones(64)
    with compile_only(), compile_ahead(CPU, threads=1):
        for by in (2, 3) * 10:
            scale[(1,)](x, 64, by)
    assert len(looked_up) == 2


def variants(launches: Callable[[], None], patch: pytest.MonkeyPatch) -> set[str]:
    """Return what Triton would compile for these launches, by its own rule."""
    found: set[str] = set()
    with patch.context() as patched, compile_only():
        patched.setattr(JITFunction, "_do_compile", lambda self, key, *rest: found.add(str(key)))
        launches()
    return found


@pytest.mark.parametrize("step", [1, 2, 3, 4, 8, 16, 20, 64])
@pytest.mark.parametrize("size", [0, 1, 16, 61, 128, 129])
def test_a_few_pieces_launch_every_kernel_of_all(step: int, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one size, and one last that may be smaller; wherever they begin, and whether or not they hand that on."""
    pieces = range(0, size, step)
    tensors = [torch.zeros(256, dtype=dtype) for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64)]

    def launch(some: Iterable[int]) -> None:
        for begin in some:
            place[(1,)](*(x[begin:] for x in tensors), begin, min(step, size - begin))

    assert distinct(pieces) is pieces
    every = variants(lambda: launch(pieces), monkeypatch)
    with compile_ahead(CPU, threads=1):
        few = distinct(pieces)
        assert not launches_compute()
    assert launches_compute()
    assert len(few) <= 7
    assert variants(lambda: launch(few), monkeypatch) == every
    if (step, size) == (1, 129):  # each is needed, but for the last, which is like the first
        for left_out in few[1:-1]:
            others = [piece for piece in few if piece != left_out]
            assert variants(partial(launch, others), monkeypatch) < every


VARIANTS = range(2, 14)


def in_order(monkeypatch: pytest.MonkeyPatch, folder: Path, share: Share) -> list[int]:
    """Return the variants that one thread compiles for this share, one after the other, from an empty cache."""
    order: list[int] = []
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: order.append(src.constants[2,]))
    scale.device_caches.clear()
    with compile_only(), compile_ahead(CPU, 1, share) as done:
        for by in VARIANTS:
            scale[(1,)](torch.ones(64), 64, by)
    assert done.kernels == len(order)
    return order


def test_processes_begin_with_shares_of_their_own_and_meet(
    compiled: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys: dict[str, int] = {}
    monkeypatch.setattr(zlib, "crc32", lambda key: keys.setdefault(key, len(keys)))
    shares = [list(VARIANTS[index::3]) for index in range(3)]
    for own in range(3):
        next_one, last = shares[(own + 1) % 3], shares[(own + 2) % 3]
        order = in_order(monkeypatch, tmp_path / str(own), Share(own, 3))
        assert order == shares[own] + next_one[::-1] + last[::-1]
    assert in_order(monkeypatch, tmp_path / "alone", Share()) == list(VARIANTS)
    assert len(keys) == len(VARIANTS)


def launch_and_fail(share: Share) -> None:
    with compile_only(), compile_ahead(CPU, 1, share):
        for by in VARIANTS:
            scale[(1,)](torch.ones(64), 64, by)
        raise OSError("a peer is gone")


def test_what_goes_wrong_between_launches_leaves_no_share_undone(compiled: list[str]) -> None:
    with pytest.raises(OSError, match="a peer is gone"):
        launch_and_fail(Share(0, 3))
    assert len(compiled) == len(VARIANTS)


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
