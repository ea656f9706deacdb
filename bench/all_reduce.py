"""Times the all-reduce of steps inside a graph: symmetric memory beside NCCL, on this machine's GPUs.

    python bench/all_reduce.py --ranks 4

One line per size: bytes of a rank's part, microseconds per all-reduce (the slowest rank's median over replays of a
graph that holds many of them in a row) over NCCL and over symmetric memory in one shot and in two, and which of these
replicas use. Where two shots become faster is where `workers/parallel/symmetric.py` should change to them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.one_shot import MOST_BYTES
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.parallel.symmetric import SymmetricSum, fits, one_shot_bytes

SIZES = (4 << 10, 14 << 10, 56 << 10, 256 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20, 16 << 20, 32 << 20)
IN_A_ROW = 50
REPLAYS = 20


def time_us(sum_parts: Callable[[torch.Tensor, torch.Tensor], None], part: torch.Tensor, x: torch.Tensor) -> float:
    """Microseconds of one all-reduce of `part` into `x`, the slowest rank's."""
    part.zero_()
    sum_parts(part, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(IN_A_ROW):
            sum_parts(part, x)
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
    group = Group.connect(Mesh.of(rank, ranks), f"file://{folder}/rendezvous", device, timeout_s=60)
    nccl = Group(Mesh.of(rank, ranks))
    shared = None if group.symmetric is None else SymmetricSum(device, most_bytes=max(SIZES))
    dist.barrier()
    if rank == 0:
        print(f"{'bytes':>9}  {'NCCL, us':>9}  {'one shot, us':>12}  {'two shots, us':>13}  used")
    for size in SIZES:
        x = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        text = f"{size:9}  {time_us(nccl.all_reduce, x, x):9.1f}"
        if shared is not None:
            one = f"{time_us(shared.one_shot, x, x):12.1f}" if size <= MOST_BYTES else f"{'':12}"
            text += f"  {one}  {time_us(shared.two_shots, shared.shared_part(x), x):13.1f}"
        if rank == 0:
            shots = "one shot" if size <= one_shot_bytes(ranks) else "two shots"
            print(f"{text}  {shots if shared is not None and fits(x, ranks) else 'NCCL'}", flush=True)
    group.close()


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
