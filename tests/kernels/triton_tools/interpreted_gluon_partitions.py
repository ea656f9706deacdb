"""The interpreter's model of Hopper's asynchrony: a correct ring gives right sums under every schedule, and each fault
that a kernel can have shows. Run with TRITON_INTERPRET=1, see test_interpreter_repair.py."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from kernels.testing import gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()

import pytest  # noqa: E402
import torch  # noqa: E402
from triton.experimental import gluon  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.ampere import async_copy  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa: E402

from kernels.testing.gluon_partitions import SCHEDULE  # noqa: E402

TILES = 7


@gluon.jit
def fetch(box, tiles, ring, full, empty):
    for i in range(tiles):
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        mbarrier.expect(full.index(i & 1), box.block_type.nbytes)
        tma.async_copy_global_to_shared(box, [i * 16, 0], full.index(i & 1), ring.index(i & 1))


@gluon.jit
def gather(x, rows, tiles, ring, full, empty, FAULT: gl.constexpr):
    n = gl.arange(0, 16)
    for i in range(tiles):
        mbarrier.wait(empty.index(i & 1), ((i >> 1) & 1) ^ 1)
        at = x + i * 256 + n[:, None] * 16 + n[None, :]
        async_copy.async_copy_global_to_shared(ring.index(i & 1), at, mask=(i * 16 + n < rows)[:, None])
        async_copy.commit_group()
        if FAULT != "does not wait for its copies":
            async_copy.wait_group(0)
        if FAULT != "does not fence its copies":
            fence_async_shared()
        mbarrier.arrive(full.index(i & 1), count=1)


@gluon.jit
def add_up(left, out, tiles, ring, full, empty, FAULT: gl.constexpr):
    n = gl.arange(0, 16)
    at = n[:, None] * 16 + n[None, :]
    factor = gl.load(left + at)
    sums = gl.zeros([16, 16], gl.float32)
    for i in range(tiles):
        if FAULT != "reads before the copy":
            mbarrier.wait(full.index(i & 1), (i >> 1) & 1)
        summing = warpgroup_mma(factor, ring.index(i & 1), sums, is_async=True)
        if FAULT == "hands back before the product":
            mbarrier.arrive(empty.index(i & 1), count=1)
        if FAULT == "uses a product under way":
            sums = warpgroup_mma_wait(1, deps=(summing,))
        else:
            sums = warpgroup_mma_wait(0, deps=(summing,))
        if FAULT == "hands back twice":
            mbarrier.arrive(empty.index(i & 1), count=2)
        if FAULT == "reads before the copy":
            mbarrier.wait(full.index(i & 1), (i >> 1) & 1)
        if (
            not (FAULT == "never hands back")
            | (FAULT == "hands back twice")
            | (FAULT == "hands back before the product")
        ):
            mbarrier.arrive(empty.index(i & 1), count=1)
    gl.store(out + at, sums)


@gluon.jit
def ring_sum(box, x, rows, left, out, tiles, GATHERED: gl.constexpr, FAULT: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.bfloat16, [2, 16, 16], gl.NVMMASharedLayout())
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    adding = (add_up, (left, out, tiles, ring, full, empty, FAULT))
    if GATHERED:
        gl.warp_specialize([adding, (gather, (x, rows, tiles, ring, full, empty, FAULT))], [4], [24])
    else:
        gl.warp_specialize([adding, (fetch, (box, tiles, ring, full, empty))], [1], [24])


def right(fault: str, schedule: int, gathered: bool = False) -> bool:
    """Whether the sum of left @ tile is right, for a tensor that ends inside the last tile."""
    generator = torch.Generator().manual_seed(schedule)
    left, x = (torch.randn(rows, 16, generator=generator).bfloat16() for rows in (16, TILES * 16 - 5))
    out = torch.empty(16, 16)
    SCHEDULE.seed(schedule)
    box = TensorDescriptor(x, x.shape, x.stride(), [16, 16], None)
    ring_sum[(1,)](box, x, len(x), left, out, TILES, GATHERED=gathered, FAULT=fault)
    tiles = torch.cat([x, torch.zeros(5, 16)]).double().view(TILES, 16, 16)
    return torch.allclose(out.double(), (left.double() @ tiles).sum(0), atol=1e-4)


def test_a_correct_ring_is_right_under_every_schedule() -> None:
    assert all(right("none", schedule, gathered) for schedule in range(30) for gathered in (False, True))


@pytest.mark.parametrize("fault", ["hands back before the product", "reads before the copy"])
def test_a_race_gives_wrong_sums_under_some_schedule(fault: str) -> None:
    outcomes = [right(fault, schedule) for schedule in range(30)]
    assert not all(outcomes)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("never hands back", "deadlock, all partitions wait: partition 0 .*phase"),
        ("hands back twice", "more arrivals at a barrier than it counts"),
        ("uses a product under way", "a product that may be unfinished"),
    ],
)
def test_faults_are_named(fault: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        right(fault, 0)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("does not wait for its copies", "ends with copies that nobody waited for"),
        ("does not fence its copies", "what cp.async wrote and nobody fenced"),
    ],
)
def test_faults_of_gathered_copies_are_named(fault: str, says: str) -> None:
    with pytest.raises(Exception, match=says):
        right(fault, 0, gathered=True)
