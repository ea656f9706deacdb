"""Times products of many tokens with FP8 weights on this machine's GPU, in TFLOP/s.

    python bench/fp8_linear.py                                                    # the shapes with published figures
    python bench/fp8_linear.py --tokens 16,32,64,128,256 --shapes 2112x7168       # where it begins to pay
    python bench/fp8_linear.py --shapes "" --experts "" --groups 8x1024x4096 --tokens 1,16,64,512,8192

Dense products: with activations that are rounded already ("product"), with their rounding before ("rounded"), of the
weights dequantized before ("dequantized"), and in bf16 from the beginning ("bf16"). Of up to 64 tokens, where the bytes
of the weights decide, a line behind has the product of torch beside ours, each with its share of 4.2 TB/s. Experts'
products: four experts with 8,192 tokens each, as they are for activations in FP8 ("rounded", the rounding of tokens
apart), widened to bf16 in registers ("widened") and stored in bf16 ("bf16"). Products of groups, as the output of
DeepSeek V4 has them, of groups x outputs x inputs of each: of few tokens by the kernel that streams any weights
("streamed") and by Hopper's own ("ring"), in GB/s of weights that come from memory; of many in the ways above, and
widened to bf16 in registers ("widened"). "error" is the largest norm of a row's difference from products in fp32 of the
same numbers, in norms of the row: of activations in bf16, so that it has the rounding in it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import microseconds
from verdict import error

from kernels.dequantize import dequantize
from kernels.linear import (
    MOST_STREAMED,
    PIECE,
    fits_w8a8,
    group_linear,
    supports_w8a8,
    takes_w8a8_groups,
    w8a8_group_linear,
    w8a8_linear,
    w8a8_pieces,
)
from kernels.linear.fp8_groups_launch import fp8_groups
from kernels.linear.groups import launch_group_linear
from kernels.linear.launch import stream_heads
from kernels.matrix import BlockScaled
from kernels.moe import launch, schedule
from kernels.moe.records import stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Workspace
from kernels.quantize import GROUP, quantize

TOKENS, SHAPES = "4096,8192", "7168x2048,7168x16384,4096x7168,2112x7168,24576x1536"
PUBLISHED = {(4096, 7168, 2048), (4096, 7168, 16384), (8192, 4096, 7168)}
"""Tokens, outputs and inputs for which figures are published."""
CUDA = torch.device("cuda")
MOST_DEPENDENT = 512
"""Most tokens whose kernels are launched dependently, as the general path does it."""
OUT_OF_CACHE = 200_000_000
"""Bytes of weights after which the first are in no cache any more."""


def weights(rows: int, features: int, experts: int = 0) -> BlockScaled:
    """Random ones, of standard deviation 1 / sqrt(features)."""
    outer = (experts,) if experts else ()
    data = torch.empty(*outer, rows, features, dtype=torch.float8_e4m3fn, device=CUDA)
    for part in data if experts else [data]:
        part.copy_(torch.randn(part.shape, device=CUDA) * 64)
    scales = (torch.rand(*outer, -(-rows // 128), features // 128, device=CUDA) + 0.5) * features**-0.5 / 64
    return BlockScaled(data, scales)


def dense(tokens: int, rows: int, features: int) -> None:
    """A line."""
    weight = weights(rows, features)
    x = torch.randn(tokens, features, device=CUDA, dtype=torch.bfloat16)
    out, wide = x.new_empty(tokens, rows), x.new_empty(rows, features)
    number, scale = torch.empty_like(x, dtype=torch.float8_e4m3fn), torch.empty(features // GROUP, tokens, device=CUDA)
    want = x.float() @ weight.float().t()

    def round_up() -> None:
        quantize(x, number, scale.t())

    def product() -> None:
        w8a8_linear(number, scale.t(), weight, out)

    def w8a8() -> None:
        round_up()
        product()

    def dequantized() -> None:
        dequantize(weight, wide)
        torch.mm(x, wide.t(), out=out)

    dequantized()
    texts = [f"{tokens:6} {rows:6} {features:6} {error(out, want):9.1e}"]
    ways: list[Callable[[], object]] = [dequantized, lambda: torch.mm(x, wide.t(), out=out)]
    here = torch.device(CUDA.type, torch.cuda.current_device())
    if supports_w8a8(here) and fits_w8a8(weight) and tokens % PIECE == 0:
        w8a8()
        texts.append(f"{error(out, want):9.1e}")
        ways = [product, w8a8, *ways]
    else:
        texts.append(f"{'-':>9}")
        texts += [f"{'-':>19}"] * 2
    for way in ways:
        time = microseconds([way])
        texts.append(f"{time:8.1f} us {2e-6 * tokens * rows * features / time:6.0f} T")
    time = microseconds([round_up])
    print(*texts, f"{time:6.1f} us to round, {3e-3 * x.numel() / time:5.0f} GB/s", flush=True)
    if w8a8_pieces(tokens, weight) is not None:
        few(number, scale.t(), weight, out, want)


def few(number: Tensor, scale: Tensor, weight: BlockScaled, out: Tensor, want: Tensor) -> None:
    """A line of products whose weights come from memory."""
    rows, features = weight.shape
    pieces = torch.empty(w8a8_pieces(len(out), weight) or (), device=CUDA)
    copies = [weight] + [
        BlockScaled(weight.data.clone(), weight.scales) for _ in range(OUT_OF_CACHE // weight.data.numel())
    ]
    texts = []
    for name, memory in (("torch", None), ("ours", pieces)):
        ways = [
            partial(w8a8_linear, number, scale, copy, out, pieces=memory, dependent=memory is not None)
            for copy in copies
        ]
        ways[0]()
        time = microseconds(ways)
        texts.append(f"{name} {error(out, want):9.1e} {time:8.1f} us {rows * features / time / 4.2e6:6.1%}")
    print(f"{'':21}", *texts, flush=True)


def grouped(each: int, experts: int, hidden: int, intermediate: int) -> None:
    """Lines of both products of experts that have `each` tokens."""
    tokens = each * experts
    shape = ExpertsShape(tokens, 1, experts, hidden, intermediate)
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    gate_up, down = weights(2 * intermediate, hidden, experts), weights(hidden, intermediate, experts)
    how = stored(gate_up), stored(down)
    x = torch.randn(tokens, hidden, device=CUDA, dtype=torch.bfloat16)
    id = (torch.randperm(tokens, device=CUDA) % experts).unsqueeze(1)
    weight = torch.ones(tokens, 1, device=CUDA)
    plain = tuple(torch.stack([all_[i].float().bfloat16() for i in range(experts)]) for all_ in (gate_up, down))
    tilings: dict[str, tuple[ExpertTiling, tuple[BlockScaled | Tensor, ...]]] = {
        "w8a8": (schedule.w8a8(shape, programs, how), (gate_up, down)),
        "widened": (schedule.tiling(shape, how), (gate_up, down)),
        "bf16": (schedule.grouped(shape, programs), plain),
    }
    want: Tensor | None = None
    for name in ("bf16", "widened", "w8a8"):
        tiling, both = tilings[name]
        buffer, out = torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8, device=CUDA), torch.empty_like(x)
        scratch = Workspace.over(buffer, shape, tiling)
        call = launch.ExpertLaunches(x, id, weight, both[0], both[1], out, scratch, shape, tiling)
        call.run()
        want = out.float() if want is None else want
        texts = [f"{name:10} {experts} x {each} tokens, {hidden} and {intermediate} features {error(out, want):9.1e}"]
        whole = microseconds([call.run])
        call.run()
        if tiling.w8a8:
            call.quantize()  # the tokens lay where the results are now
        for part, flops in ((call.gate_up, 4), (call.down, 2)):
            time = microseconds([part])
            teraflops = flops * 1e-6 * tokens * hidden * intermediate / time
            texts.append(f"{part.__name__} {time:8.1f} us {teraflops:6.0f} T")
        print(*texts, f"all {whole:8.1f} us {6e-6 * tokens * hidden * intermediate / whole:6.0f} T", flush=True)


def of_groups(tokens: int, groups: int, rows: int, features: int) -> None:
    """Lines of the products of groups."""
    weight = weights(groups * rows, features)
    x = torch.randn(tokens, groups, features, device=CUDA, dtype=torch.bfloat16)
    out = x.new_empty(tokens, groups, rows)
    want = torch.einsum("tge,gue->tgu", x.float(), weight.float().view(groups, rows, features)).flatten(1)
    if tokens <= MOST_STREAMED:
        size = groups * rows * features
        copies = [weight] + [BlockScaled(weight.data.clone(), weight.scales) for _ in range(OUT_OF_CACHE // size)]
        for name, way in (("streamed", stream_heads), ("ring", fp8_groups)):
            calls = [partial(way, x, copy, out, dependent=True) for copy in copies]
            calls[0]()
            wrong, time = error(out.flatten(1), want), microseconds(calls)
            print(f"{tokens:6} {name:12} {wrong:9.1e} {time:8.1f} us {1e-3 * size / time:6.0f} GB/s", flush=True)
        return
    wide = x.new_empty(groups * rows, features)
    number = torch.empty(tokens, groups * features, dtype=torch.float8_e4m3fn, device=CUDA)
    scale = torch.empty(number.shape[1] // GROUP, tokens, device=CUDA).t()

    def dequantized() -> None:
        dequantize(weight, wide)
        group_linear(x, wide, out)

    early = tokens <= MOST_DEPENDENT

    def product() -> None:
        w8a8_group_linear(number, scale, weight, out, dependent=early)

    def rounded() -> None:
        quantize(x.flatten(1), number, scale, dependent=early)
        product()

    ways: list[tuple[str, Callable[[], object]]] = [
        ("widened", lambda: launch_group_linear(x, weight, out)),
        ("dequantized", dequantized),
        ("bf16", lambda: group_linear(x, wide, out)),
    ]
    if takes_w8a8_groups(torch.device(CUDA.type, torch.cuda.current_device()), groups, weight):
        ways += [("rounded", rounded), ("product", product)]
    for name, call in ways:
        call()
        wrong, time = error(out.flatten(1), want), microseconds([call])
        teraflops = 2e-6 * tokens * groups * rows * features / time
        print(f"{tokens:6} {name:12} {wrong:9.1e} {time:8.1f} us {teraflops:6.0f} T", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", help=f"default: {TOKENS}, of the shapes that figures are published for")
    parser.add_argument("--shapes", default=SHAPES, help="outputs x inputs")
    parser.add_argument("--groups", default="", help="groups x outputs x inputs of each; empty: none")
    parser.add_argument("--experts", default="4x8192", help="experts x tokens of each; empty: none")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shapes = [tuple(map(int, shape.split("x"))) for shape in arguments.shapes.split(",") if shape]
    print("tokens outputs inputs  dequantized and rounded: error; product, rounded, dequantized, bf16")
    for tokens in map(int, (arguments.tokens or TOKENS).split(",")):
        for rows, features in shapes:
            if arguments.tokens or (tokens, rows, features) in PUBLISHED:
                dense(tokens, rows, features)
    for tokens in map(int, (arguments.tokens or TOKENS).split(",") if arguments.groups else ()):
        of_groups(tokens, *map(int, arguments.groups.split("x")))
    if arguments.experts:
        experts, each = map(int, arguments.experts.split("x"))
        grouped(each, experts, 7168, 2048)


if __name__ == "__main__":
    main()
