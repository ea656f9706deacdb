"""Compiling for Hopper without a GPU: the gate sees spills, shared memory and instructions."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from tests.support import hopper
from tests.support.hopper import SHARED_MEMORY_LIMIT, compile_only, instructions, resources, serialized
from tests.support.ptx import emulated


@triton.jit
def square(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    a = tl.load(x + at)
    tl.store(y + at, tl.dot(a, a))


@triton.jit
def greedy(x, y, N: tl.constexpr):
    i = tl.arange(0, N)
    a = tl.load(x + i)
    tl.store(y + i, a * tl.sum(a))  # every value is wanted until the last is there


@gluon.jit
def uses_sums_under_way(out):
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    tiled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_s = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], tiled)
    sums = gl.zeros([64, 64], gl.float32, layout)
    for i in range(8):
        sums = warpgroup_mma(a_s.index(i % 2), a_s.index(i % 2), sums, is_async=True)
        sums = warpgroup_mma_wait(1, deps=(sums,))
        sums = sums * 0.5
    sums = warpgroup_mma_wait(0, deps=(sums,))
    m = gl.arange(0, 64, gl.SliceLayout(1, layout))
    n = gl.arange(0, 64, gl.SliceLayout(0, layout))
    gl.store(out + m[:, None] * 64 + n[None, :], sums)


def test_a_launch_compiles_and_runs_nothing() -> None:
    x, y = torch.ones(64, 64, dtype=torch.bfloat16), torch.full((64, 64), 7.0)
    with compile_only() as compiled:
        square[(1,)](x, y, 64, num_warps=4)
    assert torch.all(y == 7.0)
    found = resources(compiled[0])
    found.check()
    assert found.name == "square"
    assert instructions(compiled[0])["HGMMA"] == 4  # 64 x 64 x 64 in steps of 16
    assert found.shared >= 64 * 64 * 2


def test_spills_and_register_limits_are_caught() -> None:
    x = torch.ones(8192)
    with compile_only() as compiled:
        greedy[(1,)](x, x, 8192, num_warps=1)
    with pytest.raises(AssertionError, match="spills"):
        resources(compiled[0]).check()
    with compile_only() as compiled:
        square[(1,)](torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64), 64, num_warps=4)
    with pytest.raises(AssertionError, match="registers"):
        resources(compiled[0]).check(registers=16)


@pytest.mark.long
def test_too_much_shared_memory_is_caught() -> None:
    x = torch.ones(256, 256)
    with compile_only() as compiled:
        square[(1,)](x.to(torch.bfloat16), x, 256, num_warps=8)
    found = resources(compiled[0])
    assert found.shared < SHARED_MEMORY_LIMIT
    with compile_only() as compiled:
        square[(1,)](x, x, 256, num_warps=8)
    with pytest.raises(AssertionError):
        resources(compiled[0]).check()


def test_serialized_products_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serialized products are noticed when this process compiles them, and when it finds them compiled."""
    with compile_only() as compiled:
        uses_sums_under_way[(1,)](torch.empty(64, 64), num_warps=4)
    assert serialized(compiled[0])
    monkeypatch.setattr(hopper, "_remarks", {})
    assert serialized(compiled[0])


def test_products_that_are_not_serialized() -> None:
    with compile_only() as compiled:
        square[(1,)](torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64), 64, num_warps=4)
    assert not serialized(compiled[0])


def test_what_is_compiled_as_far_as_ptx_is_never_taken_for_machine_code() -> None:
    """Whichever comes first, in this process and on the disk."""
    x = torch.ones(32, 32, dtype=torch.bfloat16)
    for _ in range(2):
        with emulated():
            square[(1,)](x, x.clone(), 32, num_warps=4)
        with compile_only() as compiled:
            square[(1,)](x, x.clone(), 32, num_warps=4)
        assert resources(compiled[0]).registers > 0
        square.device_caches.clear()
