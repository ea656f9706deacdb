"""Times decode steps of one rank's share of a model that takes several GPUs, on one: by default of DeepSeek-V3, whole,
as rank 0 of eight has it.

    python bench/share.py                         # 1, 16, 64, 256 rows of 1024 cached tokens, with drafts and without
    python bench/share.py --layers 6 --rows 1,16  # fewer layers, for a quick try; the first three are dense
    python bench/share.py --ranks 16              # a smaller share
    python bench/share.py --layers 8 --timeline   # each kernel's share of a step besides

Every tensor has the shape that this rank has of it: heads, intermediate features of every network and expert, and rows
of the output head are shared out, all else is whole. The share is loaded by the loader of replicas, from a checkpoint
that is generated as it is read (`bench/generated.py`); routing is that of random tokens. A step is captured whole and
replayed, as a replica does it. What is missing is the other ranks: nothing is summed, and the gathered logits
are this rank's own, repeated. So the times are a LOWER BOUND for a rank among others, WITHOUT COMMUNICATION.

One line per number of rows and width: the step, and the time in which the bytes of the target's pass can be read at 4.2
TB/s, the read bandwidth of an H200. A step of width 2 verifies a draft and makes the next one with the draft layer.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from decode_step import chosen_experts, graph_of, replayed, room
from generated import GENERATED, installed, write_folder
from shapes import BANDWIDTH, Case, Tokens, target_work
from timeline import timeline

from kernels import pending_norm
from kernels.page import PAGE_TOKENS
from kernels.pending_norm import PendingNorm
from kernels.runtime.ahead import ALL, Share, compile_ahead
from kernels.runtime.dependent import launches_dependently
from workers.config import EngineConfig
from workers.families.loading import load_model
from workers.fit.memory_plan import MemoryPlan, memory_plan
from workers.memory.scratch import Scratch
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.parallel.symmetric import one_shot_bytes

CONTEXT = 1024
GB = 1e9
AROUND = 6e9
"""Bytes for what a step computes on its way, graphs, the driver and compiled kernels: more than any step here takes."""


@dataclass(frozen=True)
class Alone(Group):
    """One rank of several, of which the others are not there: its part of a sum stands for the sum."""

    def all_reduce(self, part: Tensor, out: Tensor) -> None:
        """Add nothing: `part` is `out`, as no other rank reads it."""

    def sums_by_kernel(self, out: Tensor) -> bool:
        """Tell whether sums are taken by a kernel, as where ranks can write each other's memory: what follows is
        launched dependently."""
        return out.nbytes <= one_shot_bytes(self.summed.size)

    def add_sum(self, part_TE: Tensor, residual_TE: Tensor, norm_E: Tensor, out: PendingNorm) -> None:
        """Add this rank's part to the residual, in a kernel that does all but the exchange."""
        pending_norm.add(part_TE, residual_TE, norm_E, out, dependent=launches_dependently(part_TE.device))

    def gather_columns(self, part_NY: Tensor, empty: Callable[..., Tensor]) -> Tensor:
        """Repeat this rank's columns as often as there are ranks."""
        out_NGY = empty(part_NY.shape[0], self.mesh.heads.size, part_NY.shape[1], dtype=part_NY.dtype)
        return out_NGY.copy_(part_NY[:, None].expand_as(out_NGY)).flatten(1)

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        """Repeat this rank's tensor as often as there are ranks."""
        return out.copy_(x.expand_as(out))

    def broadcast(self, x: Tensor) -> Tensor:
        """Return what this rank has."""
        return x

    def minimum(self, x: Tensor) -> Tensor:
        """Return what this rank has."""
        return x


def load(folder: Path, ranks: int, device: torch.device, dtype: torch.dtype) -> Model:
    """The share of rank 0 of so many, with the draft layer."""
    with installed():
        return load_model(
            folder,
            group=Alone(Mesh.of(0, ranks)),
            dtype=dtype,
            device=device,
            max_positions=CONTEXT + room(2) + PAGE_TOKENS,
            quantize_activations=True,
            progress=lambda text: print(f"  {text}", flush=True),
        )


def compile_steps(model: Model, shapes: Sequence[tuple[int, int]], threads: int, share: Share = ALL) -> int:
    """Compile what steps of so many (rows, width) launch, side by side; how many kernels. `share`: see
    `compile_ahead`."""
    with compile_ahead(model.norm_E.device, threads, share) as compiled:
        for rows, width in shapes:
            case = Case(model, rows, width, CONTEXT, room(width))
            case.parts = replace(case.parts, model=model.shallow())
            case.step(Scratch(case.device, zeroed=True)).run()
    return compiled.kernels


def wanted_bytes(plan: MemoryPlan, rows: int) -> tuple[float, float]:
    """Return the bytes of the share's weights, and of the caches of `rows` rows."""
    pages = -(-(CONTEXT + room(2)) // PAGE_TOKENS)
    return plan.weights, (rows * pages + 1) * plan.page_bytes


def check_capacity(plan: MemoryPlan, rows: int, free: int) -> str:
    """Return the error message for a GPU with `free` free bytes that is too small; empty if it is large enough."""
    weights, cache = wanted_bytes(plan, rows)
    if weights + cache + AROUND <= free:
        return ""
    return (
        f"this GPU is too small: the share has {weights / GB:.1f} GB of weights, {rows} rows of {CONTEXT} tokens take "
        f"{cache / GB:.1f} GB of cache, what steps compute on their way up to {AROUND / GB:.0f} GB, and "
        f"{free / GB:.1f} GB are free; give fewer --rows, fewer --layers, or more --ranks"
    )


def line(case: Case, ranks: int) -> str:
    """Measure one case and describe it in a line."""
    experts = chosen_experts(case)
    case.rewind()
    times = replayed(case)
    tokens = Tokens.decode(case.rows, case.width, case.context, experts)
    read = sum(work.bytes for work in target_work(case.model, tokens).values())
    floor = read / BANDWIDTH
    held = torch.cuda.memory_allocated() / GB
    return (
        f"rows {case.rows:3} width {case.width} context {case.context}: step {min(times):.3f} ms "
        f"({', '.join(f'{ms:.3f}' for ms in times)}), floor of the target's pass {floor:.3f} ms "
        f"({floor / min(times):.0%}; {read / GB:.2f} GB), experts {experts:.1f}, memory held {held:.1f} GB; "
        f"lower bound of 1 of {ranks} ranks, no communication"
    )


def planned(folder: Path, ranks: int, rows: int) -> MemoryPlan:
    """Return the plan of `latentserve fit` for the share."""
    config = EngineConfig(model=str(folder), tensor_parallel=ranks, max_rows=rows, max_context=CONTEXT + room(2))
    return memory_plan(config, 10**12)


def values_of(shape: str, layers: int | None) -> dict[str, Any]:
    """The config values, of fewer layers if so wanted."""
    values = GENERATED[shape][0]
    return values if layers is None else {**values, "num_hidden_layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="whose share: one of so many ranks")
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--widths", default="1,2", help="tokens that a row feeds: 2 is a token and a draft")
    parser.add_argument("--shape", choices=["v3", "v3-slice", "v2-lite", "glm-flash"], default="v3")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeline", action="store_true", help="profile replays, too")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    rows, widths = ([int(n) for n in text.split(",")] for text in (given.rows, given.widths))
    begin, device = time.perf_counter(), torch.device("cuda", torch.cuda.current_device())
    with torch.inference_mode(), tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_folder(values_of(given.shape, given.layers), GENERATED[given.shape][1], folder, given.seed)
        plan = planned(folder, given.ranks, max(rows))
        if said := check_capacity(plan, max(rows), torch.cuda.mem_get_info()[0]):
            sys.exit(said)
        print(
            f"LOWER BOUND, WITHOUT COMMUNICATION: rank 0's share of {given.ranks} of {given.shape}, "
            f"{plan.weights / GB:.1f} GB of weights as `latentserve fit` counts them; sums over ranks are left out"
        )
        model = load(folder, given.ranks, device, torch.bfloat16)
        print(f"loaded after {time.perf_counter() - begin:.1f} s; {torch.cuda.memory_allocated() / GB:.1f} GB held")
        shapes = [(count, width) for width in widths for count in rows if width == 1 or model.drafter]
        kernels = compile_steps(model, shapes, len(os.sched_getaffinity(0)))
        print(f"{kernels} kernels compiled or loaded after {time.perf_counter() - begin:.1f} s", flush=True)
        for count, width in shapes:
            gc.collect()
            torch.cuda.empty_cache()
            case = Case(model, count, width, CONTEXT, room(width))
            print(line(case, given.ranks), flush=True)
            if given.timeline:
                timeline(graph_of(case), case.rewind)
        most = torch.cuda.max_memory_allocated() / GB
        print(f"{time.perf_counter() - begin:.1f} s in all, most memory held {most:.1f} GB")


if __name__ == "__main__":
    main()
