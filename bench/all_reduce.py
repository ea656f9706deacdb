"""Times the all-reduce of steps inside a graph: symmetric memory beside NCCL, on this machine's GPUs.

    python bench/all_reduce.py --ranks 4

One line a size: bytes of a rank's part, microseconds an all-reduce (the slowest rank's median over replays of a graph
that holds many of them in a row).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from workers.parallel.group import TensorParallel
from workers.parallel.symmetric import fits

SIZES = (4 << 10, 14 << 10, 56 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
IN_A_ROW = 50
REPLAYS = 20


def time_us(group: TensorParallel, x: torch.Tensor) -> float:
    """Microseconds of one all-reduce, the slowest rank's."""
    part = group.part(x)
    part.zero_()
    group.all_reduce(part, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_ROW):
            group.all_reduce(part, x)
    times = []
    for _ in range(REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / IN_A_ROW)
    graph.reset()
    slowest = torch.tensor([median(times)], device=x.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def rank_main(rank: int, ranks: int, folder: str) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    both = TensorParallel.connect(rank, ranks, f"file://{folder}/rendezvous", device, timeout_s=60)
    nccl = TensorParallel(rank, ranks)
    if rank == 0:
        print(f"{'bytes':>9}  {'NCCL, us':>9}  {'symmetric, us':>13}")
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        over_nccl = time_us(nccl, x)
        shared = f"{time_us(both, x):13.1f}" if both.symmetric is not None and fits(x, ranks) else f"{'-':>13}"
        if rank == 0:
            print(f"{size:9}  {over_nccl:9.1f}  {shared}", flush=True)
    both.close()


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: every GPU")
    arguments = parser.parse_args()
    if not 2 <= arguments.ranks <= torch.cuda.device_count():
        parser.error(f"{arguments.ranks} ranks on {torch.cuda.device_count()} GPUs: needs at least 2 of each")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(rank_main, args=(arguments.ranks, folder), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
