"""Times MLA decode on this machine's GPU: one layer's attention inside a CUDA graph, every cache byte from memory.

    python bench/mla_decode.py                         # all shapes of the documentation's table
    python bench/mla_decode.py --heads 16 --width 1,2 --shape 1x4096,64x16384 --flashmla PATH/_flashmla_C.abi3.so
    python bench/mla_decode.py --heads 16,128 --width 1,2 --shape 64x16384 --cache fp8
    python bench/mla_decode.py --latent 256 --heads 32 --width 1,2   # Mistral Small 4

A graph holds the attention of many layers, each with a cache and query of its own, so that by the time a layer comes
round again the L2 cache has seen far more than it holds. All write one output, as the layers of a step do: it stays in
L2. Reported is the time of one layer: attention and merge; splits are planned once per step and timed apart. "ours"
begins when the kernel before it has ended; "early" asks for cache entries before that, as a step does, and so does
"invariant", with invariant mode's splits. FlashMLA, when its library is given, runs the same tensors the same way, with
its own split plan made beforehand. "floor" is the bytes that must move over 4.2 TB/s, or the products over 790 TFLOP/s
where that is more.

With `--cache fp8` a second line for each shape has the times on a cache of the same latents in FP8, with its own floor,
and what share of the time on the bf16 cache "early" takes. Three more have the times of the kernels for such a cache,
of which a step takes one.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timing

from kernels.latent_entry import encode, fp8_entry
from kernels.mla_decode import launch
from kernels.mla_decode.schedule import (
    DecodeShape,
    DecodeTiling,
    Workspace,
    fp8_tiling,
    hopper_tiling,
    narrow_fp8_tiling,
    portable_tiling,
    wide_fp8_tiling,
)

ROPE, PAGE = 64, 64
SHAPES = ((1, 4096), (1, 32768), (32, 4096), (128, 4096), (64, 16384))
L2_BYTES = 60e6


@dataclass(frozen=True)
class Problem:
    """Line of the table: equal tensors for every kernel measured."""

    lengths: tuple[int, ...]
    width: int
    heads: int
    latent: int = 512
    """Latent features of an entry."""
    fp8: bool = False
    """Whether the cache has FP8 entries."""

    @property
    def bytes(self) -> int:
        """Bytes one layer must read and write."""
        vectors = len(self.lengths) * self.width * self.heads
        entry = fp8_entry(self.latent, ROPE, torch.bfloat16).size if self.fp8 else 2 * (self.latent + ROPE)
        return sum(self.lengths) * entry + 2 * vectors * (2 * self.latent + ROPE)

    @property
    def floor(self) -> float:
        """Microseconds no kernel can beat on one H200."""
        products = 2 * sum(self.lengths) * self.width * self.heads * (2 * self.latent + ROPE)
        return max(self.bytes / 4.2e6, products / 790e6)

    def layers(self) -> list[dict[str, torch.Tensor]]:
        """Tensors of enough layers that their caches are four times the L2; tables are scattered and shared, as is the
        output."""
        count = max(2, min(64, int(4 * L2_BYTES / self.bytes) + 1))
        rows, pages = len(self.lengths), [-(-length // PAGE) for length in self.lengths]
        total = sum(pages)
        table = torch.zeros(rows, max(pages), dtype=torch.int32)
        order = torch.randperm(total, dtype=torch.int32)
        for row, used in enumerate(pages):
            table[row, :used], order = order[:used], order[used:]
        made = []
        for _ in range(count):
            q = torch.randn(rows, self.width, self.heads, self.latent + ROPE, device="cuda", dtype=torch.bfloat16)
            made.append(
                {
                    "q": q,
                    "cache": torch.randn(total, PAGE, self.latent + ROPE, device="cuda", dtype=torch.bfloat16),
                }
            )
        shared = {
            "table": table.cuda(),
            "length": torch.tensor(self.lengths, dtype=torch.int32, device="cuda"),
            "out": torch.empty(rows, self.width, self.heads, self.latent, device="cuda", dtype=torch.bfloat16),
            "lse": torch.empty(rows, self.width, self.heads, device="cuda"),
        }
        return [layer | shared for layer in made]


def in_fp8(layers: list[dict[str, torch.Tensor]], latent: int) -> list[dict[str, torch.Tensor]]:
    """Return these tensors with the caches in FP8."""

    def coded(cache: torch.Tensor) -> torch.Tensor:
        # In parts: on the way there numbers are in fp32.
        parts = [encode(part.flatten(0, 1), latent) for part in cache.split(1024)]
        return torch.cat(parts).view(*cache.shape[:2], -1)

    return [layer | {"cache": coded(layer["cache"])} for layer in layers]


def microseconds(run: Callable[[int], None], layers: int, target_us: float = 3000.0) -> float:
    """Median time of one call of `run(layer)` inside a graph that calls it for all layers in turn."""
    return timing.microseconds([partial(run, layer) for layer in range(layers)], target_us, 7)


def shape_of(problem: Problem, layers: list[dict[str, torch.Tensor]], invariant: bool = False) -> DecodeShape:
    """The launch's sizes."""
    pages = layers[0]["table"].shape[1]
    return DecodeShape(len(problem.lengths), problem.width, problem.heads, problem.latent, ROPE, pages, invariant)


def ours(
    problem: Problem,
    layers: list[dict[str, torch.Tensor]],
    *,
    early: bool,
    portable: bool = False,
    invariant: bool = False,
) -> float:
    """Microseconds of our attention and merge."""
    shape = shape_of(problem, layers, invariant)
    choose = portable_tiling if portable else hopper_tiling
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return run_tiling(shape, choose(shape, processors, fp8=problem.fp8), layers, early)


def kernels_of_fp8(problem: Problem, layers: list[dict[str, torch.Tensor]], plain: float) -> Iterator[str]:
    """Lines of Hopper's kernels for FP8 entries, which have 512 latent features, early, beside the microseconds on the
    bf16 cache."""
    if problem.latent != 512:
        return
    shape = shape_of(problem, layers)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = {"attend_narrow": narrow_fp8_tiling, "attend_fp8": fp8_tiling, "attend_wide_fp8": wide_fp8_tiling}
    for name, tiling in kernels.items():
        us = run_tiling(shape, tiling(shape, processors), layers, early=True)
        yield f"{'':11} {name:>16} {problem.floor:8.1f} {'-':>8} {us:8.1f} {f'{us / plain:.3f} of bf16':>32}"


def run_tiling(shape: DecodeShape, tiling: DecodeTiling, layers: list[dict[str, torch.Tensor]], early: bool) -> float:
    """Microseconds of attention and merge with this tiling."""
    size = Workspace.bytes(shape, tiling, torch.bfloat16)
    workspace = Workspace.over(torch.empty(size, dtype=torch.uint8, device="cuda"), shape, tiling, torch.bfloat16)
    launch.schedule(layers[0]["length"], layers[0]["table"], workspace)

    def run(layer: int) -> None:
        x = layers[layer]
        launch.attend(
            x["q"],
            x["cache"],
            x["table"],
            x["length"],
            x["out"],
            x["lse"],
            workspace,
            scale=0.04,
            dependent=True,
            early=early,
        )
        launch.merge(x["out"], x["lse"], workspace, dependent=True)

    return microseconds(run, len(layers))


def flashmla(problem: Problem, layers: list[dict[str, torch.Tensor]]) -> float:
    """Microseconds of FlashMLA's dense decode."""
    decode = torch.ops._flashmla_C.dense_decode_fwd
    plan: list[torch.Tensor | None] = [None, None]

    def run(layer: int) -> None:
        x = layers[layer]
        causal = problem.width > 1
        cache = x["cache"].unsqueeze(2)
        result = decode(x["q"], cache, problem.latent, x["length"], x["table"], 0.04, causal, plan[0], plan[1], None)
        plan[:] = result[2:]

    return microseconds(run, len(layers))


def plan_time(problem: Problem, layers: list[dict[str, torch.Tensor]]) -> float:
    """Microseconds of planning the splits, once per step."""
    shape = shape_of(problem, layers)
    tiling = hopper_tiling(shape, torch.cuda.get_device_properties(0).multi_processor_count, fp8=problem.fp8)
    buffer = torch.empty(Workspace.bytes(shape, tiling, torch.bfloat16), dtype=torch.uint8, device="cuda")
    workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
    return microseconds(
        lambda _: launch.schedule(layers[0]["length"], layers[0]["table"], workspace, dependent=True), 64, 500.0
    )


def all_of_ours(
    problem: Problem, layers: list[dict[str, torch.Tensor]], *, portable: bool
) -> tuple[float, float, float, float]:
    """Microseconds of attention and merge, of those that begin early, in invariant mode, and of the plan."""
    return (
        ours(problem, layers, early=False, portable=portable),
        ours(problem, layers, early=True, portable=portable),
        ours(problem, layers, early=True, portable=portable, invariant=True),
        plan_time(problem, layers),
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", default="16,128", help="query heads of a rank")
    parser.add_argument("--latent", type=int, choices=(256, 512), default=512, help="latent features of an entry")
    parser.add_argument("--width", default="1,2,4", help="tokens a row verifies")
    parser.add_argument(
        "--shape", default=",".join(f"{b}x{n}" for b, n in SHAPES), help="BATCHxCONTEXT, several by commas"
    )
    parser.add_argument(
        "--ragged", action="store_true", help="add 32 rows of 1k with 32 of 32k, 64 rows of their mean, and the ratio"
    )
    parser.add_argument("--portable", action="store_true", help="the portable Triton kernel also on Hopper")
    parser.add_argument("--cache", choices=("bf16", "fp8"), default="bf16", help="fp8: in FP8, beside bf16")
    parser.add_argument("--flashmla", metavar="PATH", help="FlashMLA's _flashmla_C library, to measure beside")
    arguments = parser.parse_args()
    if arguments.flashmla:
        torch.ops.load_library(arguments.flashmla)
    torch.manual_seed(0)
    batches = [tuple(map(int, item.split("x"))) for item in arguments.shape.split(",")]
    named = [(f"{rows} x {length}", (length,) * rows) for rows, length in batches]
    ragged, balanced = "32x1k + 32x32k", "64 x 16896"
    if arguments.ragged:
        named += [(ragged, (1024, 32768) * 32), (balanced, (16896,) * 64)]
    columns = ("heads", "width", "batch x context", "floor", "ours", "early", "invariant", "plan", "FlashMLA")
    print("{:>5} {:>5} {:>16} {:>8} {:>8} {:>8} {:>9} {:>6} {:>9}   µs a layer".format(*columns))
    for heads in map(int, arguments.heads.split(",")):
        for width in map(int, arguments.width.split(",")):
            early: dict[str, float] = {}
            for name, lengths in named:
                problem = Problem(lengths, width, heads, arguments.latent)
                layers = problem.layers()
                times = all_of_ours(problem, layers, portable=arguments.portable)
                early[name] = times[1]
                ours_us = "{:8.1f} {:8.1f} {:9.1f} {:6.1f}".format(*times)
                peer = f"{flashmla(problem, layers):9.1f}" if arguments.flashmla else f"{'-':>9}"
                print(f"{heads:5} {width:5} {name:>16} {problem.floor:8.1f} {ours_us} {peer}", flush=True)
                if arguments.cache == "fp8":
                    problem, layers = replace(problem, fp8=True), in_fp8(layers, problem.latent)
                    times = all_of_ours(problem, layers, portable=arguments.portable)
                    ours_us = "{:8.1f} {:8.1f} {:9.1f} {:6.1f}".format(*times)
                    share = f"{times[1] / early[name]:.3f} of bf16"
                    print(f"{'':11} {'in FP8':>16} {problem.floor:8.1f} {ours_us} {share:>15}", flush=True)
                    for line in kernels_of_fp8(problem, layers, early[name]):
                        print(line, flush=True)
            if arguments.ragged:
                print(f"-> {ragged} takes {early[ragged] / early[balanced]:.3f} of the time of {balanced}", flush=True)


if __name__ == "__main__":
    main()
