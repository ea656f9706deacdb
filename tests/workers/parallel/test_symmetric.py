"""Sums over ranks through symmetric memory, on several GPUs: against fp64, in graphs, the same bits on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from kernels import pending_norm
from kernels.pending_norm import PendingNorm
from tests.support.private_apis import untouched
from workers.parallel import symmetric
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.parallel.symmetric import MOST_BYTES, fits, one_shot_bytes

IN_A_ROW = 50
REPLAYS = 20


@pytest.mark.parametrize(
    ("ranks", "shape", "dtype", "expected"),
    [
        (4, (1, 2048), torch.bfloat16, True),
        (4, (MOST_BYTES // 4,), torch.float32, True),
        (4, (MOST_BYTES // 4 + 4,), torch.float32, False),
        (3, (one_shot_bytes(3) // 4,), torch.float32, True),
        (3, (one_shot_bytes(3) // 4 + 4,), torch.float32, False),
        (16, (8,), torch.float32, False),
        (4, (3,), torch.float32, False),
        (4, (0, 8), torch.float32, False),
        (4, (8, 8), torch.float16, False),
        (4, (8,), torch.int64, False),
    ],
)
def test_only_what_the_kernels_can_sum_goes_there(
    ranks: int, shape: tuple[int, ...], dtype: torch.dtype, expected: bool
) -> None:
    assert fits(torch.empty(shape, dtype=dtype), ranks) == expected


def test_strided_and_misaligned_parts_go_over_nccl() -> None:
    assert not fits(torch.empty(8, 16)[:, :8], 2)
    assert not fits(torch.empty(9)[1:], 2)


@pytest.mark.parametrize(("ranks", "largest"), [(2, (1 << 20) + 16), (8, (1 << 19) + 16), (3, 16)])
@pytest.mark.parametrize("wrong", [None, 16, "largest"])
def test_no_way_to_sum_is_trusted_untried(
    ranks: int,
    largest: int,
    wrong: int | str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two shots are tried only where there are as many ranks as its kernel serves. A rank tries all, whatever came out:
    the others do, too, and would wait for it."""
    tried: list[int] = []

    class Sums:
        def __init__(self, device: torch.device) -> None:
            pass

        def part(self, out: torch.Tensor) -> torch.Tensor:
            return torch.empty_like(out)

        def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
            tried.append(part.nbytes)
            out.fill_(float(part[0]) * ranks * (ranks + 1) / 2)
            if part.nbytes == (largest if wrong == "largest" else wrong):
                out[-1] = 0.5

    def gather(everyone: list[object], own: object) -> None:
        everyone[:] = [own] * len(everyone)

    monkeypatch.setattr(symmetric, "SymmetricSum", Sums)
    monkeypatch.setattr(symmetric.dist, "all_gather_object", gather)
    found = symmetric.connect(0, ranks, torch.device("cpu"))
    assert tried == sorted({16, largest})
    assert (found is None) == (wrong is not None)
    assert ("came out as 0.5" in caplog.text) == (wrong is not None)


@pytest.mark.parametrize("name", ["rendezvous", "empty", "buffer_ptrs", "two_shot_all_reduce_out"])
def test_without_symmetric_memory_sums_go_over_nccl(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import torch.distributed._symmetric_memory as memory

    def gather(everyone: list[object], own: object) -> None:
        everyone[:] = [own] * len(everyone)

    monkeypatch.setattr(symmetric.dist, "all_gather_object", gather)
    monkeypatch.setenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", "to be restored")
    handle = torch._C._distributed_c10d._SymmetricMemory
    gone = next((place for place in (memory, handle) if hasattr(place, name)), torch.ops.symm_mem)
    getattr(gone, name)
    monkeypatch.delattr(gone, name)
    if gone is torch.ops.symm_mem:  # which looks for operators that it does not have
        monkeypatch.setattr(type(gone), "__getattr__", object.__getattribute__)
    with untouched(symmetric):
        assert symmetric.connect(0, 2, torch.device("cpu")) is None
    [record] = caplog.records
    assert record.getMessage().startswith("all-reduce over NCCL alone, which is slower for small batches")
    assert f"torch {torch.__version__} has no torch." in record.getMessage()
    assert name in record.getMessage()


def parts_of(ranks: int, shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(dtype) for _ in range(ranks)]


def check(got: torch.Tensor, parts: list[torch.Tensor]) -> None:
    exact = torch.stack(parts).double().sum(0)
    largest = torch.stack(parts).double().abs().sum(0)
    # One rounding for every part after the first.
    bound = largest * (len(parts) - 1) * torch.finfo(parts[0].dtype).eps
    assert bool(((got.cpu().double() - exact).abs() <= bound).all())


def check_sums(group: Group, device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Eager, then twice in a graph, the second sum over the first's result; and the same bits everywhere."""
    ranks = group.mesh.world.size
    x, sum = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
    part = group.part(sum)
    assert (part.data_ptr() == sum.data_ptr()) == group.sums_by_kernel(sum)
    parts = parts_of(ranks, shape, dtype, seed=shape[0])
    part.copy_(parts[group.mesh.world.rank])
    group.all_reduce(part, sum)
    check(sum, parts)
    everyone = torch.empty(ranks, *shape, dtype=dtype, device=device)
    group.all_gather(sum, everyone)
    assert all(torch.equal(other, sum) for other in everyone)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        part.copy_(x)
        group.all_reduce(part, sum)
        part = group.part(x)
        part.copy_(sum)
        group.all_reduce(part, x)
    for replay in range(REPLAYS):
        parts = parts_of(ranks, shape, dtype, seed=100 + replay)
        x.copy_(parts[group.mesh.world.rank])
        graph.replay()
        # The second sum adds the first's result once for every rank: exactly so many times the value.
        check(x / ranks, parts)
    graph.reset()


def check_row_of_sums(group: Group, device: torch.device, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Sums one behind the other: none sees a part of its neighbours. Each is the first, scaled by a power of two."""
    x = parts_of(group.mesh.world.size, shape, dtype, seed=7)[group.mesh.world.rank].to(device)
    scales = [2.0 ** (index % 3) for index in range(IN_A_ROW)]
    sums = [x * scale for scale in scales]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for scale, sum in zip(scales, sums, strict=True):
            part = group.part(sum)
            torch.mul(x, scale, out=part)
            group.all_reduce(part, sum)
    for _ in range(REPLAYS):
        graph.replay()
        assert all(torch.equal(sum, sums[0] * scale) for scale, sum in zip(scales, sums, strict=True))
    graph.reset()


def check_both_ways_in_turns(group: Group, device: torch.device, dtype: torch.dtype) -> None:
    """Sums in one shot and in two, one behind the other, eager and in a graph: they share the memory and the signals,
    but not the number of blocks that signal. On another rank every replay begins late."""
    shapes = [(1, 2048), (1100, 2048), (16, 2048), (515, 2056)] * 3
    every = [parts_of(group.mesh.world.size, shape, dtype, seed=index) for index, shape in enumerate(shapes)]
    xs = [parts[group.mesh.world.rank].to(device) for parts in every]
    sums = [torch.empty_like(x) for x in xs]

    def run() -> None:
        for x, sum in zip(xs, sums, strict=True):
            part = group.part(sum)
            part.copy_(x)
            group.all_reduce(part, sum)

    run()
    for sum, parts in zip(sums, every, strict=True):
        check(sum, parts)
    expected = [sum.clone() for sum in sums]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for replay in range(REPLAYS):
        if replay % group.mesh.world.size == group.mesh.world.rank:
            torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
        graph.replay()
        replayed = [sum.clone() for sum in sums]
        run()
        assert all(map(torch.equal, replayed, expected))
        assert all(map(torch.equal, sums, expected))
    graph.reset()


def check_what_else_takes_one_shot(group: Group, device: torch.device) -> None:
    """Columns side by side, and sums that enter the residual, in turns and in a graph: the same as by way of NCCL."""
    assert group.symmetric is not None
    plain = Group(Mesh.of(group.mesh.world.rank, group.mesh.world.size))
    columns = [torch.randn(rows, share, device=device) for rows, share in ((1, 25_600), (3, 1028), (64, 516))]
    shapes = [(1, 2048), (16, 7168), (5, 192)]
    parts = [torch.randn(shape, device=device).bfloat16() for shape in shapes]
    residuals = [torch.ones(shape, device=device) for shape in shapes]
    norms = [torch.randn(features, device=device).bfloat16() for _, features in shapes]
    outs = [PendingNorm.empty(*shape, 1e-6, torch.bfloat16, partial(torch.empty, device=device)) for shape in shapes]
    for norm in norms:
        group.broadcast(norm)
    gathered: list[torch.Tensor] = []

    def run() -> None:
        gathered[:] = [group.gather_columns(x, partial(torch.empty, device=device)) for x in columns]
        for part, residual, norm, out in zip(parts, residuals, norms, outs, strict=True):
            group.add_sum(part, residual, norm, out)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for replay in range(REPLAYS):
        for x in (*columns, *parts):
            x.normal_()
        if replay % group.mesh.world.size == group.mesh.world.rank:
            torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
        before = [residual.clone() for residual in residuals]
        graph.replay()
        for x, found in zip(columns, gathered, strict=True):
            assert group.symmetric.gathers(x)
            assert torch.equal(found, plain.gather_columns(x, partial(torch.empty, device=device)))
        for part, residual, was, norm, out in zip(parts, residuals, before, norms, outs, strict=True):
            every = torch.empty(group.mesh.world.size, *part.shape, dtype=part.dtype, device=device)
            plain.all_gather(part, every)
            assert torch.allclose(residual, was + every.float().sum(0), rtol=0, atol=1e-4)
            assert torch.equal(residual, group.broadcast(residual.clone()))
            expected = PendingNorm.empty(*part.shape, 1e-6, torch.bfloat16, partial(torch.empty, device=device))
            pending_norm.write(residual, norm, expected)
            assert torch.equal(out.x_TE, expected.x_TE)
            assert torch.allclose(out.square_TP, expected.square_TP, rtol=1e-5)
    graph.reset()


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = Group.connect(Mesh.of(rank, ranks), f"file://{folder}/rendezvous", device, timeout_s=60)
    assert group.symmetric is not None
    for dtype in (torch.bfloat16, torch.float32):
        # In one shot, then in two; 515 rows of 2056 do not make equal shares of whole pieces of 16 bytes.
        for shape in ((1, 2048), (3, 2048), (7, 56), (16, 2048), (64, 2048), (600, 2048), (515, 2056), (1100, 2048)):
            x = torch.empty(shape, dtype=dtype, device=device)
            assert fits(x, ranks)
            assert (x.nbytes <= one_shot_bytes(ranks)) == (shape[0] <= 64)
            check_sums(group, device, shape, dtype)
            check_row_of_sums(group, device, shape, dtype)
        check_both_ways_in_turns(group, device, dtype)
    check_what_else_takes_one_shot(group, device)
    group.close()


@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sums_of_several_gpus(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    multiprocessing.spawn(rank_main, args=(ranks, tmp_path), nprocs=ranks)
