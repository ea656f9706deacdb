"""Times the mixture of experts on this machine's GPU: one layer inside a CUDA graph, every weight from memory.

    python bench/moe.py                                   # DeepSeek-V2-Lite's routed experts
    python bench/moe.py --tokens 256,512,1024,2048,4096,8192    # Hopper's own kernels (rows 128*) against the others
    python bench/moe.py --model v2-lite+shared            # with the shared experts, as models run them
    python bench/moe.py --model v3 --tokens 1,16,256
    python bench/moe.py --tokens 16 --sweep sweep.txt     # try other tiles, print the best
    python bench/moe.py --model v3+shared --format fp8 --tokens 1024,2048,4096,8192    # activations in FP8, too: 128*8
    python bench/moe.py --model k2 --format int4 --tokens 1,2,4,8,16,64    # Hopper's own for few tokens: 0*, 2*, 8*
    python bench/moe.py --model k2 --format int4 --tokens 1024,8192    # and for many, 64*, 128*
    python bench/moe.py --model v4-flash --format mxfp4 --tokens 1,16,64,1024
    python bench/moe.py --model v2-lite+shared --groups 8 --tokens 1,16,64,1024    # invariant mode's; Hopper's own: 64*
    python bench/moe.py --model v4-flash --format mxfp4 --tokens 1024,8192 --own --workers 0    # in half a minute

A graph holds several calls, each with a random routing of its own, so that a call finds few of its weights in L2.
"floor" is the bytes of the active experts' weights over 4.2 TB/s, or the products over 790 TFLOP/s where that is more,
1,580 of activations in FP8;
"share" is the floor over the time of the two products, sorting and summing included in "all". "error" is the largest of
a token, in norms of what the reference makes of it in fp32. Where a size was tried in more than one way, a line behind
it says which is fastest. Exit status 1 when a result is wrong; activations in FP8 may be as wrong as that makes them.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from timing import microseconds
from verdict import MOST_ERROR, error, verdict

from kernels.matrix import GROUP, BlockScaled, GroupScaled, Matrix, MicroScaled4
from kernels.moe import launch, reference, schedule
from kernels.moe.records import PLAIN, Stored, stored
from kernels.moe.schedule import ExpertsShape, ExpertTiling, Product, Workspace

MODELS = {
    "v2-lite": (6, 64, 2048, 1408, 0),
    "v2-lite+shared": (8, 66, 2048, 1408, 2),
    "v3": (8, 256, 7168, 2048, 0),
    "v3+shared": (9, 257, 7168, 2048, 1),
    "v3+shared/8": (9, 257, 7168, 256, 1),
    "k2": (8, 384, 7168, 2048, 0),
    "v4-flash": (6, 256, 4096, 2048, 0),
    "v4-flash/2": (6, 256, 4096, 1024, 0),
}
"""Experts of a token, experts, hidden and intermediate features, and how many of the experts are every token's.
"v3+shared/8" is what one of 8 ranks has, "v4-flash/2" one of 2."""
LIMITS = {"v4-flash": 10.0, "v4-flash/2": 10.0}
"""What gate and up are clamped to, where they are."""
ROUTINGS = 8
MOST_ERROR_W8A8 = 2**-4
"""Error of activations in FP8: they are rounded twice, each time by about a fortieth of a vector's norm."""


@dataclass(frozen=True)
class Problem:
    """The sizes of a layer, its weights, and several routings."""

    shape: ExpertsShape
    gate_up: Matrix
    down: Matrix
    x: torch.Tensor
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def active(self) -> float:
        """Experts that get a token, on average over the routings."""
        return sum(len(id.unique()) for id in self.ids) / len(self.ids)

    def floor(self, part: float = 3.0, w8a8: bool = False) -> float:
        """Microseconds no kernel can beat on one H200; `part` of an expert's three matrices."""
        shape = self.shape
        size = part * shape.hidden * shape.intermediate
        width = float(self.gate_up_data.element_size())
        if isinstance(self.gate_up, GroupScaled | MicroScaled4):
            width = 0.5 + self.gate_up.scales.element_size() / GROUP
        return max(width * size * self.active / 4.2e6, 2 * size * shape.pairs / (1580e6 if w8a8 else 790e6))

    @property
    def gate_up_data(self) -> torch.Tensor:
        """The numbers of `gate_up`, as they are stored."""
        return self.gate_up if isinstance(self.gate_up, torch.Tensor) else self.gate_up.data

    @cached_property
    def wanted(self) -> torch.Tensor:
        """The first routing's result in fp32."""
        out = torch.empty_like(self.x, dtype=torch.float32)
        plain = isinstance(self.gate_up, torch.Tensor)
        weights = (self.gate_up.float(), self.down.float()) if plain else (self.gate_up, self.down)
        reference.experts_grouped(self.x.float(), self.ids[0], self.weights[0], *weights, out, self.shape.limit)
        return out

    def calls(self, tiling: ExpertTiling, dependent: bool = True) -> list[launch.ExpertLaunches]:
        """Make a call for every routing, all with one workspace."""
        buffer = torch.empty(Workspace.bytes(self.shape, tiling), dtype=torch.uint8, device=self.x.device)
        scratch, out = Workspace.over(buffer, self.shape, tiling), torch.empty_like(self.x)
        if self.shape.groups:
            out = torch.zeros(self.shape.tokens, self.shape.groups, self.shape.hidden, device=self.x.device)
        return [
            launch.ExpertLaunches(
                self.x, id, weight, self.gate_up, self.down, out, scratch, self.shape, tiling, dependent
            )
            for id, weight in zip(self.ids, self.weights, strict=True)
        ]


def problem(shape: ExpertsShape, gate_up: Matrix, down: Matrix) -> Problem:
    """Random tokens and routings."""
    device = gate_up.device
    scores = torch.rand(ROUTINGS, shape.tokens, shape.experts, device=device)
    scores[..., shape.experts - shape.shared :] = 1.0  # every token's last choices
    ids = [score.argsort(dim=-1, stable=True)[:, -shape.chosen :].contiguous() for score in scores]
    weights = [torch.rand(id.shape, device=device) for id in ids]
    x = torch.randn(shape.tokens, shape.hidden, device=device, dtype=shape.dtype)
    return Problem(shape, gate_up, down, x, ids, weights)


def name_of(tiling: ExpertTiling) -> str:
    """Name a tiling by its rows, with a star if it is that of Hopper's own kernels, and an 8 if activations are in
    FP8."""
    return f"{tiling.rows}{'*' if tiling.programs or tiling.down_programs else ''}{'8' if tiling.w8a8 else ''}"


def error_of(case: Problem, tiling: ExpertTiling) -> float:
    """Return the error of the first routing's result, against `wanted`."""
    call = case.calls(tiling)[0]
    call.out_TE.zero_()
    call.run()
    return error(call.out_TE.sum(1) if case.shape.groups else call.out_TE, case.wanted)


def line(case: Problem, tiling: ExpertTiling) -> tuple[str, float, float]:
    """A line of the table; the microseconds of a call and its error."""
    calls = case.calls(tiling)
    wrong_by = error_of(case, tiling)
    whole = microseconds([call.run for call in calls])
    plain = microseconds([call.run for call in case.calls(tiling, dependent=False)])
    for call in calls[:1]:
        call.run()
        # The tokens lay where the results are now.
        if tiling.w8a8:
            call.quantize()
        if tiling.w4a8:
            call.gather()
        if tiling.rearranged:
            call.rearrange()
    singly = ("gate_up", "down") if tiling.programs else ("gate_up_singly", "down_singly")
    names = singly if tiling.rows == 0 else ("gate_up", "down", "sort", "combine")
    # One routing alone: the products read the tiles its sort left, and weights come from memory all the same when
    # there are many; for few the routings take turns.
    turns = calls if tiling.rows == 0 else calls[:1]
    parts = {name: microseconds([getattr(call, name) for call in turns], 2000.0) for name in names}
    gate_up, down, *rest = parts.values()
    all_floor, gate_up_floor, down_floor = (case.floor(part, tiling.w8a8) for part in (3.0, 2.0, 1.0))
    flops = 6 * case.shape.pairs * case.shape.hidden * case.shape.intermediate
    extra = " ".join(f"{part:7.1f}" for part in rest) or f"{'-':>7} {'-':>7}"
    text = (
        f"{case.shape.tokens:6} {name_of(tiling):>5} {case.active:6.1f} {all_floor:8.1f} {whole:8.1f} {plain:8.1f} "
        f"{gate_up:8.1f} {gate_up_floor / gate_up:5.0%} {down:8.1f} {down_floor / down:5.0%} {extra} "
        f"{all_floor / whole:6.0%} {flops / whole / 1e6:6.0f} {wrong_by:8.1e}"
    )
    return text, whole, wrong_by


def variants(spec: str) -> list[tuple[str, int, Product]]:
    """Lines of a sweep: which product, rows, block, block_k, stages, warps, group, tma."""
    found = []
    for text in spec.splitlines():
        words = text.split("#")[0].split()
        if words:
            name, *numbers = words
            rows, block, block_k, stages, warps, group, tma = map(int, numbers)
            found.append((name, rows, Product(block, block_k, stages, warps, group, bool(tma))))
    return found


def sweep(case: Problem, tries: Iterable[tuple[str, int, Product]]) -> None:
    """Time every variant that suits the number of tokens; the best last."""
    results: dict[str, list[tuple[float, str]]] = {"gate_up": [], "down": []}
    for name, rows, product in tries:
        tiling = with_product(case.shape, name, rows, product)
        calls = case.calls(tiling)
        try:
            calls[0].run()
            turns = calls if rows == 0 else calls[:1]
            method = name + "_singly" if rows == 0 else name
            time = microseconds([getattr(call, method) for call in turns], 1500.0, 5)
        except Exception as error:
            print(name, rows, astuple(product), type(error).__name__, str(error)[:80], flush=True)
            continue
        share = case.floor(2.0 if name == "gate_up" else 1.0) / time
        results[name].append((time, f"{name:8} {rows:4} {astuple(product)!s:36} {time:9.1f} {share:5.0%}"))
    for name, lines in results.items():
        print(f"-- {case.shape.tokens} tokens, {name}")
        print("\n".join(text for _, text in sorted(lines)), flush=True)


def with_product(shape: ExpertsShape, name: str, rows: int, product: Product) -> ExpertTiling:
    """A tiling in which one product is `product`. The other is that of tiles of 64 where none has this height."""
    own = schedule.PRODUCTS.get(rows, schedule.PRODUCTS[64])
    both = dict(zip(("gate_up", "down"), own, strict=True)) | {name: product}
    return schedule.fitted(ExpertTiling(rows, both["gate_up"], both["down"], schedule.tiling(shape).partial), shape)


def weights(experts: int, rows: int, features: int, format: str, device: str) -> Matrix:
    """Random experts' matrices of standard deviation 1 / sqrt(features): bf16, fp8 in blocks, int4 in groups
    or mxfp4."""
    if format == "bf16":
        return torch.randn(experts, rows, features, device=device, dtype=torch.bfloat16) * features**-0.5
    if format == "int4":
        data = torch.randint(0, 256, (experts, rows, features // 2), dtype=torch.uint8, device=device)
        scales = (torch.rand(experts, rows, features // GROUP, device=device) + 0.5) * (features**-0.5 / 4.6)
        return GroupScaled(data, scales.bfloat16())
    if format == "mxfp4":
        data = torch.randint(0, 256, (experts, rows, features // 2), dtype=torch.uint8, device=device)
        exponents = torch.randint(0, 3, (experts, rows, features // GROUP), dtype=torch.uint8, device=device)
        return MicroScaled4(data, exponents + (round(math.log2(features**-0.5)) + 124)).with_least()
    data = torch.empty(experts, rows, features, device=device, dtype=torch.float8_e4m3fn)
    for expert in data:
        expert.copy_(torch.randn(rows, features, device=device) * 64)
    scales = torch.rand(experts, -(-rows // 128), -(-features // 128), device=device) + 0.5
    return BlockScaled(data, scales * features**-0.5 / 64)


def compile_one(shape: ExpertsShape, tiling: ExpertTiling) -> None:
    """Put the kernels of a call into Triton's cache, without a GPU."""
    from tests.support.hopper import compile_only

    few, format = replace(shape, tokens=min(shape.tokens, 8192)), tiling.stored[0].format
    format = "bf16" if format == "plain" else format
    gate_up = weights(1, 2 * shape.intermediate, shape.hidden, format, "cpu")
    down = weights(1, shape.hidden, shape.intermediate, format, "cpu")
    x = torch.empty(few.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(few.tokens, shape.chosen, dtype=torch.int64), torch.zeros(few.tokens, shape.chosen)
    scratch = Workspace.over(torch.empty(Workspace.bytes(few, tiling), dtype=torch.uint8), few, tiling)
    with compile_only():
        launch.ExpertLaunches(x, ids, weight, gate_up, down, x, scratch, few, tiling, True).run()


def compile_all(jobs: list[tuple[ExpertsShape, ExpertTiling]], workers: int) -> None:
    """Compile side by side, so that the GPU does not wait for one compiler."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(compile_one, *job) for job in jobs]:
            error = future.exception()
            if error is not None:
                print("compile:", str(error)[:200])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="v2-lite")
    parser.add_argument("--tokens", default="1,2,4,16,64,128,256,512,1024,2048,4096,8192,16384")
    parser.add_argument("--format", choices=("bf16", "fp8", "int4", "mxfp4"), default="bf16", help="of the weights")
    parser.add_argument("--activations", choices=("bf16", "fp8"), default="fp8", help="fp8: of FP8 weights, either way")
    parser.add_argument("--groups", type=int, default=0, help="sums of so many groups, as invariant mode has them")
    parser.add_argument("--sweep", metavar="FILE", help="lines of: product rows block block_k stages warps group tma")
    parser.add_argument("--own", action="store_true", help="Hopper's own kernels alone")
    parser.add_argument("--workers", type=int, default=8, help="compilers that run side by side; 0: none run before")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    *sizes, shared = MODELS[arguments.model]
    counts = map(int, arguments.tokens.split(","))
    quantize_activations = arguments.activations == "fp8"
    shapes = [
        ExpertsShape(
            count,
            *sizes,
            groups=arguments.groups,
            shared=shared,
            quantize_activations=quantize_activations,
            limit=LIMITS.get(arguments.model, 0.0),
        )
        for count in counts
    ]
    if arguments.sweep and arguments.format != "bf16":
        parser.error("--sweep tries tiles of weights in bf16")
    tries = variants(Path(arguments.sweep).read_text()) if arguments.sweep else []
    _, experts, hidden, inner = sizes
    gate_up = weights(experts, 2 * inner, hidden, arguments.format, "cuda")
    down = weights(experts, hidden, inner, arguments.format, "cuda")
    how = stored(gate_up), stored(down)
    jobs = [(shape, tiling) for shape in shapes for tiling in tilings(shape, how, arguments.own)]
    jobs += [(shapes[-1], with_product(shapes[-1], *one)) for one in tries]
    if arguments.workers:
        compile_all(jobs, arguments.workers)
    columns = ("tokens", "rows", "active", "floor", "all", "no PDL", "gate_up", "share", "down", "share")
    print("{:>6} {:>5} {:>6} {:>8} {:>8} {:>8} {:>8} {:>5} {:>8} {:>5}".format(*columns), end="")
    print(f" {'sort':>7} {'combine':>7} {'share':>6} {'TFLOPs':>6} {'error':>8}   µs a call", flush=True)
    all_right = True
    for shape in shapes:
        case = problem(shape, gate_up, down)
        results = {}
        for tiling in tilings(shape, how, arguments.own):
            text, time, wrong_by = line(case, tiling)
            print(text, flush=True)
            # The verdict knows one bound; activations in FP8 have another one.
            results[name_of(tiling)] = time, wrong_by * (MOST_ERROR / MOST_ERROR_W8A8 if tiling.w8a8 else 1)
        right = all(wrong_by <= MOST_ERROR for _, wrong_by in results.values())
        all_right &= right
        if len(results) > 1 or not right:
            print(verdict(f"{shape.tokens} tokens", results), flush=True)
        wanted = [one for one in tries if suits(one[1], shape)]
        if wanted:
            sweep(case, wanted)
    sys.exit(not all_right)


def tilings(shape: ExpertsShape, how: tuple[Stored, Stored], own: bool = False) -> list[ExpertTiling]:
    """Return the tiling that is chosen without Hopper's own kernels, unless there are `own` ones alone, and for many
    tokens, and for sums of groups, those of these kernels, too."""
    found = [] if own else [schedule.tiling(shape, how)]
    if torch.cuda.get_device_capability() != (9, 0):
        return found
    programs = torch.cuda.get_device_properties(0).multi_processor_count
    if shape.groups:
        if how[1] == PLAIN and shape.for_group_sums:
            found.append(schedule.tiling(replace(shape, hopper=programs), how))
    elif schedule.alike_in_four_bits(how):
        if shape.for_four_bit_alone:
            found.append(schedule.four_bit_alone(shape, programs, how))
        if shape.for_four_bit_tiles:
            found.append(schedule.four_bit_tiled(shape, programs, how))
        if shape.for_four_bit_grouped(how) and shape.mean >= 4:
            found.append(schedule.four_bit_grouped(shape, programs, how))
        if shape.quantize_activations and shape.suits_w4a8(how) and shape.mean >= 4:
            found.append(schedule.w4a8(shape, programs, how))
    elif how == (PLAIN, PLAIN) and shape.tokens >= 256:
        found.append(schedule.grouped(shape, programs))
    elif how != (PLAIN, PLAIN) and shape.tokens >= 16 and shape.quantize_activations and shape.suits_w8a8:
        found.append(schedule.w8a8(shape, programs, how))
    return found


def suits(rows: int, shape: ExpertsShape) -> bool:
    """Whether a tile of so many rows is worth trying."""
    if rows == 0:
        return shape.tokens <= 4
    return rows <= max(16, 3 * shape.mean) and rows >= min(shape.mean / 2.5, 64)


if __name__ == "__main__":
    main()
