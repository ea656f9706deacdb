"""The decode kernels on a GPU: the portable ones anywhere, Hopper's own on Hopper; eager, and replayed from a graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import (
    SHORT_TOKENS,
    SHORT_TOKENS_OF_128,
    DecodeShape,
    DecodeTiling,
    Workspace,
    fp8_tiling,
    hopper_tiling,
    narrow_fp8_tiling,
    portable_tiling,
    wide_fp8_tiling,
)
from kernels.page import pages_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

Choose = Callable[..., DecodeTiling]
DEEPSEEK = {"latent": 512, "rope": 64, "dtype": torch.bfloat16, "device": "cuda"}
SMALL = DEEPSEEK | {"latent": 256}
"""Mistral Small 4."""
both_latents = pytest.mark.parametrize("sizes", [DEEPSEEK, SMALL], ids=["512", "256"])


def chooser(name: str) -> Choose:
    if name == "portable":
        return portable_tiling
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("these kernels are Hopper's")
    return hopper_tiling


@pytest.fixture(params=["portable", "hopper"])
def choose(request: pytest.FixtureRequest) -> Choose:
    plain = chooser(request.param)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    return lambda shape, _, fp8=False: plain(shape, processors, fp8=fp8)


def poisoned(cache: torch.Tensor) -> torch.Tensor:
    """Full of NaN, in either form."""
    cache.view(torch.uint8).fill_(255)
    return cache


LENGTHS = [0, 1, 63, 64, 65, 127, 128, 129, 700, 4097, 0]


@both_latents
@pytest.mark.parametrize("width", [1, 2, 3, 5, 7, 8])
def test_widths(choose: Choose, sizes: dict[str, Any], width: int) -> None:
    case = Case(LENGTHS, width, 16, **sizes)
    case.check(choose(case.shape, 0))


@both_latents
@pytest.mark.parametrize("heads", [1, 3, 16, 32, 63, 64, 126, 128])
def test_heads(choose: Choose, sizes: dict[str, Any], heads: int) -> None:
    for width in (1, 3):
        case = Case([4097, 0, 65, 130], width, heads, **sizes)
        case.check(choose(case.shape, 0))


@both_latents
@pytest.mark.parametrize("lengths", [[4096], [64], [1], [0], [9000, 1, 5000], [(i * 37) % 600 for i in range(300)]])
@pytest.mark.parametrize("width", [1, 4])
def test_batches(choose: Choose, sizes: dict[str, Any], lengths: list[int], width: int) -> None:
    case = Case(lengths, width, 16, **sizes)
    case.check(choose(case.shape, 0))


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_fp8_entries_at_widths(choose: Choose, width: int) -> None:
    for first in (0, 1):
        case = Case([max(length, first) for length in LENGTHS], width, 16, first=first, fp8=True, **DEEPSEEK)
        case.check(choose(case.shape, 0, fp8=True))


@pytest.mark.parametrize("heads", [1, 16, 20, 128])
@pytest.mark.parametrize("lengths", [[4096], [64], [1], [0], [9000, 1, 5000], [(i * 37) % 600 for i in range(300)]])
def test_fp8_entries_in_batches(choose: Choose, lengths: list[int], heads: int) -> None:
    for width in (1, 4):
        case = Case(lengths, width, heads, fp8=True, **DEEPSEEK)
        case.check(choose(case.shape, 0, fp8=True))


EVERY = [LENGTHS, [4096], [1], [0], [9000, 1, 5000], [(i * 37) % 600 for i in range(300)]]


@pytest.mark.parametrize(
    ("choose", "lengths", "heads"),
    [(fp8_tiling, lengths, heads) for lengths in EVERY for heads in (1, 16, 20, 40)]
    + [(wide_fp8_tiling, lengths, heads) for lengths in EVERY for heads in (16, 40, 128)]
    + [(narrow_fp8_tiling, EVERY[-1], heads) for heads in (16, 40)],
)
def test_fp8_entries_by_every_kernel_of_hopper(choose: Choose, lengths: list[int], heads: int) -> None:
    """The narrow one is that of few query vectors; here it has many."""
    chooser("hopper")
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for width, first in ((1, 0), (2, 1), (5, 0)):
        case = Case([max(n, first) for n in lengths], width, heads, first=first, fp8=True, **DEEPSEEK)
        case.check(choose(case.shape, processors))


@pytest.mark.parametrize(("latent", "rope"), [(64, 16), (200, 12), (512, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp8_entries_of_other_sizes_and_types(choose: Choose, latent: int, rope: int, dtype: torch.dtype) -> None:
    """Hopper's own kernels are of bf16 alone; who plans sees to that."""
    for invariant in (False, True):
        case = Case([5, 0, 600, 64], 3, 6, latent, rope, dtype, invariant=invariant, fp8=True, device="cuda")
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        own = dtype == torch.bfloat16
        case.check(choose(case.shape, 0, fp8=True) if own else portable_tiling(case.shape, processors, fp8=True))


@both_latents
@pytest.mark.parametrize("first", [1, 70])
def test_first_entry(choose: Choose, sizes: dict[str, Any], first: int) -> None:
    for width in (1, 4):
        case = Case([1, 2, 65, 71, 700, 4097], width, 16, first=first, **sizes)
        case.check(choose(case.shape, 0))


def test_the_demo_models_sizes(choose: Choose) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for invariant in (False, True):
            case = Case([5, 0, 600, 64], 3, 6, 64, 16, dtype, invariant=invariant, device="cuda")
            case.check(choose(case.shape, 0))


@pytest.mark.parametrize(("latent", "rope"), [(32, 8), (48, 24), (6, 12)])
def test_sizes_that_are_no_powers_of_two(choose: Choose, latent: int, rope: int) -> None:
    for invariant in (False, True):
        case = Case([5, 0, 600, 64], 3, 6, latent, rope, torch.float32, invariant=invariant, device="cuda")
        case.check(choose(case.shape, 0))


@pytest.mark.parametrize("width", [1, 4])
def test_split_boundaries(choose: Choose, width: int) -> None:
    """One row dealt to all CTAs, lengths around every multiple of their shares."""
    shape = DecodeShape(1, width, 16, 512, 64, 300)
    tiling = choose(shape, 0)
    for ctas in {tiling.ctas, tiling.ctas // tiling.parts(shape)}:
        for length in (ctas * 64 - 1, ctas * 64, ctas * 64 + 1, ctas * 128 + 1):
            case = Case([length], width, 16, **DEEPSEEK)
            case.check(choose(case.shape, 0))


@both_latents
@pytest.mark.parametrize(("width", "heads"), [(2, 16), (3, 16), (4, 16), (4, 9), (1, 64), (5, 16)])
@pytest.mark.parametrize("first", [0, 1])
def test_one_row_up_to_the_limit_and_beyond(
    choose: Choose, sizes: dict[str, Any], width: int, heads: int, first: int
) -> None:
    for length in (0, 1, width, 65, 1024, SHORT_TOKENS - 1, SHORT_TOKENS, SHORT_TOKENS + 1, 20000):
        case = Case([length], width, heads, first=first, **sizes)
        case.check(choose(case.shape, 0))


@pytest.mark.parametrize(("sizes", "fp8"), [(DEEPSEEK, False), (DEEPSEEK, True), (SMALL, False)])
@pytest.mark.parametrize("heads", [16, 128])
def test_a_row_alone_equals_the_row_in_a_batch_at_any_width(
    choose: Choose, heads: int, sizes: dict[str, Any], fp8: bool
) -> None:
    batch = Case([700, 65, 1025, 0, 4098, 16_386], 4, heads, invariant=True, fp8=fp8, least_columns=300, **sizes)
    out, lse = (x.clone() for x in batch.run(choose(batch.shape, 0, fp8=fp8)))
    for row, length in enumerate(batch.lengths):
        for width in (1, 2) if length else ():
            for token in range(batch.width - width + 1):
                seen = length - (batch.width - width - token)
                alone = Case([seen], width, heads, invariant=True, fp8=fp8, **sizes)
                alone.tensors["cache"] = batch.tensors["cache"]
                alone.tensors["table"] = batch.tensors["table"][row : row + 1]
                alone.tensors["q"] = batch.tensors["q"][row : row + 1, token : token + width].contiguous()
                got_out, got_lse = alone.run(choose(alone.shape, 0, fp8=fp8))
                assert torch.equal(got_out[0], out[row, token : token + width])
                assert torch.equal(got_lse[0], lse[row, token : token + width])


@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (4, 16), (2, 128)])
@pytest.mark.parametrize(
    ("sizes", "invariant", "fp8"),
    [*((DEEPSEEK, *how) for how in product((False, True), repeat=2)), (SMALL, False, False), (SMALL, True, False)],
)
@pytest.mark.parametrize(
    "batches",
    [
        [[4097, 64, 1, 700], [0, 0, 65, 0], [1, 1, 1, 5000], [3000] * 4, [0] * 4],
        [[1000], [SHORT_TOKENS + 1], [70], [12000], [SHORT_TOKENS], [0], [20000], [3]],
    ],
    ids=["several rows", "one row"],
)
def test_one_graph_serves_other_lengths_tables_and_queries(
    choose: Choose,
    batches: list[list[int]],
    width: int,
    heads: int,
    sizes: dict[str, Any],
    invariant: bool,
    fp8: bool,
) -> None:
    columns = max(90, *(2 + pages_for(length) for lengths in batches for length in lengths))
    cases = [
        Case(lengths, width, heads, least_columns=columns, invariant=invariant, fp8=fp8, seed=seed, **sizes)
        for seed, lengths in enumerate(batches)
    ]
    entries = max(case.tensors["cache"].shape[0] for case in cases)
    captured = cases[0]
    like = captured.tensors["cache"]
    captured.tensors["cache"] = poisoned(like.new_empty(entries, *like.shape[1:]))
    tiling = choose(captured.shape, 0, fp8=fp8)
    workspace = captured.workspace(tiling)
    captured.run(tiling, workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured.run(tiling, workspace)
    for case in cases[1:]:
        for name in ("q", "length", "table"):
            captured.tensors[name].copy_(case.tensors[name])
        poisoned(captured.tensors["cache"])
        captured.tensors["cache"][: case.tensors["cache"].shape[0]] = case.tensors["cache"]
        results = []
        for _ in range(20):
            captured.tensors["out"].fill_(torch.nan)
            captured.tensors["lse"].fill_(torch.nan)
            graph.replay()
            results.append((captured.tensors["out"].clone(), captured.tensors["lse"].clone()))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
        case.tensors["out"], case.tensors["lse"] = results[0]
        case.compare_with(tiling)


@pytest.mark.parametrize(
    "lengths",
    [[4097, 0, 65, 700, 64], [700], [SHORT_TOKENS], [SHORT_TOKENS + 1], [SHORT_TOKENS_OF_128], [65, 200] * 35],
    ids=["five rows", "one short row", "one at the limit", "one long row", "at the limit of 128", "many rows"],
)
@pytest.mark.parametrize(("width", "heads"), [(1, 16), (2, 16), (4, 16), (1, 128)])
@pytest.mark.parametrize(
    ("sizes", "fp8", "wgmma"),
    [(DEEPSEEK, False, False), (DEEPSEEK, True, False), (DEEPSEEK, True, True), (SMALL, False, False)],
    ids=["512", "512-fp8", "512-fp8-wgmma", "256"],
)
def test_dependent_launches_change_nothing(
    lengths: list[int], width: int, heads: int, sizes: dict[str, Any], fp8: bool, wgmma: bool
) -> None:
    chooser("hopper")
    case = Case(lengths, width, heads, fp8=fp8, **sizes)
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    choose = fp8_tiling if wgmma else narrow_fp8_tiling if fp8 else hopper_tiling
    tiling = choose(case.shape, processors)
    out, lse = (x.clone() for x in case.run(tiling))
    t, workspace = case.tensors, case.workspace(tiling)
    settled, query = t["cache"].clone(), t["q"].clone()
    for early in (False, True):
        for _ in range(30):
            t["out"].fill_(torch.nan)
            launch.schedule(t["length"], t["table"], workspace, dependent=True)
            t["cache"].copy_(settled)
            t["q"].fill_(torch.nan)
            t["q"].copy_(query)
            launch.attend(
                *(t[name] for name in ("q", "cache", "table", "length", "out", "lse")),
                workspace,
                scale=case.scale,
                dependent=True,
                early=early,
            )
            launch.merge(t["out"], t["lse"], workspace, dependent=True)
            assert torch.equal(t["out"], out)
            assert torch.equal(t["lse"], lse)


@both_latents
@pytest.mark.parametrize("fp8", [False, True])
def test_addresses_beyond_31_bits(choose: Choose, sizes: dict[str, Any], fp8: bool) -> None:
    for width in (1, 4):
        case = Case([130, 65, 700], width, 16, fp8=fp8, **sizes)
        small = case.tensors["cache"]
        far = 2**31 // small[0].numel() + 7
        cache = poisoned(small.new_empty(far + len(small), *small.shape[1:]))
        cache[far:] = small
        case.tensors["cache"] = cache
        used = case.tensors["table"] < far
        case.tensors["table"][used] += far
        case.check(choose(case.shape, 0, fp8=fp8))


@both_latents
def test_a_plan_serves_several_layers(choose: Choose, sizes: dict[str, Any]) -> None:
    case = Case([700, 0, 65], 2, 16, **sizes)
    tiling = choose(case.shape, 0)
    workspace = case.workspace(tiling)
    case.run(tiling, workspace)
    second = replace(case, seed=case.seed)
    second.tensors["table"].copy_(case.tensors["table"])
    second.tensors["cache"].mul_(-1)
    t = second.tensors
    launch.attend(*(t[n] for n in ("q", "cache", "table", "length", "out", "lse")), workspace, scale=second.scale)
    launch.merge(t["out"], t["lse"], workspace)
    second.compare()
    assert isinstance(workspace, Workspace)
