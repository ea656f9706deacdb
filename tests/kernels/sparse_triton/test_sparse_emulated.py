"""The kernels of sparse attention as they were compiled, launched dependently one after the other, under drawn
schedules."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_case import VALUES, Sparse, drawn_scores

from kernels.latent_entry import decode
from kernels.sparse import attention_launch, launch, workspace
from kernels.sparse.workspace import SelectWorkspace, SparseWorkspace
from tests.support.ptx import emulated
from tests.support.ptx.memory import Fault
from tests.support.ptx.order import Unordered

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def one_program_for_few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one program select for each token, even of the few tokens of a test."""
    monkeypatch.setattr(workspace, "WHOLE_TOKENS", 1)


def selected_by_one_program(bounds: list[int], selected: int, values: str, seed: int) -> None:
    """Positions of scores of one kind; those behind the bounds are large."""
    case = Sparse([(1, len(bounds))], selected=selected, kernels=True, hopper=True, dependent=True)
    case.tensors["bound"] = torch.tensor(bounds, dtype=torch.int32)
    scores = drawn_scores(values, len(bounds), 4096, seed, few=1024)
    behind = torch.arange(scores.shape[1]) >= case.tensors["bound"].unsqueeze(1)
    case.tensors["score"] = scores.masked_fill(behind, 1e30)
    with emulated(1, consecutive=True):
        case.select()
    case.check_selected()


def run(seed: int, rows: list[tuple[int, int]], *, edit: Any = None, fp8: bool = False, **sizes: Any) -> Sparse:
    """The four steps of one layer, then the first ones of another layer, which write over what the first has left."""
    sizes = {"index_heads": 16, "selected": 64, "dtype": torch.bfloat16, "programs": 3, "fp8": fp8, **sizes}
    case, other = (Sparse(rows, seed=seed + i, kernels=True, dependent=True, **sizes) for i in (0, 1))
    kept = {name: case.tensors[name].clone() for name in ("score", "selected", "out", "lse")}
    # Triton's own pipelined loops do without the fence behind cp.async.
    options = {"edit": edit} if edit else {}
    with emulated(seed, consecutive=True, fences=False, **options):
        case.write()
        case.score()
        case.select()
        case.attend()
        for name in kept:
            kept[name], case.tensors[name] = case.tensors[name].clone(), case.tensors[name]
            other.tensors[name] = case.tensors[name]
        other.score()
        other.select()
        other.attend()
    other.check_scores()
    other.check_selected()
    other.check_attention()
    case.tensors |= kept
    case.check_keys()
    case.check_scores()
    case.check_selected()
    case.check_attention()
    return case


@pytest.mark.parametrize(("seed", "fp8", "hopper"), [(0, False, False), (1, True, False), (2, True, True)])
def test_dependent_launches(seed: int, fp8: bool, hopper: bool) -> None:
    run(seed, [(130, 2), (0, 1)], heads=3, fp8=fp8, hopper=hopper)


@pytest.mark.parametrize(("heads", "fp8"), [(16, False), (64, False), (64, True)])
def test_published_sizes(heads: int, fp8: bool) -> None:
    """Attention with several tiles in flight, by two programs."""
    sizes: dict[str, Any] = {"latent": 512, "rope": 64, "selected": 192, "dtype": torch.bfloat16, "fp8": fp8}
    case = Sparse([(300, 1)], heads=heads, kernels=True, programs=2, **sizes)
    case.tensors["selected"][0] = torch.arange(192) + 90
    with emulated(heads, fences=False):
        case.attend()
    case.check_attention()


@pytest.mark.parametrize(
    ("heads", "fp8", "programs", "rows"),
    [
        (16, True, 8, [(300, 1), (0, 1), (70, 2)]),
        (40, True, 3, [(300, 1), (0, 1)]),
        (128, True, 2, [(300, 1), (0, 1)]),
        (20, False, 8, [(300, 1), (0, 1), (70, 2)]),
        (128, False, 2, [(300, 1)]),
    ],
)
def test_on_hopper(heads: int, fp8: bool, programs: int, rows: list[tuple[int, int]]) -> None:
    """Tokens that several programs share, one, or none; absent entries anywhere; what is outside is counted."""
    sizes: dict[str, Any] = {"latent": 512, "rope": 64, "selected": 320, "dtype": torch.bfloat16, "fp8": fp8}
    case = Sparse(rows, heads=heads, kernels=True, programs=programs, hopper=True, dependent=True, **sizes)
    random = torch.Generator().manual_seed(heads)
    case.tensors["selected"].fill_(-1)
    for token, bound in enumerate(case.tensors["bound"].tolist()):
        some = torch.randperm(bound, generator=random)[:320].sort().values
        case.tensors["selected"][token, : len(some)] = some.to(torch.int32)
    case.tensors["selected"][0, 5:9] = torch.tensor([-1, 1 << 20, -2, -1])
    # As in other loops of copies by threads, nothing stands between these and the products.
    with emulated(heads, consecutive=True, fences=False):
        case.attend()
    case.check_attention()
    assert int(case.tensors["fault"]) == 2


@pytest.mark.parametrize(
    ("programs", "seed", "fp8"),
    [
        *((programs, programs - 1, fp8) for programs in (1, 2) for fp8 in (False, True)),
        (3, 2, True),
        pytest.param(3, 2, False, marks=pytest.mark.soak),
    ],
)
def test_any_number_of_tiles_on_hopper(programs: int, seed: int, fp8: bool) -> None:
    """One, two, three and many, the last one full or not; tokens without entries beside them."""
    sizes: dict[str, Any] = {"latent": 512, "rope": 64, "selected": 320, "dtype": torch.bfloat16, "fp8": fp8}
    rows = [(64, 1), (128, 1), (130, 1), (0, 1), (320, 1), (5, 1)]
    case = Sparse(rows, heads=64, kernels=True, programs=programs, hopper=True, dependent=True, **sizes)
    case.tensors["selected"].fill_(-1)
    for token, bound in enumerate(case.tensors["bound"].tolist()):
        case.tensors["selected"][token, :bound] = torch.arange(bound, dtype=torch.int32).flip(0)
    with emulated(seed, consecutive=True, fences=False):
        case.attend()
    case.check_attention()


@pytest.mark.parametrize("heads", [64, 128])
def test_fp8_entries_on_hopper_are_what_they_are_read_as(heads: int) -> None:
    """Results are equal to the last bit, whatever the schedule: entries of long chunks are widened beforehand."""
    sizes: dict[str, Any] = {"latent": 512, "rope": 64, "selected": 320, "dtype": torch.bfloat16, "programs": 1}
    results = []
    for seed, fp8 in enumerate((True, False, True)):
        case = Sparse([(300, 1), (70, 1)], heads=heads, kernels=True, hopper=True, fp8=True, **sizes)
        case.tensors["selected"].fill_(-1)
        for token, bound in enumerate(case.tensors["bound"].tolist()):
            case.tensors["selected"][token, :bound] = torch.arange(bound, dtype=torch.int32)
        if not fp8:
            case.tensors["cache"], case.fp8 = decode(case.tensors["cache"], 512, 64, torch.bfloat16), False
        with emulated(seed, fences=False) as launches:
            case.attend()
        assert launches[1] == ("attend_selected_wide_fp8" if fp8 else "attend_selected")
        results.append((case.tensors["out"], case.tensors["lse"]))
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize(("heads", "fp8"), [(16, True), (40, True), (128, True), (128, False)])
def test_what_programs_take_is_read_past_l1(heads: int, fp8: bool) -> None:
    """Layers share a workspace, and of the second one other entries are absent."""
    sizes: dict[str, Any] = {"latent": 512, "rope": 64, "selected": 128, "programs": 4, "hopper": True}
    rows = [(300, 1), (70, 1)]
    case = Sparse(rows, heads=heads, kernels=True, dependent=True, dtype=torch.bfloat16, fp8=fp8, **sizes)
    t = case.tensors
    t["selected"].fill_(-1)
    t["selected"][0, :128], t["selected"][1, :70] = torch.arange(128), torch.arange(70)
    shape = len(t["row"]), heads, 512, case.selected, case.dtype
    workspace = SparseWorkspace.allocate(*shape, case._poisoned, fp8=fp8, multiprocessors=4, hopper=True)
    case.exact = workspace.tiling.path == "fp8"
    tensors = [t[name] for name in ("q", "cache", "page", "row", "selected", "out", "lse", "fault")]
    with emulated(heads, consecutive=True, fences=False):
        attention_launch.sparse_decode(*tensors, workspace, scale=case.scale, dependent=True)
        t["selected"][0, 100:] = -1
        attention_launch.sparse_decode(*tensors, workspace, scale=case.scale, dependent=True)
    case.check_attention()


def test_tokens_of_a_row_share_what_is_read() -> None:
    case = Sparse([(130, 3), (70, 3)], width=3, index_heads=64, dtype=torch.bfloat16, kernels=True)
    with emulated(3, fences=False):
        case.score()
    case.check_scores()


@pytest.mark.parametrize(
    ("rows", "width", "index_heads", "programs"),
    [
        ([(130, 1), (0, 1), (700, 1), (64, 1)], 1, 64, 5),
        ([(130, 2), (0, 2), (300, 2)], 2, 64, 4),
        ([(130, 3), (70, 3)], 3, 32, 1),
        ([(300, 5), (70, 1), (200, 3)], 0, 64, 2),
        ([(300, 21), (7, 7)], 0, 32, 3),
        ([(700, 9), (64, 20), (130, 7), (0, 7), (320, 8)], 0, 64, 2),
        ([(1200, 12)], 0, 64, 1),
    ],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_scores_on_hopper(
    rows: list[tuple[int, int]], width: int, index_heads: int, programs: int, invariant: bool, monkeypatch: Any
) -> None:
    """Tokens of a row, of several rows in one tile, and none; more pages than the ring has, and than shares; odd
    numbers of them and even ones."""
    monkeypatch.setattr(launch, "multiprocessors", lambda _: programs)
    sizes: dict[str, Any] = {"width": width, "index_heads": index_heads, "invariant": invariant, "heads": 1}
    case = Sparse(rows, dtype=torch.bfloat16, fp8=True, kernels=True, hopper=True, dependent=True, **sizes)
    with emulated(width, consecutive=True):
        case.score()
    case.check_scores()
    assert int(case.tensors["fault"]) == 0


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 90) | st.integers(120, 700), st.integers(1, 9)), min_size=1, max_size=4)
    | st.lists(st.tuples(st.integers(0, 700), st.integers(1, 2)), min_size=4, max_size=9),
    width=st.just(0) | st.integers(0, 8),
    index_heads=st.sampled_from([16, 32, 64]),
    programs=st.integers(1, 6),
    invariant=st.booleans(),
    seed=st.integers(0, 99),
)
def test_scores_of_any_rows_on_hopper(
    lengths: list[tuple[int, int]], width: int, index_heads: int, programs: int, invariant: bool, seed: int
) -> None:
    """Rows have as many tokens as a width; without one, they are chunks of any."""
    rows = [(length, width or tokens) for length, tokens in lengths]
    sizes: dict[str, Any] = {"width": width, "index_heads": index_heads, "invariant": invariant, "heads": 1}
    case = Sparse(rows, dtype=torch.bfloat16, fp8=True, kernels=True, hopper=True, dependent=True, seed=seed, **sizes)
    with pytest.MonkeyPatch.context() as patch, emulated(seed, consecutive=True):
        patch.setattr(launch, "multiprocessors", lambda _: programs)
        case.score()
    case.check_scores()
    assert int(case.tensors["fault"]) == 0


@pytest.mark.parametrize(
    ("heads", "rows", "seed"),
    [
        pytest.param(heads, rows, seed, marks=() if seed in kept else pytest.mark.soak)
        for heads, rows, seeds, kept in (
            (16, [(70, 1), (100, 1), (110, 1), (120, 1), (640, 1)], range(5, 20), (9, 10, 11, 16, 17)),
            (32, [(70, 1), (100, 1), (110, 1), (900, 1)], range(8), (0,)),
            (64, [(640, 1), (1500, 1)], range(4), (2,)),
        )
        for seed in seeds
    ],
)
def test_rows_of_any_number_of_pages_keep_to_the_slots_of_their_groups(
    heads: int, rows: list[tuple[int, int]], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One program, whose groups of warps share out the pages of one row after the other. Where a row's first page is
    the first group's again, whatever the slot, 16 heads with seed 11 end in a fault, and others in wrong scores."""
    monkeypatch.setattr(launch, "multiprocessors", lambda device: 1)
    sizes: dict[str, Any] = {"heads": 1, "dtype": torch.bfloat16, "fp8": True, "kernels": True, "hopper": True}
    case = Sparse(rows, width=0, index_heads=heads, dependent=True, **sizes)
    with emulated(seed, consecutive=True):
        case.score()
    case.check_scores()


@settings(max_examples=12, deadline=None)
@given(
    bounds=st.lists(st.integers(0, 130) | st.integers(0, 4096), min_size=1, max_size=3),
    selected=st.sampled_from([1, 3, 64, 500]),
    shape=st.sampled_from([(4, 1), (4, 2), (8, 4), (16, 4)]),
    values=st.sampled_from(VALUES),
    seed=st.integers(0, 99),
)
def test_any_selection_by_one_program(
    bounds: list[int], selected: int, shape: tuple[int, int], values: str, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "WHOLE_OF_FEW", shape)
        selected_by_one_program(bounds, selected, values, seed)


@pytest.mark.parametrize("planted", ["pages", "bounds"])
def test_what_is_outside_is_counted_and_not_followed(planted: str) -> None:
    """Counts are those of the portable kernels: a page is counted by every program that has it, a bound once."""
    case = Sparse([(100, 1), (70, 1), (0, 1), (20, 1)], width=1, index_heads=64, fp8=True, kernels=True, hopper=True)
    if planted == "pages":
        case.plant_faults()
        case.tensors["row"][3] = -1
        with emulated(0):
            case.score()
        assert int(case.tensors["fault"]) == 3
        case.check_scores()
    else:
        case.tensors["bound"] = torch.tensor([-1, 64, case.tensors["score"].shape[1] + 1, 9], dtype=torch.int32)
        case.tensors["score"].normal_()
        with emulated(0):
            case.select()
        assert int(case.tensors["fault"]) == 2
        assert case.tensors["selected"][[0, 2]].eq(-1).all()
        assert case.tensors["selected"][3].tolist() == [*range(9), *[-1] * 55]


SLOW = ("normal", "zeros", "odd")
"""Values with which the shape that takes longest executes what the others do not."""


@pytest.mark.parametrize(
    ("warps", "rows", "selected", "bounds", "values"),
    [
        pytest.param(*shape, values, marks=() if shape[2] > 64 or values in SLOW else pytest.mark.soak)
        for shape in [(4, 2, 64, [130, 3000, 64, 65, 0]), (8, 4, 300, [4000, 301]), (4, 4, 512, [2500])]
        for values in VALUES
    ],
)
def test_selection_by_one_program(
    warps: int, rows: int, selected: int, bounds: list[int], values: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(workspace, "WHOLE_OF_FEW", (warps, rows))
    selected_by_one_program(bounds, selected, values, warps)


@pytest.mark.parametrize(
    "kernel", ["find_maxima", "keep_candidates", "list_positions", "attend", "score_pages_hopper", "select_whole"]
)
def test_without_its_wait_it_would_be_noticed(kernel: str) -> None:
    def without(ptx: str) -> str:
        return ptx.replace("griddepcontrol.wait;", "") if f".entry {kernel}(" in ptx else ptx

    with pytest.raises((Fault, Unordered)):
        run(0, [(130, 1)], heads=3, edit=without, fp8=True, hopper=kernel in ("score_pages_hopper", "select_whole"))


def test_one_program_has_a_group_for_each_selected_position() -> None:
    """The program would otherwise know no number that as many scores reach."""
    for tokens in (1, workspace.FEW_TOKENS, workspace.FEW_TOKENS + 1):
        for selected in (1, 64, 2048, 4096, 5000, 8192, 8193, 16384):
            whole = workspace.whole_selection(tokens, selected, 4 * max(selected, 512))
            assert whole is None or selected <= whole.groups
    assert workspace.whole_selection(64, 2048, 8192) is not None
    assert workspace.whole_selection(workspace.FEW_TOKENS + 1, 5000, 1 << 15) is None


def test_all_scores_of_half_of_the_groups_are_selected(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are as many scores as groups."""
    monkeypatch.setattr(workspace, "FEW_TOKENS", 0)
    allocate = partial(SelectWorkspace.allocate, selected=4096)
    monkeypatch.setattr(SelectWorkspace, "allocate", staticmethod(allocate))
    case = Sparse([(1, 1)], selected=4096, kernels=True, hopper=True, dependent=True)
    case.tensors["bound"] = torch.tensor([8192], dtype=torch.int32)
    high = torch.arange(8192) // 512 % 2 == 0
    case.tensors["score"] = torch.rand(1, 8192) + 10.0 * high
    with emulated(1, consecutive=True):
        case.select()
    case.check_selected()
