"""Times prefill attention on this machine's GPU: one layer's chunk, or a chunk over cached context, causal or not.

    python bench/prefill_attention.py           # the portable kernel, and on Hopper its own beside it
    python bench/prefill_attention.py --heads 32 --nope 64            # Mistral Small 4
    python bench/prefill_attention.py --heads 128 --shape 4x2048,1x512+8192
    python bench/prefill_attention.py --tiles hopper,128x128x8x2      # or queries x keys x warps x stages
    python bench/prefill_attention.py --shape 1x90+4096 --parts 1,4,8

A shape is rows x queries, then + context: the queries' own keys causally, or, with context, that many keys of which
every query sees all, in as many parts as steps take or as --parts says; merging their results is in the time. Products
counted are those a query and a key it sees must make; 790 TFLOP/s is what the card's products reach. "error" is the
largest of a query and head, in norms of the fp32 reference's result. Where a shape was tried in more than one way, a
line behind it says which is fastest. Exit status 1 when a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timing
from verdict import MOST_ERROR, error, verdict

from kernels.merge_attention import merge_attention
from kernels.mla_prefill import key_parts, launch, mla_prefill_reference
from kernels.mla_prefill.launch import HOPPER, PrefillTiling

ROPE, VALUE, LATENT = 64, 128, 512
SHAPES = "1x128,1x256,1x512,1x1024,8x128,8x1024,1x8192,16x512,1x512+4096"


@dataclass(frozen=True)
class Shape:
    """`rows` rows of `queries` queries, over themselves or over `context` keys."""

    rows: int
    queries: int
    context: int
    nope: int
    """Features of a key without its roped ones."""

    @staticmethod
    def parse(text: str, nope: int) -> Shape:
        """`rows`x`queries`, or `rows`x`queries`+`context`."""
        chunk, _, context = text.partition("+")
        rows, queries = chunk.split("x")
        return Shape(int(rows), int(queries), int(context or 0), nope)

    def operations(self, heads: int) -> float:
        """Floating-point operations of the products."""
        pairs = self.queries * self.context if self.context else self.queries * (self.queries + 1) / 2
        return 2.0 * self.rows * heads * pairs * (self.nope + ROPE + VALUE)


class Case:
    """Random queries and keys of a shape, and what the reference makes of them."""

    def __init__(self, shape: Shape, heads: int, parts: int) -> None:
        """The keys of context in so many parts; 0: as many as steps take."""
        nope = shape.nope
        tokens, keys = shape.rows * shape.queries, shape.rows * (shape.context or shape.queries)
        options = {"device": "cuda", "dtype": torch.bfloat16}
        q_THD = torch.randn(tokens, heads, nope + ROPE, **options)
        kv_SHF = torch.randn(keys, heads, nope + VALUE, **options)
        latent_SC = torch.randn(keys, LATENT + ROPE, **options)
        begin_B1 = torch.arange(shape.rows + 1, device="cuda", dtype=torch.int32)
        bounds = begin_B1 * shape.queries, begin_B1 * (shape.context or shape.queries)
        self.tensors = q_THD, kv_SHF[..., :nope], latent_SC[:, LATENT:], kv_SHF[..., nope:], *bounds
        if not shape.context:
            parts = 1
        elif not parts:
            parts = key_parts(shape.queries, shape.context, shape.rows, heads, q_THD.device)
        self.out_THV, self.lse_TH = (
            torch.empty(tokens, heads, VALUE, **options),
            torch.empty(tokens, heads, device="cuda"),
        )
        self.part_ZTHV = torch.empty(parts, tokens, heads, VALUE, device="cuda")
        self.part_lse_ZTH = torch.empty(parts, tokens, heads, device="cuda")
        self.parts = parts
        self.scale, self.causal, self.queries = (nope + ROPE) ** -0.5, not shape.context, shape.queries
        self.want_THV = torch.empty(tokens, heads, VALUE, device="cuda")
        self.want_lse_TH = torch.empty_like(self.lse_TH)
        mla_prefill_reference(*self.tensors, self.want_THV, self.want_lse_TH, self.scale, self.causal)

    def run(self, tiles: PrefillTiling) -> None:
        """Launch attention, and the merge where keys are in parts."""
        cut = self.parts > 1
        launch.mla_prefill(
            *self.tensors,
            self.part_ZTHV if cut else self.out_THV,
            self.part_lse_ZTH if cut else self.lse_TH,
            scale=self.scale,
            causal=self.causal,
            max_q=self.queries,
            tiles=tiles,
        )
        if cut:
            first, others = (self.part_ZTHV[0], self.part_lse_ZTH[0]), (self.part_ZTHV[1:], self.part_lse_ZTH[1:])
            merge_attention(*first, *others, self.out_THV, self.lse_TH)

    def error(self, tiles: PrefillTiling) -> float:
        """Return the error of a launch against the reference: of its outputs, or NaN where their log-sum-exp is
        wrong."""
        self.out_THV.fill_(torch.nan)
        self.lse_TH.fill_(torch.nan)
        self.run(tiles)
        out = error(self.out_THV, self.want_THV)
        return out if (self.lse_TH - self.want_lse_TH).abs().max() <= MOST_ERROR else torch.nan

    def microseconds(self, tiles: PrefillTiling) -> float:
        """Median time of one launch."""
        return timing.microseconds([lambda: self.run(tiles)])


def choices(text: str, nope: int) -> list[PrefillTiling]:
    """Tilings by name or numbers; without any, the portable kernel and Hopper's where it runs."""
    if not text:
        hopper = torch.cuda.get_device_capability() == (9, 0)
        return [launch.tiling(nope + ROPE, VALUE, torch.bfloat16, 128)] + [HOPPER] * hopper
    return [HOPPER if part == "hopper" else PrefillTiling(*map(int, part.split("x"))) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--nope", type=int, choices=(64, 128), default=128, help="features of a key without roped ones")
    parser.add_argument("--shape", default=SHAPES)
    parser.add_argument("--tiles", default="")
    counts = {"type": lambda text: [int(part) for part in text.split(",")], "default": [0]}
    parser.add_argument("--parts", help="of the keys of context; 0, the default: as many as steps take", **counts)
    arguments = parser.parse_args()
    print(f"{arguments.heads} heads".ljust(16) + "tiles / parts".ljust(26) + "       us  TFLOP/s  of 790    error")
    all_right = True
    for text in arguments.shape.split(","):
        shape = Shape.parse(text, arguments.nope)
        cases = [Case(shape, arguments.heads, parts) for parts in arguments.parts[: None if shape.context else 1]]
        results = {}
        for tiles, case in product(choices(arguments.tiles, arguments.nope), cases):
            wrong_by = case.error(tiles)
            time = case.microseconds(tiles)
            rate = shape.operations(arguments.heads) / time / 1e6
            about = f"{tiles.path} {tiles.queries}x{tiles.keys}x{tiles.warps}x{tiles.stages}"
            about += f" / {case.parts}" if case.parts > 1 else ""
            print(
                text.ljust(16) + about.ljust(26) + f"{time:9.1f}{rate:9.0f}{rate / 790:8.0%}{wrong_by:9.1e}",
                flush=True,
            )
            results[about] = time, wrong_by
        right = all(wrong_by <= MOST_ERROR for _, wrong_by in results.values())
        all_right &= right
        if len(results) > 1 or not right:
            print(verdict(text, results), flush=True)
    sys.exit(not all_right)


if __name__ == "__main__":
    main()
