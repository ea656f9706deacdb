"""Times prefill attention on this machine's GPU: one layer's chunk, or a chunk over cached context, causal or not.

    python bench/prefill_attention.py           # the launcher's choice, and on Hopper its own kernel beside it
    python bench/prefill_attention.py --heads 128 --shape 4x2048,1x512+8192
    python bench/prefill_attention.py --tiles hopper,128x128x8x2      # or queries x keys x warps x stages

A shape is rows x queries, then + context: the queries' own keys causally, or, with context, that many keys of which
every query sees all. Products counted are those a query and a key it sees must make; 790 TFLOP/s is what the card's
products reach.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.mla_prefill import launch
from kernels.mla_prefill.launch import HOPPER, Tiling

NOPE, ROPE, VALUE, LATENT = 128, 64, 128, 512
SHAPES = "1x1024,8x1024,1x8192,16x512,1x512+4096"


@dataclass(frozen=True)
class Shape:
    """`rows` rows of `queries` queries, over themselves or over `context` keys."""

    rows: int
    queries: int
    context: int

    @staticmethod
    def parse(text: str) -> Shape:
        """`rows`x`queries`, or `rows`x`queries`+`context`."""
        chunk, _, context = text.partition("+")
        rows, queries = chunk.split("x")
        return Shape(int(rows), int(queries), int(context or 0))

    def operations(self, heads: int) -> float:
        """Floating-point operations of the products."""
        pairs = self.queries * self.context if self.context else self.queries * (self.queries + 1) / 2
        return 2.0 * self.rows * heads * pairs * (NOPE + ROPE + VALUE)


def milliseconds(shape: Shape, heads: int, tiles: Tiling | None) -> float:
    """Median time of one launch, several in a row between two events."""
    tokens, keys = shape.rows * shape.queries, shape.rows * (shape.context or shape.queries)
    options = {"device": "cuda", "dtype": torch.bfloat16}
    q_THD = torch.randn(tokens, heads, NOPE + ROPE, **options)
    kv_SHF = torch.randn(keys, heads, NOPE + VALUE, **options)
    latent_SC = torch.randn(keys, LATENT + ROPE, **options)
    cu_q_B1 = torch.arange(shape.rows + 1, device="cuda", dtype=torch.int32) * shape.queries
    cu_k_B1 = torch.arange(shape.rows + 1, device="cuda", dtype=torch.int32) * (shape.context or shape.queries)
    out_THV = torch.empty(tokens, heads, VALUE, **options)
    lse_TH = torch.empty(tokens, heads, device="cuda")

    def run() -> None:
        launch.mla_prefill(
            q_THD,
            kv_SHF[..., :NOPE],
            latent_SC[:, LATENT:],
            kv_SHF[..., NOPE:],
            cu_q_B1,
            cu_k_B1,
            out_THV,
            lse_TH,
            scale=(NOPE + ROPE) ** -0.5,
            causal=not shape.context,
            max_q=shape.queries,
            tiles=tiles,
        )

    run()
    torch.cuda.synchronize()
    times, repeats = [], 4
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / repeats)
    return median(times[2:])


def choices(text: str) -> list[Tiling | None]:
    """Tilings by name or numbers; without any, the launcher's own and Hopper's kernel where it runs."""
    if not text:
        return [None, HOPPER] if torch.cuda.get_device_capability() == (9, 0) else [None]
    return [HOPPER if part == "hopper" else Tiling(*map(int, part.split("x"))) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--shape", default=SHAPES)
    parser.add_argument("--tiles", default="")
    arguments = parser.parse_args()
    print(f"{arguments.heads} heads".ljust(16) + "tiles".ljust(22) + "       us  TFLOP/s  of 790")
    for text in arguments.shape.split(","):
        shape = Shape.parse(text)
        for tiles in choices(arguments.tiles):
            time = milliseconds(shape, arguments.heads, tiles)
            rate = shape.operations(arguments.heads) / time / 1e9
            chosen = tiles or launch.tiling(NOPE + ROPE, VALUE, torch.bfloat16, shape.queries)
            about = f"{chosen.path} {chosen.queries}x{chosen.keys}x{chosen.warps}x{chosen.stages}"
            print(text.ljust(16) + about.ljust(22) + f"{time * 1000:9.1f}{rate:9.0f}{rate / 790:8.0%}", flush=True)


if __name__ == "__main__":
    main()
