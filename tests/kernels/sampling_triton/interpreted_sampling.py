"""The sampling and verification kernels in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import math  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
import triton  # noqa: E402
import triton.language as tl  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sampling_case import ALL, FILTERED, GREEDY, PLAIN, Case, neutral_tables  # noqa: E402

from kernels.decode_state import accept_drafts_reference, launch_accept_drafts  # noqa: E402
from kernels.sampling import ALL_FEATURES, Feature, SampledRows, gumbel_noise, launch, reference, workspace  # noqa: E402
from kernels.sampling import tables as column  # noqa: E402
from kernels.sampling.kernel import gumbel  # noqa: E402
from kernels.sampling.reference import gumbel_from_words  # noqa: E402
from kernels.sampling.search import halfway, key_of, value_of  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")


def agree(case: Case) -> None:
    assert case.launched() == case.expected()
    assert case.launched_by_name() == case.expected_by_name()


@pytest.mark.parametrize("kind", [GREEDY, PLAIN, FILTERED, ALL])
@pytest.mark.parametrize(("vocab", "width", "others"), [(67, 3, 2), (1031, 2, 0), (5003, 1, 1)])
def test_tokens_are_those_of_the_reference(kind: str, vocab: int, width: int, others: int) -> None:
    agree(Case.random(vocab, 4, width, others, seed=1, kind=kind))


@settings(max_examples=8, deadline=None)
@given(
    vocab=st.integers(1, 300),
    decode_rows=st.integers(0, 3),
    width=st.integers(1, 4),
    others=st.integers(0, 3),
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.05, 2.0, 8.0]),
)
def test_any_layout(vocab: int, decode_rows: int, width: int, others: int, seed: int, spread: float) -> None:
    agree(Case.random(vocab, decode_rows, width, others, seed, spread=spread))


@pytest.mark.parametrize("kind", [GREEDY, FILTERED, ALL])
@pytest.mark.parametrize(("vocab", "width", "others"), [(67, 3, 2), (1031, 2, 1)])
def test_masked_tokens_are_those_of_the_reference(kind: str, vocab: int, width: int, others: int) -> None:
    agree(Case.random(vocab, 4, width, others, seed=2, kind=kind).masked(5))


@settings(max_examples=8, deadline=None)
@given(vocab=st.integers(1, 300), width=st.integers(1, 4), others=st.integers(0, 3), seed=st.integers(0, 10**6))
def test_any_masked_layout(vocab: int, width: int, others: int, seed: int) -> None:
    agree(Case.random(vocab, 2, width, others, seed).masked(seed))


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_mask_hides_no_broken_number(number: float) -> None:
    case = Case.random(70, 0, 1, 2, seed=6, kind=PLAIN).masked(1)
    case.rows.slot_R.copy_(torch.arange(2))
    case.rows.masks.index_N.fill_(0)
    case.rows.masks.bits_MB[0] = torch.tensor([1, 0, 0])  # id 0 alone
    case.logits[1, 5] = number
    assert case.launched_by_name()[:2] == ([0, 0], [0, 1])
    agree(case)


@pytest.mark.parametrize("allowed", [1, 3, 39, 40, 41, 300, 900])
def test_top_k_of_what_a_mask_leaves(allowed: int) -> None:
    """Fewer ids than top_k keeps, as many, more than are kept aside."""
    vocab = 900
    case = Case.random(vocab, 3, 1, 0, 3, FILTERED).masked(1)
    case.rows.slot_R.copy_(torch.arange(3))
    case.tables.real_SF[:3, column.TEMPERATURE] = 1.0
    case.tables.real_SF[:3, column.TOP_P] = torch.tensor([1.0, 0.9, 1.0])
    case.tables.whole_SI[:3, column.TOP_K] = 40
    ids = torch.randperm(vocab)[:allowed].tolist()
    words = [sum(1 << (i % 32) for i in ids if i // 32 == word) for word in range(-(-vocab // 32))]
    case.rows.masks.bits_MB[0] = torch.tensor([w - (1 << 32) if w >> 31 else w for w in words], dtype=torch.int32)
    case.rows.masks.index_N[:3] = 0
    with pytest.MonkeyPatch.context() as patch:
        for module in (workspace, launch):
            patch.setattr(module, "ASIDE", 64)
        patch.setattr(launch, "_SEARCH_LANES", 256)
        agree(case)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits(dtype: torch.dtype) -> None:
    agree(Case.random(130, 3, 2, 1, seed=4, kind=GREEDY, dtype=dtype))


def test_drafts_by_slot() -> None:
    agree(Case.random(400, 0, 2, 6, seed=3, by_slot=True))


@settings(max_examples=4, deadline=None)
@given(seed=st.integers(0, 10**6), flat=st.booleans(), aside=st.sampled_from([16, 64]))
def test_floors_are_those_of_the_reference(seed: int, flat: bool, aside: int) -> None:
    """Both keep the same ids, when few values fit aside and the bracket takes many passes; ties and masked ids are
    among them. Where min_p decides, the floor is a logarithm, whose last bit may differ, and no logit."""
    vocab = 900
    case = Case.random(vocab, 5, 1, 0, seed, FILTERED, spread=0.01 if flat else 6.0)
    case.rows.slot_R.copy_(torch.arange(5))
    case.tables.whole_SI[:5, column.TOP_K] = torch.tensor([1, 40, 0, 700, 40])
    case.tables.real_SF[2, column.TOP_P] = 0.7
    case.logits[0, 5:9] = case.logits[0].max()
    case.logits[1] = (case.logits[1] * 4).round() / 4  # ties
    case.logits[3, ::3] = -math.inf
    case.logits[4] -= 40.0
    case.logits[4, 100:140] += 60.0  # any pivot between has exactly k ids above it
    case.tables.whole_SI[4, column.TOP_K] = 40
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workspace, "ASIDE", aside)
        patch.setattr(launch, "ASIDE", aside)
        patch.setattr(launch, "_SEARCH_ROWS", 2)
        patch.setattr(launch, "_SEARCH_LANES", 256)
        memory, token_N, fault_1 = case.buffers()
        launch.sample(case.logits, case.rows, case.tables, token_N, fault_1, ALL_FEATURES, memory)
    peak_N1 = case.logits.amax(1, keepdim=True)
    scaled_NV = (case.logits - peak_N1) / case.tables.real_SF[:5, column.TEMPERATURE].unsqueeze(1)
    floor_N, last_N = reference.filter_floor(scaled_NV, torch.arange(5), case.tables, ALL_FEATURES)
    ours_NV, wanted_NV = (
        reference.kept(scaled_NV, *found) for found in ((memory.floor_N, memory.last_N), (floor_N, last_N))
    )
    top_k, top_p = case.tables.whole_SI[:5, column.TOP_K], case.tables.real_SF[:5, column.TOP_P]
    for row in range(5):
        if 0 < top_k[row] < vocab or top_p[row] < 1:
            assert torch.equal(ours_NV[row], wanted_NV[row]), row
            torch.testing.assert_close(memory.floor_N[row], floor_N[row], rtol=2**-22, atol=0)


@pytest.mark.parametrize(("vocab", "aside"), [(1, 16), (7, 16), (100, 16), (500, 1024)])
def test_of_equal_ids_at_the_border_of_top_p_the_lowest_stay(
    vocab: int, aside: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are more equal ids than are kept aside, and fewer; the border is in the first, the last or no block of the
    row."""
    for module in (workspace, launch):
        monkeypatch.setattr(module, "ASIDE", aside)
    monkeypatch.setattr(launch, "_SEARCH_LANES", 64)
    case, kept_NV = Case.tied(vocab, seed=vocab)
    assert torch.equal(case.kept(), kept_NV)
    assert case.launched() == case.expected()


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_keys_order_as_floats_do(a: float, b: float) -> None:
    keys = torch.zeros(3, dtype=torch.int32)
    back = torch.zeros(2)
    _keys[(1,)](torch.tensor([a, b]), keys, back)
    low, high, middle = keys.tolist()
    assert (low < high, low == high) == (a < b, a == b)
    assert back.tolist() == [a, b]
    assert middle == (low + high) // 2


@triton.jit
def _keys(values, keys, back):
    a, b = key_of(tl.load(values)), key_of(tl.load(values + 1))
    tl.store(keys, a)
    tl.store(keys + 1, b)
    tl.store(keys + 2, halfway(a, b))
    tl.store(back, value_of(a))
    tl.store(back + 1, value_of(b))


def test_noise_is_the_reference_s() -> None:
    generator = torch.Generator().manual_seed(0)
    word = torch.randint(0, 2**32, (4096 - 8,), generator=generator)
    word = torch.cat((word, torch.tensor([0, 1, 255, 2**24, 2**31, 2**32 - 257, 2**32 - 2, 2**32 - 1])))
    out = torch.zeros(4096)
    _gumbel[(1,)](word, out)
    torch.testing.assert_close(out, gumbel_from_words(word), rtol=0, atol=2e-6)


@triton.jit
def _gumbel(word, out):
    lane = tl.arange(0, 4096)
    tl.store(out + lane, gumbel(tl.load(word + lane).to(tl.uint32)))


def test_noise_comes_from_seed_position_and_id() -> None:
    """Flat logits leave the noise alone to decide."""
    rows, vocab = 12, 2500
    tables = neutral_tables(rows, vocab)
    tables.real_SF[:rows, column.TEMPERATURE] = 1.0
    tables.whole_SI[:rows, column.SEED] = torch.arange(rows) * 10**17 - 5
    position_N = torch.arange(rows) * 10**12 + 3
    case = Case(tables, torch.zeros(rows, vocab), SampledRows(torch.arange(rows), position_N, ahead=1))
    noise_NV = gumbel_noise(tables.whole_SI[:rows, column.SEED], position_N + 1, vocab)
    assert case.launched() == (noise_NV.argmax(1).tolist(), 0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [math.nan, math.inf, "all masked"])
def test_broken_logits_are_counted(poison: float | str, temperature: float) -> None:
    case = Case.random(2500, 6, 1, 0, seed=6, kind=FILTERED)
    case.tables.real_SF[:, column.TEMPERATURE] = temperature
    case.rows.slot_R.copy_(torch.arange(6))
    if poison == "all masked":
        case.logits[2] = -math.inf
    else:
        case.logits[2, 2300] = poison
    tokens, fault = case.launched()
    assert (tokens, fault) == case.expected()
    assert (tokens[2], fault) == (0, 1)


def test_padded_rows_give_zero_whatever_their_logits() -> None:
    case = Case.random(70, 3, 2, 1, seed=6)
    case.rows.slot_R.copy_(torch.tensor([-1, len(case.tables.real_SF) - 1, 0, -1]))
    case.logits[[0, 1, 2, 3, 6]] = math.nan
    tokens, fault = case.launched()
    assert fault == 0
    assert tokens[:4] == [0, 0, 0, 0]
    assert tokens[6] == 0
    assert (tokens, fault) == case.expected()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_of_equal_ids_wins(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randint(-3, 0, (6, 5003), generator=generator).to(dtype)
    ties = torch.randint(0, 5003, (6, 6), generator=generator)
    logits.scatter_(1, ties, 1.0)
    logits[0].clamp_(max=0.0)[ties[0]] = torch.tensor([0.0, -0.0] * 3, dtype=dtype)
    case = Case(neutral_tables(6, 5003), logits, SampledRows(torch.arange(6), torch.zeros(6, dtype=torch.int64)))
    assert case.launched() == (ties.amin(1).tolist(), 0)


def greedy(rows: int, vocab: int, **sampled: object) -> Case:
    """Greedy rows of slots 0, 1, ... whose logits fall with the id, so slowly that any bias or penalty turns them."""
    logits = -torch.arange(vocab).expand(rows, vocab) * 1e-3
    slot_R = torch.arange(1 if sampled else rows)
    rows_of = SampledRows(slot_R, torch.zeros(rows, dtype=torch.int64), **sampled)  # type: ignore[arg-type]
    return Case(neutral_tables(rows, vocab), logits, rows_of)


@pytest.mark.parametrize("temperature", [0.0, 1e-3])
def test_biases_reach_their_ids_at_the_ends_of_blocks_too(temperature: float) -> None:
    """Each row's most biased id lies where a block begins or ends; the others are spread over the row."""
    ids = [0, 1023, 1024, 2047, 2048, 4095, 4096, 4999]
    case = greedy(len(ids), 5000)
    case.tables.real_SF[:, column.TEMPERATURE] = temperature
    for slot, chosen in enumerate(ids):
        case.tables.whole_SI[slot, column.BIASED] = 4
        others = [token for token in (3, 2500, 4998) if token != chosen]
        listed = sorted([*others, chosen])
        case.tables.bias_id_SB[slot, :4] = torch.tensor(listed)
        case.tables.bias_SB[slot, :4] = torch.tensor([20.0 if token == chosen else 10.0 for token in listed])
    assert case.launched() == (ids, 0)


def test_drafts_count_as_generated_from_the_next_place_on() -> None:
    case = greedy(4, 3000, width=4, decode_rows=1, draft=torch.tensor([[0, 1, 0]]))
    case.tables.real_SF[0, column.PRESENCE] = 0.5
    assert case.launched() == ([0, 1, 2, 2], 0)
    case.tables.real_SF[0, column.PRESENCE] = 0.0
    case.tables.real_SF[0, column.FREQUENCY] = 0.0009  # twice that of 0 is more than once that of 1 and the step to 1
    assert case.launched() == case.expected()
    case.tables.seen_SV[0, 0] = 2
    assert case.launched() == case.expected()


def test_min_tokens_counts_the_window() -> None:
    case = greedy(4, 3000, width=4, decode_rows=1, draft=torch.tensor([[7, 8, 9]]))
    case.tables.stop_SK[0] = torch.tensor([0, 1, 0, 0])
    case.tables.whole_SI[0, column.MIN_TOKENS] = 5
    case.tables.whole_SI[0, column.GENERATED] = 3
    assert case.launched() == ([2, 2, 0, 0], 0)


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 100.0])
def test_extreme_temperatures(temperature: float) -> None:
    case = Case.random(300, 6, 1, 0, seed=6, kind=FILTERED, spread=30.0)
    case.tables.real_SF[:, column.TEMPERATURE] = temperature
    agree(case)


def test_features_left_out_touch_no_table() -> None:
    """There need be no counts without penalties, and no noise kernels without noise."""
    case = Case.random(130, 3, 2, 1, seed=4, kind=GREEDY)
    case.tables = type(case.tables)(**{**vars(case.tables), "seen_SV": case.tables.seen_SV[:, :0]})
    case.features = Feature(0)
    agree(case)


@settings(max_examples=15, deadline=None)
@given(
    data=st.data(),
    width=st.integers(1, 8),
    rows=st.integers(0, 9),
    vocab=st.sampled_from([None, 3]),
    told=st.booleans(),
)
def test_accepted_drafts(data: st.DataObject, width: int, rows: int, vocab: int | None, told: bool) -> None:
    ids = st.sampled_from([-1, 0, 1, 2, 3, 2**40])
    target = data.draw(st.lists(st.lists(ids, min_size=width, max_size=width), min_size=rows, max_size=rows))
    fed = torch.randint(0, 3, (rows, width))
    mask = torch.rand(rows, width - 1) < 0.7
    target_DW = torch.tensor(target, dtype=torch.int64).view(rows, width)
    fed[:, 1:] = torch.where(mask, target_DW[:, :-1], fed[:, 1:])
    results = []
    for accept in (launch_accept_drafts, accept_drafts_reference):
        accepted, fault, faults = torch.full((rows + 1,), -5), torch.tensor([4]), torch.tensor([-3])
        accept(target_DW, fed[:, 1:], accepted[:rows], vocab, fault, faults if told else None)
        results.append((accepted.tolist(), int(fault)))
        if rows:
            assert int(faults) == (int(fault) if told and vocab else -3)
    assert results[0] == results[1]
    assert results[0][0][-1] == -5


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), width=st.integers(1, 8), more=st.integers(0, 1), penalties=st.booleans())
def test_counted_tokens(seed: int, width: int, more: int, penalties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots, vocab, rows = 40, 7, 30
    slot_R = torch.randperm(slots, generator=generator)[:rows]
    slot_R[::7] = -1
    slot_R[3] = slots
    token_RW = torch.randint(-1, vocab + 1, (rows, width), generator=generator)
    count_R = torch.randint(0, width + 1 - more, (rows,), generator=generator)
    results = []
    for count in (launch.count_tokens, _reference_count):
        tables, fault = neutral_tables(slots, vocab), torch.zeros(1, dtype=torch.int64)
        count(tables, slot_R, token_RW, count_R, vocab, fault, penalties, more)
        results.append((tables.whole_SI, tables.seen_SV, fault))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def _reference_count(tables, slot_R, token_RW, count_R, vocab, fault, penalties, more):
    reference.count_tokens(tables, slot_R, token_RW, count_R + more, vocab, fault, penalties)
