"""Selection by shards, references and Triton, against a sort of all scores. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from selection_by_shards import Case, check, drawn, garbage  # noqa: E402

from kernels import sparse_shards  # noqa: E402
from kernels.page import Shards  # noqa: E402
from kernels.sparse_shards import Candidates, OwnPages, launch, reference  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()

KERNELS = pytest.mark.parametrize("kernels", [False, True], ids=["reference", "triton"])
FEW = [-1.0, 0.0, -0.0, 2.0]
ODD = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1e-42, -1e-42, 3.0]


@KERNELS
@settings(max_examples=25, deadline=None)
@given(
    count=st.sampled_from([1, 2, 4, 8]),
    lengths=st.lists(st.integers(0, 700), min_size=1, max_size=3),
    selected=st.sampled_from([2, 16, 64, 600]),
    odd=st.booleans(),
    first=st.integers(0, 1),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_the_number_of_shards_changes_nothing(
    kernels: bool,
    count: int,
    lengths: list[int],
    selected: int,
    odd: bool,
    first: int,
    seed: int,
    data: st.DataObject,
) -> None:
    """Few different scores, so that ties decide; rows without entries, shards without any of a row's, and contexts that
    are selected as a whole. Planted faults that this finds: a tie goes to the highest position, or to the first shard;
    the scores of another row; a border's entry lost; the owner of the page before; what is -inf in the first place of
    every shard."""
    tokens = [(row, data.draw(st.integers(0, length))) for row, length in enumerate(lengths) for _ in range(2)]
    owners = data.draw(st.none() | st.lists(st.integers(0, count - 1), min_size=1, max_size=3), label="owners")
    case = Case(lengths, tokens, selected, count, first=first, owners=owners, seed=seed)
    scores = drawn(case, ODD if odd else FEW)
    if odd and first:
        scores[scores == -torch.inf] = 0.5  # which of these is left out cannot be told from the entry that is not there
    check(case, scores, kernels=kernels)


@KERNELS
@pytest.mark.parametrize("count", [2, 4, pytest.param(8, marks=pytest.mark.soak)])
@pytest.mark.parametrize("values", [[0.0], list(range(64))], ids=["all equal", "some equal"])
def test_long_contexts(kernels: bool, count: int, values: list[float]) -> None:
    """As many positions as published models select, of pages in turn, of one shard alone, and of shards by chance."""
    tokens = [(0, 9000), (0, 2048), (0, 2049), (1, 4097), (1, 0), (1, 64)]
    for owners in (list(range(count)), [count - 1], None):
        case = Case([9000, 4097], tokens, 2048, count, owners=owners)
        check(case, drawn(case, values), kernels=kernels)


@KERNELS
def test_faults_stay_what_they_are(kernels: bool) -> None:
    """Rows, bounds and positions outside of the table reach those kernels that count them."""
    how = launch if kernels else reference
    pages = OwnPages.allocate(2, 3, garbage)
    how.find_own_pages(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32), pages, Shards(2, 0))
    row_T = torch.tensor([0, 2, -1, 1, 1], dtype=torch.int32)
    bound_T = torch.tensor([193, 5, 7, -3, 192], dtype=torch.int32)
    own_T, first_T = torch.zeros(5, dtype=torch.int32), torch.ones(5, dtype=torch.bool)
    how.own_bounds(row_T, bound_T, pages, own_T, first_T)
    assert own_T.tolist() == [193, 5, 7, -3, 64]
    assert first_T.tolist() == [True, False, False, False, False]
    selected_TS = torch.tensor([[0, 192], [5, -1], [7, -1], [-1, -1], [64, 0]], dtype=torch.int32)
    own_TS = torch.full_like(selected_TS, -9)
    how.keep_selected(None, selected_TS, row_T, pages, own_TS, 0, **({"dependent": False} if kernels else {}))
    assert own_TS.tolist() == [[0, 192], [5, -1], [7, -1], [-1, -1], [64, -1]]


@KERNELS
@pytest.mark.parametrize("count", [2, 4, 8])
def test_pages_below_0_have_an_owner_who_finds_them_out_of_bounds(kernels: bool, count: int) -> None:
    """A planted fault: division rounds towards 0, and nobody has them."""
    how, table = launch if kernels else reference, list(range(-20, 20))
    for index in range(count):
        shards, pages = Shards(count, index), OwnPages.allocate(1, len(table), garbage)
        how.find_own_pages(torch.tensor([table], dtype=torch.int32), pages, shards)
        assert pages.local_RP[0].tolist() == [shards.local(page) if shards.owns(page) else 0 for page in table]
        own = [page for page in table if shards.owns(page)]
        assert pages.own_RP[0, : len(own)].tolist() == [shards.local(page) for page in own]


@KERNELS
def test_pages_beyond_one_block_of_columns(kernels: bool) -> None:
    how, pages = launch if kernels else reference, OwnPages.allocate(1, 600, garbage)
    how.find_own_pages(torch.arange(1, 601, dtype=torch.int32).unsqueeze(0), pages, Shards(2, 1))
    assert pages.own_RP[0, :300].tolist() == list(range(1, 301))
    assert pages.column_RP[0, :300].tolist() == list(range(1, 600, 2))
    assert pages.before_RP[0].tolist() == [column // 2 for column in range(600)]
    assert pages.local_RP[0].tolist() == [column % 2 * (column // 2 + 1) for column in range(600)]


def test_no_tokens() -> None:
    pages, candidates = OwnPages.allocate(0, 1, garbage), Candidates.allocate(0, 2, 64, garbage)
    none = torch.empty(0, dtype=torch.int32)
    launch.find_own_pages(pages.local_RP, pages, Shards(2, 0))
    launch.own_bounds(none, none, pages, none, none.bool())
    launch.offer_candidates(candidates.index_TS, torch.empty(0, 64), none, pages, candidates.part_TY, dependent=False)
    launch.order_candidates(candidates, dependent=False)
    launch.keep_selected(candidates, candidates.index_TS, none, pages, candidates.index_TS, 0, dependent=False)
    assert sparse_shards.candidate_columns(2, 48) == 128
