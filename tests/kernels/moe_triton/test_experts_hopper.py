"""Compilation of sorting and of the experts' products for Hopper, at the sizes of published models."""

from dataclasses import replace

import pytest
import torch

from kernels.moe import launch, schedule
from kernels.moe.schedule import ExpertsShape, Workspace
from kernels.quantize import GROUP, Fp8Rows
from kernels.rms_norm import AddNorm
from tests.support.hopper import compile_only, instructions, machine_code, resources

pytestmark = pytest.mark.gate

MODELS = {"V2-Lite": (6, 64, 2048, 1408, 2), "V3": (8, 256, 7168, 2048, 1), "demo": (2, 8, 192, 128, 1)}
"""Choices of a token, routed experts, hidden and intermediate features, shared experts."""
TOKENS = (1, 2, 120, 256, 4096)


def shape_of(model: str, tokens: int, dtype: torch.dtype = torch.bfloat16, groups: int = 0) -> ExpertsShape:
    chosen, experts, hidden, intermediate, shared = MODELS[model]
    return ExpertsShape(tokens, chosen + shared, experts + shared, hidden, intermediate, dtype, groups, shared)


def kernels(shape: ExpertsShape, *, added: bool = False) -> list[object]:
    """Compile a call, `added` to what comes before it. Only one expert's weights exist, because nothing runs."""
    tiling = schedule.tiling(shape)
    gate_up = torch.empty(1, 2 * shape.intermediate, shape.hidden, dtype=shape.dtype)
    down = torch.empty(1, shape.hidden, shape.intermediate, dtype=shape.dtype)
    x = torch.empty(shape.tokens, shape.hidden, dtype=shape.dtype)
    ids, weight = torch.zeros(shape.tokens, shape.chosen, dtype=torch.int64), torch.zeros(shape.tokens, shape.chosen)
    buffer = torch.empty(Workspace.bytes(shape, tiling), dtype=torch.uint8)
    scratch = Workspace.over(buffer, shape, tiling)
    out = torch.empty(shape.tokens, shape.groups, shape.hidden) if shape.groups else torch.empty_like(x)
    with compile_only() as compiled:
        how = {"dependent": True, "before_TE": torch.empty_like(x) if added else None}
        call = launch.ExpertLaunches(x, ids, weight, gate_up, down, out, scratch, shape, tiling, **how)
        call.run()
        if tiling.rows and not shape.groups:
            norm = AddNorm(out, torch.empty(shape.hidden, dtype=shape.dtype), 1e-6)
            call.combine_norm(norm)
            if shape.hidden % GROUP == 0:
                number, scale = (torch.empty_like(x, dtype=dtype) for dtype in (torch.float8_e4m3fn, torch.float32))
                rounded = Fp8Rows(number, scale[:, : shape.hidden // GROUP], scale[:, : shape.hidden // GROUP])
                replace(call, round_to=rounded).combine_norm(norm)
    return compiled


@pytest.mark.parametrize("groups", [0, 1, 8])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("model", MODELS)
def test_compiles_without_spills(model: str, tokens: int, groups: int) -> None:
    shape = shape_of(model, tokens, groups=groups)
    rows = schedule.tiling(shape).rows
    tall = rows >= 64
    for kernel in kernels(shape):
        found = resources(kernel)
        found.check()
        assert found.waits == (rows < 128 or found.name == "sort_few")
        if found.name in ("gate_up", "down") and rows:
            used = instructions(kernel)
            # Tiles reach shared memory past the registers, and tall ones are multiplied by whole groups of warps.
            assert {"LDGSTS", "UTMALDG"} & used.keys() or model == "demo"  # one step has no pipeline
            assert ("HGMMA" if tall else "HMMA") in used
        elif found.name in ("gate_up", "down") and model != "demo":
            assert "LDG.E.EF.128" in machine_code(kernel)


@pytest.mark.parametrize("tokens", [1, 120, 4096])
@pytest.mark.parametrize("model", MODELS)
def test_sums_that_are_added_to_what_comes_before_compile_without_spills(model: str, tokens: int) -> None:
    name = "combine" if tokens > 1 else "down"
    (found,) = [kernel for kernel in kernels(shape_of(model, tokens), added=True) if kernel.metadata.name == name]
    resources(found).check()


@pytest.mark.parametrize(
    ("model", "tokens", "groups", "three"),
    [
        ("V2-Lite", 256, 0, {"gate_up", "down"}),
        ("V3", 1024, 0, {"down"}),
        ("V2-Lite", 256, 8, {"gate_up", "down"}),
        ("V2-Lite", 256, 1, {"gate_up", "down"}),
    ],
)
def test_three_programs_of_tiles_of_64_stand_on_a_multiprocessor(
    model: str, tokens: int, groups: int, three: set[str]
) -> None:
    """Three programs on a multiprocessor are what keeps memory busy."""
    shape = shape_of(model, tokens, groups=groups)
    assert schedule.tiling(shape).rows == 64
    found = {kernel.name: kernel for kernel in map(resources, kernels(shape))}
    for name in three:
        found[name].check(65536 // (3 * 32 * found[name].warps) // 8 * 8)  # a warp gets them by eights
        assert 3 * (found[name].shared + 1024) <= 228 * 1024  # of each program 1 KiB is the system's


@pytest.mark.parametrize(("tokens", "launches"), [(512, ["sort_few"]), (513, ["count", "place"])])
def test_few_tokens_are_sorted_by_one_launch(tokens: int, launches: list[str]) -> None:
    """The launch has no atomics, of which a histogram is made."""
    found = kernels(shape_of("V2-Lite", tokens))
    sort = [kernel for kernel in found if kernel.metadata.name in ("sort_few", "count", "place")]
    assert [kernel.metadata.name for kernel in sort] == launches
    for kernel in sort:
        resources(kernel).check(128)
    assert ("ATOMS" in instructions(sort[0])) == (len(launches) > 1)


def test_one_sort_serves_all_numbers_of_tokens_up_to_a_power_of_two() -> None:
    """Tiles do not matter for the sort: a number of tokens that no bucket has compiles none under load."""
    shapes = [shape_of("demo", tokens) for tokens in (129, 160, 200, 224, 225, 256)]
    assert {schedule.tiling(shape).rows for shape in shapes} == {64, 128}
    shapes += [shape_of("demo", tokens) for tokens in (33, 40, 48, 64)]
    assert {schedule.tiling(shape).rows for shape in shapes} == {16, 64, 128}
    found = {kernel.hash for shape in shapes for kernel in kernels(shape) if kernel.metadata.name == "sort_few"}
    assert len(found) == 2


def test_fp32_compiles_without_spills() -> None:
    for tokens in (1, 5, 120, 300):
        for kernel in kernels(shape_of("demo", tokens, torch.float32)):
            resources(kernel).check()


def test_tokens_compile_no_more_than_the_tilings() -> None:
    """Every number of tokens with the same tiling runs the same machine code."""
    products: set[object] = set()
    tilings: set[object] = set()
    for tokens in (2, 3, 7, 16, 17, 31, 100, 129, 300, 1000, 1001):
        shape = shape_of("demo", tokens)
        tilings.add(schedule.tiling(shape))
        products |= {kernel.hash for kernel in kernels(shape) if kernel.metadata.name in ("gate_up", "down", "combine")}
    assert len(products) <= 3 * len(tilings)


@pytest.mark.parametrize("model", MODELS)
def test_one_kernel_sums_the_groups_of_every_number_of_tokens(model: str) -> None:
    products = set()
    for tokens in (1, 2, 3, 16, 17, 300, 4096):
        found = kernels(shape_of(model, tokens, groups=8))
        products.add(tuple(k.hash for k in found if k.metadata.name in ("gate_up", "down", "combine")))
    assert len(products) == 1


@pytest.mark.parametrize("tokens", [1, 2])
def test_narrow_tiles_of_gate_and_up(tokens: int) -> None:
    """Few tokens' programs of sums of groups, by the instruction of the wide ones: 64 pairs, 16 features at a time."""
    shape = replace(shape_of("V2-Lite", tokens, groups=8), hopper=132)
    assert schedule.tiling(shape).gate_up.block == 32
    assert schedule.tiling(replace(shape, tokens=8)).gate_up.block == 64
    (found,) = [kernel for kernel in kernels(shape) if kernel.metadata.name == "gate_up"]
    resources(found).check()
    used = instructions(found)
    assert "HGMMA" in used
    assert "HMMA" not in used
    assert "wgmma.mma_async.sync.aligned.m64n32k16" in found.asm["ptx"]


@pytest.mark.parametrize("tokens", [64, 256])
def test_all_results_of_a_token_are_on_their_way_at_once(tokens: int) -> None:
    """The sums of few tokens wait for memory once."""
    shape = shape_of("V2-Lite", tokens)
    sums = {k.metadata.name: machine_code(k) for k in kernels(shape) if k.metadata.name.startswith("combine")}
    assert len(sums) == 2
    for code in sums.values():
        # A thread has 8 features of every pair.
        ahead, _, behind = code.partition("BAR.SYNC")
        assert ahead.count("LDG.E.128.STRONG") >= shape.chosen
        # So are the weights to multiply by.
        assert behind[: behind.index("FFMA")].count("LDG.E.STRONG") == shape.chosen
