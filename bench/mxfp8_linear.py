"""Times products of few tokens with MXFP8 weights on this machine's Hopper GPU, in microseconds.

    python bench/mxfp8_linear.py
    python bench/mxfp8_linear.py --shapes 6144x16384 --tokens 1,16 --tilings 2x1,4x1

The portable kernel ("portable") beside the one that streams weights through a ring, in the tilings that are asked for:
groups of four warps that multiply, 2 or 4, times the 64 weight rows of each, once or twice; and "chosen", which is
the one that a step has. "bytes" is the time in which 4.2 TB/s bring the weights with their scales; percentages are its
share of a time. Products take turns with so many copies of the weights that each comes from memory; launches are
dependent, as in a step. A result that is further from the product in fp32 than roundings explain is marked "WRONG".
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import microseconds
from verdict import MOST_ERROR, error

from kernels.linear import micro_scaled, mxfp8_launch
from kernels.linear.records import Blocks
from kernels.matrix import GROUP, MicroScaled

SHAPES = "2624x6144,16384x2048,6144x16384,36864x6144,6144x18432,6144x2048"
"""Output and input features of Hy4's products: queries and latents, queries, attention's output, the dense gate and
up, its down, and a shared expert's."""
BYTES_PER_US = 4.2e6
OUT_OF_CACHE = 200_000_000
"""Bytes of weights after which the first are in no cache any more."""
CUDA = torch.device("cuda")


def weights(rows: int, features: int) -> MicroScaled:
    """Random ones, of a deviation of about 1 / sqrt(features)."""
    data = torch.randn(rows, features, device=CUDA).mul_(64).to(torch.float8_e4m3fn)
    exponent = 121 - features.bit_length() // 2
    scales = torch.randint(exponent, exponent + 2, (rows, features // GROUP), dtype=torch.uint8, device=CUDA)
    return MicroScaled(data, scales)


def tiled(x: Tensor, weight: MicroScaled, out: Tensor, memory: Tensor, tiling: Blocks) -> None:
    """A product in a tiling."""
    sizes = mxfp8_launch.pieces(len(x), weight, tiling=tiling)
    pieces = memory[: math.prod(sizes)].view(sizes)
    mxfp8_launch.mxfp8_linear(x, weight, out, pieces, tiling=tiling, dependent=True)


def line(tokens: int, rows: int, features: int, names: list[str], *, run: bool) -> None:
    """A line of the table. Not `run`: compile what it needs, and no more."""
    first = weights(rows, features)
    size = first.data.numel() + first.scales.numel()
    copies = [first]
    while run and len(copies) * size < OUT_OF_CACHE:
        copies.append(MicroScaled(first.data.clone(), first.scales.clone()))
    x = torch.randn(tokens, features, device=CUDA, dtype=torch.bfloat16)
    out, want = x.new_empty(tokens, rows), x.float() @ first.float().t()
    ways = {"portable": [partial(micro_scaled.launch_micro_scaled, x, copy, out, dependent=True) for copy in copies]}
    for name in names:
        if name == "chosen":
            tiling = mxfp8_launch.tiling_for(tokens, first)
        else:
            tiling = mxfp8_launch.tiling_of(tokens, *(int(number) for number in name.split("x")))
        if tiling.groups == 4 and tokens > mxfp8_launch.MOST_OF_FOUR_GROUPS:
            continue
        memory = torch.empty(math.prod(mxfp8_launch.pieces(tokens, first, tiling=tiling)), device=CUDA)
        ways[name] = [partial(tiled, x, copy, out, memory, tiling) for copy in copies]
    least = size / BYTES_PER_US
    texts = [f"{rows:6} {features:6} {tokens:4} bytes {least:6.1f}"]
    for name, runs in ways.items():
        out.fill_(torch.nan)
        runs[0]()
        if not run:
            continue
        wrong = not error(out, want) <= MOST_ERROR
        time = microseconds(runs, 2000.0)
        texts.append(f"{name} {time:6.1f} {least / time:4.0%}" + " WRONG" * wrong)
    if run:
        print(" | ".join(texts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="output x input features, e.g. 6144x16384,4096x6144")
    parser.add_argument("--tokens", default="1,4,16,64,128")
    parser.add_argument(
        "--tilings", default="chosen,2x1,2x2,4x1", help="chosen, or groups of warps that multiply times chunks of each"
    )
    parser.add_argument("--compile", action="store_true", help="compile the kernels, time nothing")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    for shape in arguments.shapes.split(","):
        rows, features = (int(size) for size in shape.split("x"))
        for tokens in arguments.tokens.split(","):
            line(int(tokens), rows, features, arguments.tilings.split(","), run=not arguments.compile)


if __name__ == "__main__":
    main()
