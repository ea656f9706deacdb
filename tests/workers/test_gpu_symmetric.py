"""Sums over ranks through symmetric memory, on two GPUs: against fp64, in graphs, and the same bits on every rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import multiprocessing

from workers.parallel import TensorParallel
from workers.symmetric import MOST_BYTES, fits

RANKS = 2
on_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two CUDA devices")


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((1, 2048), torch.bfloat16, True),
        ((MOST_BYTES // 4,), torch.float32, True),
        ((MOST_BYTES // 4 + 4,), torch.float32, False),
        ((3,), torch.float32, False),
        ((0, 8), torch.float32, False),
        ((8, 8), torch.float16, False),
        ((8,), torch.int64, False),
    ],
)
def test_only_what_the_kernel_can_sum_goes_there(shape: tuple[int, ...], dtype: torch.dtype, expected: bool) -> None:
    assert fits(torch.empty(shape, dtype=dtype)) == expected


def test_strided_parts_go_over_nccl() -> None:
    assert not fits(torch.empty(8, 16)[:, :8])


def parts_of(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=random).to(dtype) for _ in range(RANKS)]


def check(got: torch.Tensor, parts: list[torch.Tensor]) -> None:
    exact = torch.stack(parts).double().sum(0)
    largest = torch.stack(parts).double().abs().sum(0)
    # One rounding of the sum of two parts.
    bound = largest * torch.finfo(parts[0].dtype).eps
    assert bool(((got.cpu().double() - exact).abs() <= bound).all())


def rank_main(rank: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = TensorParallel.connect(rank, RANKS, f"file://{folder}/rendezvous", device, timeout_s=60)
    assert group.symmetric is not None
    for dtype in (torch.bfloat16, torch.float32):
        for tokens in (1, 3, 16, 128):
            x = torch.empty(tokens, 2048, dtype=dtype, device=device)
            assert fits(x)
            parts = parts_of((tokens, 2048), dtype, seed=tokens)
            x.copy_(parts[rank])
            group.all_reduce(x)
            check(x, parts)
            everyone = torch.empty(RANKS, *x.shape, dtype=dtype, device=device)
            group.all_gather(x, everyone)
            assert all(torch.equal(other, x) for other in everyone)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                group.all_reduce(x)
                group.all_reduce(x)
            for replay in range(20):
                parts = parts_of((tokens, 2048), dtype, seed=100 + replay)
                x.copy_(parts[rank])
                graph.replay()
                # The second sum adds the first's result once for every rank: exactly twice the value.
                check(x / RANKS, parts)
            graph.reset()
    group.close()


@pytest.mark.gpu
@on_two_gpus
def test_sums_of_two_gpus(tmp_path: Path) -> None:
    multiprocessing.spawn(rank_main, args=(tmp_path,), nprocs=RANKS)
