"""Hopper's decode kernels as they were compiled, run by the PTX emulator under drawn schedules."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from decode_case import Case

from kernels.latent_entry import decode, fp8_entry
from kernels.mla_decode import launch
from kernels.mla_decode.schedule import fp8_tiling, hopper_tiling, narrow_fp8_tiling, wide_fp8_tiling
from kernels.page import pages_for
from tests.support.ptx import Fault, Unordered, emulated

pytestmark = pytest.mark.long

BOTH = ["attend_narrow", "attend_wide"]


def check(
    path: str,
    case: Case,
    ctas: int,
    seed: int = 0,
    dependent: bool = True,
    early: bool = True,
    edit: Callable[[str], str] = str,
    **changes: int,
) -> None:
    of_fp8 = {"fp8": fp8_tiling, "narrow": narrow_fp8_tiling, "wide": wide_fp8_tiling}
    choose = of_fp8[path] if case.fp8 else hopper_tiling
    tiling = replace(choose(case.shape, ctas), **changes)
    assert tiling.path == path
    workspace, t = case.workspace(tiling), case.tensors
    tensors = (t[name] for name in ("q", "cache", "table", "length", "out", "lse"))
    with emulated(seed, edit=edit) as launches:
        launch.schedule(t["length"], t["table"], workspace, first=case.first)
        launch.attend(
            *tensors, workspace, scale=case.scale, first=case.first, dependent=dependent, early=dependent and early
        )
        launch.merge(t["out"], t["lse"], workspace, dependent=dependent)
    name = "attend_wide_fp8" if case.fp8 and path == "wide" else f"attend_{path}"
    assert launches[1:-1] == (BOTH if path == "either" else [name])
    case.compare_with(tiling)


def deepseek(
    lengths: list[int], width: int, heads: int, first: int = 0, invariant: bool = False, fp8: bool = False
) -> Case:
    return Case(lengths, width, heads, 512, 64, torch.bfloat16, first=first, invariant=invariant, fp8=fp8)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "ctas"),
    [([70, 1], 2, 16, 1), ([200, 65, 0, 1], 4, 16, 3), ([130, 64], 2, 40, 3), ([300], 23, 3, 2)],
)
def test_wide(lengths: list[int], width: int, heads: int, ctas: int) -> None:
    """One tile and several, whole and not; splits, and queries of more than one block."""
    check("wide", deepseek(lengths, width, heads), ctas, seed=len(lengths))


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.soak), 1])
def test_wide_under_other_schedules(seed: int) -> None:
    check("wide", deepseek([390, 64], 4, 16), 2, seed)


def test_wide_from_a_later_entry_on() -> None:
    check("wide", deepseek([2, 100], 4, 16, first=1), 2)


@pytest.mark.parametrize(
    ("lengths", "first", "ctas", "fp8"),
    [
        ([64, 128, 192, 1, 0, 65], 0, 1, False),
        pytest.param([64, 128, 192, 1, 0, 65], 0, 1, True, marks=pytest.mark.soak),
        *(
            (*case, fp8)
            for case in (([0, 200, 0, 130, 64], 1, 2), ([450, 3], 70, 1), ([127, 449], 0, 3))
            for fp8 in (False, True)
        ),
    ],
)
def test_wide_of_any_number_of_tiles(lengths: list[int], first: int, ctas: int, fp8: bool) -> None:
    """One, two, three and many; rows that a CTA goes on with, also after an odd number of tiles; rows without
    entries."""
    for seed in range(2):
        check("wide", deepseek(lengths, 4, 16, first, fp8=fp8), ctas, seed, dependent=seed > 0)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first", "ctas", "dependent"),
    [
        ([700, 1, 0, 65], 1, 32, 0, 1, True),
        ([200, 0, 130, 64], 4, 32, 1, 3, False),
        ([450, 3], 3, 32, 70, 2, True),
        ([64, 128, 192, 320, 1], 4, 16, 0, 1, True),
    ],
)
def test_wide_of_256_features(
    lengths: list[int], width: int, heads: int, first: int, ctas: int, dependent: bool
) -> None:
    """There is room for four tiles: fewer, as many and more, and rows that begin at any of them."""
    for seed in range(2):
        case = Case(lengths, width, heads, 256, 64, torch.bfloat16, first=first)
        check("wide", case, ctas, seed, dependent=dependent)


@pytest.mark.parametrize("length", [128, 129])
def test_either_of_256_features(length: int) -> None:
    check("either", Case([length], 2, 32, 256, 64, torch.bfloat16), 9, seed=length, short=128)


def test_invariant_mode_of_256_features() -> None:
    case = Case([515, 0, 70], 1, 32, 256, 64, torch.bfloat16, first=1, invariant=True)
    check("wide", case, 2, dependent=False)


@pytest.mark.parametrize(("fp8", "latent"), [(False, 512), (True, 512), (False, 256)])
def test_wide_does_not_depend_on_schedules(fp8: bool, latent: int) -> None:
    """Results are equal to the last bit."""
    results = []
    for seed in range(5):
        case = Case([330, 130, 5], 4, 16, latent, 64, torch.bfloat16, fp8=fp8)
        choose = wide_fp8_tiling if fp8 else hopper_tiling
        with emulated(seed):
            results.append([x.clone() for x in case.run(choose(case.shape, 2))])
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


def test_wide_that_does_not_ask_early() -> None:
    check("wide", deepseek([130, 64], 4, 16), 2, early=False)


@pytest.mark.parametrize(("path", "first"), [("wide", 0), ("fp8", 1)])
def test_invariant_mode(path: str, first: int) -> None:
    """A row of two pieces, one of one, and one without entries."""
    check(path, deepseek([515, 0, 70], 1, 16, first, invariant=True, fp8=path == "fp8"), 2, dependent=False)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first"),
    [
        pytest.param([0, 1, 64, 65, 129], 1, 16, 0, marks=pytest.mark.soak),
        pytest.param([130, 2, 70], 2, 8, 0, marks=pytest.mark.soak),
        ([71, 200], 1, 4, 70),
        ([7, 65], 5, 3, 1),
    ],
)
def test_narrow(lengths: list[int], width: int, heads: int, first: int) -> None:
    check("narrow", deepseek(lengths, width, heads, first), 3, seed=width)


@pytest.mark.parametrize(
    ("length", "width", "heads", "first"),
    [(200, 2, 16, 0), pytest.param(0, 2, 16, 0, marks=pytest.mark.soak), (64, 4, 8, 1), (71, 10, 3, 70)],
)
def test_narrow_with_a_row_of_two_blocks(length: int, width: int, heads: int, first: int) -> None:
    check("narrow", deepseek([length], width, heads, first), 5, seed=width)


@pytest.mark.parametrize(
    ("lengths", "first"),
    [
        *(pytest.param(lengths, 0, marks=pytest.mark.soak) for lengths in ([64, 0, 70, 1, 130, 64], [1] * 7)),
        *(pytest.param([200, 1, 0, 0, 1], first, marks=pytest.mark.soak) for first in (0, 1)),
        ([64, 0, 70, 1, 130, 64], 1),
        ([1] * 7, 1),
    ],
)
def test_narrow_where_ctas_go_on_with_other_rows(lengths: list[int], first: int) -> None:
    check("narrow", deepseek(lengths, 1, 16, first), 2, seed=first)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first", "ctas", "dependent"),
    [
        ([200, 0, 65], 1, 16, 0, 3, True),
        ([330, 70, 2, 64], 2, 8, 1, 2, True),
        ([130, 7], 3, 5, 1, 5, False),
        ([200], 1, 32, 70, 5, True),
        ([64, 0, 70, 1, 130, 64], 1, 8, 0, 2, True),
    ],
)
def test_narrow_of_256_features(
    lengths: list[int], width: int, heads: int, first: int, ctas: int, dependent: bool
) -> None:
    """One block of query vectors and two; more tiles than are in flight; CTAs that go on with other rows."""
    case = Case(lengths, width, heads, 256, 64, torch.bfloat16, first=first)
    check("narrow", case, ctas, seed=width, dependent=dependent)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first", "ctas", "early"),
    [
        ([0, 1, 64, 65], 1, 16, 0, 3, True),
        ([70, 2], 2, 16, 0, 2, False),
        ([7, 65], 5, 9, 1, 4, True),
        ([64, 0, 70, 1, 64], 1, 16, 1, 2, True),
        ([130], 2, 16, 0, 5, True),
    ],
)
def test_narrow_of_fp8_entries(lengths: list[int], width: int, heads: int, first: int, ctas: int, early: bool) -> None:
    """Cases are one block of 16 query vectors and of 32, several blocks, and CTAs that go on with other rows."""
    check("narrow", deepseek(lengths, width, heads, first, fp8=True), ctas, seed=width, early=early)


FP8_CASES: list[tuple[Any, ...]] = [
    ([0, 1, 64, 65], 1, 16, 0, 3, {}),
    ([200, 2], 2, 16, 0, 2, {"early": False}),
    ([7, 65], 5, 9, 1, 4, {}),
    ([64, 0, 70, 1, 64], 1, 9, 1, 2, {"dependent": False}),
    ([330], 1, 16, 70, 1, {}),
]


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first", "ctas", "how", "seed"),
    [
        pytest.param(*case, seed, marks=pytest.mark.soak if seed != (case[0] != [330]) else ())
        for case in FP8_CASES
        for seed in (0, 1)
    ],
)
def test_fp8(
    lengths: list[int], width: int, heads: int, first: int, ctas: int, how: dict[str, bool], seed: int
) -> None:
    """One block of 16 query vectors or of 32, and two; more tiles than the ring holds; CTAs that go on with other
    rows; a row's entries that begin and end inside a tile."""
    check("fp8", deepseek(lengths, width, heads, first, fp8=True), ctas, seed=seed, **how)


@pytest.mark.parametrize(
    ("lengths", "width", "heads", "first", "ctas", "how"),
    [
        ([200, 2, 64, 0], 4, 16, 0, 3, {}),
        ([7, 65], 5, 16, 1, 4, {"early": False}),
        ([64, 0, 70, 1, 130], 3, 16, 1, 2, {"dependent": False}),
        ([330], 1, 128, 70, 2, {}),
    ],
)
def test_wide_of_fp8_entries(
    lengths: list[int], width: int, heads: int, first: int, ctas: int, how: dict[str, bool]
) -> None:
    """One block of 64 query vectors and two, even numbers of tiles and odd ones; entries that begin and end inside a
    tile."""
    case = deepseek(lengths, width, heads, first, fp8=True)
    check("wide", case, ctas, seed=width, **how)


def test_wide_of_fp8_entries_are_those_of_what_they_are_read_as() -> None:
    """Results are equal to the last bit."""
    case = deepseek([200, 65, 3], 4, 16, fp8=True)
    with emulated():
        ours = [x.clone() for x in case.run(wide_fp8_tiling(case.shape, 3))]
        case.tensors["cache"] = decode(case.tensors["cache"], 512, 64, torch.bfloat16)
        plain = case.run(replace(hopper_tiling(case.shape, 3), path="wide", block=64))
    assert all(torch.equal(mine, want) for mine, want in zip(ours, plain, strict=True))


@pytest.mark.parametrize(("kernel", "fp8"), [("attend_wide", False), ("attend_wide_fp8", True)])
def test_wide_without_a_fence_is_found(kernel: str, fp8: bool) -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("fence.proxy.async.shared::cta;", "") if f".entry {kernel}(" in ptx else ptx

    with pytest.raises(Fault, match=f"{kernel}.* without fence.proxy.async"):
        check("wide", deepseek([70], 4, 16, fp8=fp8), 2, edit=edit)


@pytest.mark.parametrize("heads", [16, 40])
def test_fp8_of_large_and_small_numbers(heads: int) -> None:
    """Scales of every magnitude, also of neighbouring entries, whose scores are as ever."""
    case = deepseek([70, 66, 130], 1, heads, fp8=True)
    entries, q, table = (case.tensors[name] for name in ("cache", "q", "table"))
    entry = fp8_entry(512, 64, torch.bfloat16)
    scales = entries[..., entry.scales : entry.rope].clone().view(torch.float32)
    for row, power in enumerate((-60, 0, 60)):
        q[row, ..., :512] *= 2.0**-power
        for page in table[row, : pages_for(case.lengths[row])].tolist():
            scales[page] *= 2.0**power
    scales[table[1, 0], 7:20:3] *= 2.0**-30
    scales[table[1, 0], 8] *= 2.0**6
    entries[..., entry.scales : entry.rope] = scales.view(torch.uint8)
    check("fp8", case, 3)


def test_fp8_of_a_query_vector_that_is_not_finite() -> None:
    """The result of that query vector is not finite, those of others do not change."""
    case = deepseek([70, 66], 1, 16, fp8=True)
    t = case.tensors
    t["q"][0, 0, 3, 100] = torch.nan
    tiling = fp8_tiling(case.shape, 2)
    with emulated():
        case.run(tiling)
    assert t["out"][0, 0, 3].isnan().all()
    t["q"][0, 0, 3] = 0
    for name, want in zip(("out", "lse"), case.expected(), strict=True):
        t[name][0, 0, 3] = want[0, 0, 3]
    case.compare()


def test_fp8_that_does_not_wait_is_found() -> None:
    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if ".entry attend_fp8(" in ptx else ptx

    with pytest.raises(Fault, match=r"attend_fp8.* (before|without) griddepcontrol.wait"):
        check("fp8", deepseek([70], 1, 16, fp8=True), 2, edit=edit)


def test_narrow_launched_plainly() -> None:
    check("narrow", deepseek([200, 13], 1, 16), 3, dependent=False)


EITHER = {(3, 16, 1): (3, 128), (11, 3, 0): (3, 128, 129), (1, 128, 1): (0, 3, 64, 128, 200)}
"""Lengths by width, heads and first entry with which test_either executes what no other case does."""


@pytest.mark.parametrize(
    ("length", "width", "heads", "first"),
    [
        pytest.param(length, *shape, marks=() if length in EITHER.get(shape, ()) else pytest.mark.soak)
        for length, shape in product([0, 1, 3, 64, 128, 129, 200], [(4, 16, 0), *EITHER])
    ],
)
def test_either(length: int, width: int, heads: int, first: int) -> None:
    """A row up to the limit, one longer; in four narrow blocks or three, the last whole or not, or in eight of two wide
    ones."""
    check("either", deepseek([length], width, heads, first), 9, seed=length, short=128)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize(("width", "ctas", "short"), [(4, 4, -1), (4, 4, 500), (8, 17, 500)])
def test_either_under_other_schedules(seed: int, width: int, ctas: int, short: int) -> None:
    check("either", deepseek([390], width, 16), ctas, seed, short=short)


@pytest.mark.parametrize("length", [128, 129])
@pytest.mark.parametrize("how", [{"dependent": False}, {"early": False}], ids=["plainly", "not early"])
def test_either_launched_otherwise(length: int, how: dict[str, bool]) -> None:
    check("either", deepseek([length], 4, 16), 5, **how, short=128)


@pytest.mark.parametrize("length", [128, 129])
@pytest.mark.parametrize("kernel", BOTH)
def test_either_that_does_not_wait_is_found(length: int, kernel: str) -> None:
    """Whether it works or not."""

    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if f".entry {kernel}(" in ptx else ptx

    with pytest.raises(Fault, match=f"{kernel}.* (before|without) griddepcontrol.wait"):
        check("either", deepseek([length], 4, 16), 5, edit=edit, short=128)


@pytest.mark.parametrize(("length", "works"), [(128, "attend_narrow"), (129, "attend_wide")])
def test_either_is_one_of_two_kernels(length: int, works: str) -> None:
    """Nothing is written without the one that works."""
    case = deepseek([length], 4, 16)
    tiling = replace(hopper_tiling(case.shape, 9), short=128)
    workspace, t = case.workspace(tiling), case.tensors
    pieces = workspace.partial_SQL.view(torch.uint8), workspace.partial_lse_SQ.view(torch.uint8)

    def edit(ptx: str) -> str:
        return ptx.replace("// %bb.0:", "ret;\n", 1) if f".entry {works}(" in ptx else ptx

    for without, written in ((str, True), (edit, False)):
        with emulated(edit=without):
            launch.schedule(t["length"], t["table"], workspace)
            tensors = (t[name] for name in ("q", "cache", "table", "length", "out", "lse"))
            launch.attend(*tensors, workspace, scale=case.scale)
        assert t["out"].isnan().all()
        assert any(bool(x.ne(255).any()) for x in pieces) == written
        for x in pieces:
            x.fill_(255)


@pytest.mark.parametrize(("length", "works"), [(128, "attend_narrow"), (129, "attend_wide")])
def test_merge_that_does_not_wait_for_the_one_that_works_is_found(length: int, works: str) -> None:
    """The kernel that works may be two launches before the merge."""
    case = deepseek([length], 4, 16)
    tiling = replace(hopper_tiling(case.shape, 9), short=128)
    workspace, t = case.workspace(tiling), case.tensors

    def edit(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if ".entry merge(" in ptx else ptx

    def layer(dependent: bool) -> None:
        tensors = (t[name] for name in ("q", "cache", "table", "length", "out", "lse"))
        launch.attend(*tensors, workspace, scale=case.scale, dependent=dependent, early=dependent)
        launch.merge(t["out"], t["lse"], workspace, dependent=dependent)

    with emulated(consecutive=True, edit=edit):
        launch.schedule(t["length"], t["table"], workspace)
        layer(dependent=False)
        with pytest.raises(Unordered, match=f"^merge, .* which {works} writes"):
            layer(dependent=True)


def test_either_follows_lengths_that_change() -> None:
    """Two layers of one plan in dependent launches; then others of longer and shorter rows, in the same memory."""
    cases = [Case([length], 4, 16, 512, 64, torch.bfloat16, least_columns=5) for length in (70, 130, 0, 65)]
    tiling = replace(hopper_tiling(cases[0].shape, 8), short=100)
    workspace = cases[0].workspace(tiling)
    out, lse = cases[0].tensors["out"], cases[0].tensors["lse"]
    with emulated(3, consecutive=True) as launches:
        for case in cases:
            t = case.tensors | {"out": out, "lse": lse}
            launch.schedule(t["length"], t["table"], workspace)
            for layer in range(2):
                tensors = (t[name] for name in ("q", "cache", "table", "length", "out", "lse"))
                launch.attend(*tensors, workspace, scale=case.scale, dependent=layer > 0, early=layer > 0)
                launch.merge(out, lse, workspace, dependent=True)
            case.tensors["out"], case.tensors["lse"] = out.clone(), lse.clone()
    assert launches == 4 * ["schedule_splits", *BOTH, "merge", *BOTH, "merge"]
    for case in cases:
        case.compare()
