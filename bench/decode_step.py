"""Times whole decode steps on this machine's GPU, as a replica replays them: state, embedding, layers, head, sampling,
verification and drafts in one graph. Of the DeepSeek-V2-Lite shape, a slice of a larger model, or GLM-4.7-Flash.

    python bench/decode_step.py                       # 1, 2, 4 and 16 rows of 1024 cached tokens, greedy
    python bench/decode_step.py --rows 1 --width 4    # one row that verifies and drafts three tokens
    python bench/decode_step.py --no-kernels          # without the tables of single kernels
    python bench/decode_step.py --shape v3-slice      # one dense layer and five of experts, in FP8
    python bench/decode_step.py --shape k2-slice      # one dense layer and four of Kimi K2's experts, these in INT4
    python bench/decode_step.py --shape v32-slice     # the same layers of DeepSeek-V3.2, with their indexers
    python bench/decode_step.py --shape glm52-slice   # one dense layer and four of GLM-5.2's, which share indices
    python bench/decode_step.py --fp8-cache           # latents in FP8, keys of indexers in INT8
    python bench/decode_step.py --shape glm-flash     # GLM-4.7-Flash, whole
    python bench/decode_step.py --shape small4        # Mistral Small 4, whole, in FP8; small4-slice: six of its layers
    python bench/decode_step.py --shape hy4-slice --beside glm52-mxfp8-slice   # and how many times as long it takes
    python bench/decode_step.py --timeline            # in place of the tables: each kernel's share of a replay

One line per number of rows: the path that its step takes, the general path beside it where that is another one, and
the time in which the bytes can be read. Then every kernel of the path alone: its launches of one step, in order, in a
graph without the others; its share is of the bytes of weights it streams at 4.2 TB/s, the read bandwidth of an H200.
Weights are normal(0, 0.02), norms 1, so that routing is that of random tokens; a draft layer, where there is one, is as
random.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from shapes import BANDWIDTH, SHAPES, Case, Tokens, choices, model_of, target_work
from timeline import timeline
from timing import captured, milliseconds

from kernels.matrix import GROUP
from workers.memory.scratch import Scratch
from workers.models.execution_paths import ExecutionPaths

REPEATS = 50


def room(width: int) -> int:
    """Tokens by which a row grows, at most, until it is rewound: every replay moves on."""
    return (REPEATS + 8) * width


def graph_of(case: Case) -> torch.cuda.CUDAGraph:
    """The step as a graph."""
    measured = Scratch(case.device)
    case.step(measured).run()
    scratch = Scratch(case.device, torch.empty(measured.peak, dtype=torch.uint8, device=case.device))
    return captured([case.step(scratch).run])


def replayed(case: Case) -> list[float]:
    """Three measurements of the step as a graph."""
    graph = graph_of(case)
    times = []
    for _ in range(3):
        case.rewind()
        times.append(milliseconds(graph, REPEATS, warm=3))
    case.rewind()
    return times


@contextmanager
def plain_layers() -> Iterator[None]:
    """Let no pass take the small-batch path within this context."""
    takes = ExecutionPaths.takes_small_batch
    ExecutionPaths.takes_small_batch = lambda self, batch, dtype, device: False
    try:
        yield
    finally:
        ExecutionPaths.takes_small_batch = takes


@contextmanager
def noted_paths() -> Iterator[list[bool]]:
    """Note of every pass within this context whether it takes the small-batch path."""
    takes, noted = ExecutionPaths.takes_small_batch, list[bool]()

    def noting(self: ExecutionPaths, *about: Any) -> bool:
        noted.append(takes(self, *about))
        return noted[-1]

    ExecutionPaths.takes_small_batch = noting
    try:
        yield noted
    finally:
        ExecutionPaths.takes_small_batch = takes


def chosen_experts(case: Case) -> float:
    """Return the average number of experts per layer that the tokens of a step choose."""
    with choices() as noted:
        case.step(Scratch(case.device)).run()
    counts = [int(chosen_TX.any(0).sum()) for chosen_TX in noted]
    return sum(counts) / max(len(counts), 1)


def record(run: Callable[[], object]) -> list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]]:
    """Every kernel launch of `run`: kernel, grid, arguments."""
    launches: list[tuple[Any, Any, tuple[Any, ...], dict[str, Any]]] = []
    plain = JITFunction.run

    def noting(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        launches.append((self, grid, args, kwargs))
        return plain(self, *args, grid=grid, warmup=warmup, **kwargs)

    JITFunction.run = noting
    try:
        run()
    finally:
        JITFunction.run = plain
    torch.cuda.synchronize()
    return launches


def by_kernel(case: Case, experts: float) -> None:
    """Every kernel alone."""
    # Every buffer its own, and kept: launches are repeated out of order.
    launches = record(case.step(Scratch(case.device)).run)
    groups: dict[str, list[Any]] = {}
    for launch in launches:
        kernel, _, _, options = launch
        name = kernel.fn.__name__
        if name.startswith(("stream_", "fp8_")) or name == "ring_linear":
            rows, features = options["SIZE"]
            name += f" {'2x' * name.endswith('gate_up')}{rows}x{features}"
        if is_int4(launch):
            name += f" {'2x' * options['GATE']}{options['FEATURES']}x{options['K']}"
        groups.setdefault(name, []).append(launch)
    print(f"  {'kernel alone':34}{'launches':>9}{'us each':>9}{'ms':>8}{'share of 4.2 TB/s':>19}")
    total = 0.0
    for name, own in groups.items():

        def run(own: list[Any] = own) -> None:
            for kernel, grid, args, kwargs in own:
                kernel.run(*args, grid=grid, warmup=False, **kwargs)

        ms = milliseconds(captured([run]), REPEATS, warm=3)
        case.rewind()
        total += ms
        size = streamed_bytes(own[0], experts)
        share = f"{size * len(own) / BANDWIDTH / ms:19.0%}" if size else ""
        print(f"  {name:34}{len(own):9}{ms / len(own) * 1e3:9.2f}{ms:8.3f}{share}")
    print(f"  {'sum':34}{len(launches):9}{'':9}{total:8.3f}", flush=True)


def is_int4(launch: Any) -> bool:
    """Whether it is one of the products of few tokens with INT4 experts, whose name others have as well."""
    kernel, _, _, options = launch
    return kernel.fn.__name__ == "product" and "AHEAD" in options


def streamed_bytes(launch: Any, experts: float) -> float:
    """Bytes of weights one launch reads."""
    kernel, grid, _, o = launch
    name = kernel.fn.__name__
    if is_int4(launch):
        # Two numbers a byte, and a scale of two bytes for each group.
        return (2 if o["GATE"] else 1) * o["FEATURES"] * o["K"] * (0.5 + 2 / GROUP) * experts
    products = ("stream_linear", "stream_gate_up", "fp8_linear", "fp8_gate_up", "fp8_whole", "fp8_even")
    known = (*products, "gate_up", "down", "down_short")
    if name not in known or "STREAMS" not in o:
        return 0.0
    size = (1.0 if o["STORED"].fp8 else 2.0) * o["SIZE"].rows * o["SIZE"].features
    if name == "stream_linear":
        return size * float(grid[1])
    if name == "fp8_even":
        return size * (o["UNITS"].shared + experts if o["UNITS"].listed else 1)
    if name in ("fp8_linear", "fp8_whole"):
        return size
    if name in ("stream_gate_up", "fp8_gate_up"):
        return 2 * size
    return (2 if name == "gate_up" else 1) * size * (o["CHOICES"].shared + experts)


def measure(shape: str, given: argparse.Namespace) -> dict[int, float]:
    """Print a line for each number of rows, and what is asked for besides; the milliseconds of each."""
    values, form = SHAPES[shape]
    model = model_of(values, given.width, torch.bfloat16, torch.device("cuda"), form, fp8_cache=given.fp8_cache)
    taken: dict[int, float] = {}
    for rows in map(int, given.rows.split(",")):
        case = Case(model, rows, given.width, given.context, room(given.width))
        with noted_paths() as few:
            experts = chosen_experts(case)
        ours = replayed(case)
        taken[rows] = min(ours)
        beside = "the general path"
        if any(few):
            with plain_layers():
                beside = f"plain layers {min(replayed(case)):.3f} ms"
        tokens = Tokens.decode(rows, given.width, given.context, experts)
        floor = sum(work.bytes for work in target_work(model, tokens).values()) / BANDWIDTH
        print(
            f"{shape}: rows {rows} width {given.width} context {given.context}: path {min(ours):.3f} ms "
            f"({', '.join(f'{t:.3f}' for t in ours)}), {beside}, floor of the target's pass {floor:.3f} ms "
            f"({floor / min(ours):.0%}), experts {experts:.1f}",
            flush=True,
        )
        if given.timeline:
            timeline(graph_of(case), case.rewind)
        elif given.kernels:
            by_kernel(case, experts)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="v2-lite")
    parser.add_argument("--beside", default="", help="shapes to measure, too, and to compare with, with commas")
    parser.add_argument("--rows", default="1,2,4,16")
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument(
        "--kernels", action=argparse.BooleanOptionalAction, default=True, help="time every kernel alone"
    )
    parser.add_argument("--fp8-cache", action="store_true", help="cache latents in FP8 and index keys in INT8")
    parser.add_argument("--timeline", action="store_true", help="profile replays in place of timing every kernel alone")
    given = parser.parse_args()
    if unknown := {*filter(None, given.beside.split(","))} - {*SHAPES}:
        parser.error(f"no shape is called {', '.join(sorted(unknown))}: {', '.join(SHAPES)}")
    if not torch.cuda.is_available():
        sys.exit("this measures a GPU, and there is none")
    with torch.inference_mode():
        ours = measure(given.shape, given)
        for other in filter(None, given.beside.split(",")):
            gc.collect()
            torch.cuda.empty_cache()
            for rows, ms in measure(other, given).items():
                print(f"rows {rows}: {given.shape} takes {ours[rows] / ms:.3f} times as long as {other}", flush=True)


if __name__ == "__main__":
    main()
