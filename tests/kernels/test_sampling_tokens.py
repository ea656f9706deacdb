"""Sampled tokens: filters and penalties against transformers' own, greedy ties, faults, independence of the batch."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels.sampling import ALL_FEATURES, FLOORS, Feature, SlotTables, gumbel_noise, launch, reference, sample_tokens
from kernels.sampling import tables as column

CPU = torch.device("cpu")
FILTERS = Feature.NOISE | Feature.TOP_K | Feature.TOP_P | Feature.FLOOR


def make_tables(slots, vocab, real=(), whole=()):
    """Tables of `slots` slots and the one of nobody; `real` and `whole` map a column to its values of all slots."""
    tables = SlotTables.allocate(slots + 1, 4, 4, CPU)
    tables = SlotTables(**{**vars(tables), "seen_SV": torch.zeros(slots + 1, vocab, dtype=torch.int32)})
    for key, value in dict(real).items():
        tables.real_SF[:slots, key] = torch.as_tensor(value, dtype=torch.float32)
    for key, value in dict(whole).items():
        tables.whole_SI[:slots, key] = torch.as_tensor(value)
    return tables


def sample(logits, tables, features=ALL_FEATURES, slots=None, positions=None, draft=None, window=None):
    rows = len(logits)
    slots = torch.arange(rows) if slots is None else torch.as_tensor(slots)
    positions = torch.arange(rows) + 40 if positions is None else positions
    tokens, fault = torch.full((rows,), -7), torch.zeros(1, dtype=torch.int64)
    sample_tokens(logits, slots, positions, tables, tokens, fault, features, draft, window)
    return tokens, int(fault)


def distinct_logits(rows, vocab, seed, spread=3.0):
    """Normal logits, one from each quantile, so that none are closer than float32 can tell after scaling."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(rows, vocab, generator=generator).argsort(1)
    share = (order + 0.1 + 0.8 * torch.rand(rows, vocab, generator=generator)) / vocab
    logits = torch.special.ndtri(share) * spread
    assert all(len(row.unique()) == vocab for row in logits)
    return logits


def transformers_keeps(logits, temperature, top_k, top_p, min_p):
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if min_p > 0:
        warpers.append(MinPLogitsWarper(min_p))
    if top_k > 0:
        warpers.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        warpers.append(TopPLogitsWarper(top_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.double()).isfinite()


def our_keeps(logits, temperature, top_k, top_p, min_p, features=FILTERS):
    rows, vocab = logits.shape
    real = {column.TEMPERATURE: temperature, column.TOP_P: top_p, column.MIN_P: min_p}
    tables = make_tables(rows, vocab, real, {column.TOP_K: top_k})
    scaled = (logits - logits.amax(1, keepdim=True)) / temperature
    return reference.kept(scaled, *reference.filter_floor(scaled, torch.arange(rows), tables, features))


def assert_same_nucleus(logits, ours, theirs, temperature, top_k, top_p, min_p):
    """Equal, except where the mass that decides is within float32 rounding of the bound."""
    for row in (ours != theirs).any(1).nonzero().flatten().tolist():
        probability = torch.softmax(logits[row].double() / temperature, 0)
        allowed = probability >= min_p * probability.max() * (1 - 1e-6)
        if top_k:
            allowed &= probability >= probability.topk(min(top_k, len(probability))).values[-1]
        probability = probability * allowed / (probability * allowed).sum()
        differ = (ours[row] != theirs[row]).nonzero().flatten()
        assert len(differ) == 1
        above = float(probability[probability > probability[differ]].sum())
        ratio = float(probability[differ] / probability.max())
        assert above == pytest.approx(top_p, abs=1e-6) or ratio == pytest.approx(min_p, rel=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    vocab=st.sampled_from([1, 2, 5, 33, 257, 700, 1500]),
    temperature=st.floats(0.05, 5.0),
    top_k=st.one_of(st.just(0), st.integers(1, 1600)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-3, 0.99999)),
    min_p=st.one_of(st.just(0.0), st.floats(1e-6, 1.0)),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
)
def test_filters_keep_what_transformers_keeps(seed, vocab, temperature, top_k, top_p, min_p, spread):
    temperature, top_p, min_p = (float(torch.tensor(value)) for value in (temperature, top_p, min_p))
    logits = distinct_logits(3, vocab, seed, spread)
    case = (temperature, min(top_k, vocab), top_p, min_p)
    assert_same_nucleus(logits, our_keeps(logits, *case), transformers_keeps(logits, *case), *case)


def test_the_filters_see_each_other_in_order():
    """One case by hand: the order min_p, top_k, top_p shows in the result."""
    logits = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log().unsqueeze(0)
    assert our_keeps(logits, 1.0, 0, 0.72, 0.0).tolist() == [[True, True, True, False, False]]
    # Of the two that top_k leaves, 0.4 / 0.7 = 0.57 < 0.6: both stay; with 0.55 one suffices.
    assert our_keeps(logits, 1.0, 2, 0.6, 0.0).tolist() == [[True, True, False, False, False]]
    assert our_keeps(logits, 1.0, 2, 0.55, 0.0).tolist() == [[True, False, False, False, False]]
    # min_p 0.3 leaves 0.85 of the mass; 0.7 / 0.85 = 0.82.
    assert our_keeps(logits, 1.0, 0, 0.81, 0.3).tolist() == [[True, True, False, False, False]]
    assert our_keeps(logits, 1.0, 0, 0.81, 0.0).tolist() == [[True, True, True, False, False]]


def test_top_k_and_min_p_keep_ties_or_cut_them_together():
    logits = torch.tensor([[1.0, 3.0, 1.0, 2.0, 1.0]])
    assert our_keeps(logits, 1.0, 3, 1.0, 0.0).all()
    assert our_keeps(logits, 1.0, 2, 1.0, 0.0).tolist() == [[False, True, False, True, False]]
    assert our_keeps(torch.zeros(1, 6), 1.0, 1, 1.0, 0.9).all()


def test_noise_for_kept_ids_alone_changes_nothing(monkeypatch):
    logits = distinct_logits(60, 900, 8)
    top_k = torch.arange(60) * 10 + 1
    tables = make_tables(60, 900, {column.TEMPERATURE: 1.5}, {column.TOP_K: top_k, column.SEED: torch.arange(60)})
    tokens = []
    for sparse in (1, 10**9):
        monkeypatch.setattr(reference, "_SPARSE", sparse)
        tokens.append(sample(logits, tables)[0].tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("flat", [False, True])
def test_looking_at_the_head_first_changes_nothing(flat, monkeypatch):
    """Large vocabularies try the most probable ids before they sort: same floor, bit for bit, settled early or not."""
    rows, vocab = 40, 3000
    logits = distinct_logits(rows, vocab, 5, 0.05 if flat else 3.0)
    generator = torch.Generator().manual_seed(1)
    top_k = torch.randint(0, 600, (rows,), generator=generator) * (torch.arange(rows) % 3 > 0)
    top_p = torch.where(torch.arange(rows) % 2 > 0, torch.rand(rows, generator=generator), 1.0)
    real = {column.TEMPERATURE: 1.0, column.TOP_P: top_p, column.MIN_P: 1e-4}
    tables = make_tables(rows, vocab, real, {column.TOP_K: top_k})
    scaled = logits - logits.amax(1, keepdim=True)
    early = reference.filter_floor(scaled, torch.arange(rows), tables, FILTERS)
    monkeypatch.setattr(reference, "_HEAD", vocab)
    whole = reference.filter_floor(scaled, torch.arange(rows), tables, FILTERS)
    assert all(torch.equal(a, b) for a, b in zip(early, whole, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    repetition=st.floats(0.5, 2.0),
    frequency=st.floats(-2.0, 2.0),
    presence=st.floats(-2.0, 2.0),
    prompt=st.lists(st.integers(0, 19), max_size=12),
    generated=st.lists(st.integers(0, 19), max_size=12),
    drafts=st.lists(st.integers(0, 19), min_size=3, max_size=3),
    window=st.integers(0, 3),
)
def test_penalties(seed, repetition, frequency, presence, prompt, generated, drafts, window):
    """Repetition against transformers, frequency and presence against OpenAI's formula written out."""
    vocab = 20
    logits = distinct_logits(1, vocab, seed)
    real = {column.REPETITION: repetition, column.FREQUENCY: frequency, column.PRESENCE: presence}
    tables = make_tables(1, vocab, real)
    for token in generated:
        tables.seen_SV[0, token] += 2
    for token in prompt:
        tables.seen_SV[0, token] |= 1
    out = generated + drafts[:window]
    repetition, frequency, presence = tables.real_SF[0, [*real]].tolist()
    expected = RepetitionPenaltyLogitsProcessor(repetition)(torch.tensor([prompt + out]).long(), logits.clone())
    for token in set(out):
        expected[0, token] -= out.count(token) * frequency + presence
    ours = reference.adjusted_logits(
        logits, torch.tensor([0]), tables, Feature.PENALTIES, torch.tensor([drafts]), torch.tensor([window])
    )
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-5)


def test_logits_are_adjusted_in_the_documented_order():
    """The order is checked by hand: repetition penalty, the two others, bias, min_tokens; the temperature comes behind
    them."""
    logits = torch.tensor([[2.0, 1.2, -4.0, 0.0]])
    real = {column.REPETITION: 2.0, column.FREQUENCY: 0.5, column.PRESENCE: 0.25}
    tables = make_tables(1, 4, real, {column.MIN_TOKENS: 1, column.BIASED: 2})
    tables.seen_SV[0] = torch.tensor([2 * 2, 1, 1, 0])  # id 0 generated twice, ids 1 and 2 in the prompt alone
    tables.bias_id_SB[0, :2], tables.bias_SB[0, :2] = torch.tensor([0, 3]), torch.tensor([1.0, 50.0])
    tables.stop_SK[0] = 3
    expected = torch.tensor([[2.0 / 2 - 2 * 0.5 - 0.25 + 1.0, 1.2 / 2, -4.0 * 2, -math.inf]])
    ours = reference.adjusted_logits(logits, torch.tensor([0]), tables, ALL_FEATURES, None, None)
    torch.testing.assert_close(ours, expected)
    tables.real_SF[0, column.TEMPERATURE], tables.real_SF[0, column.MIN_P] = 0.5, 0.8
    # Scaled by the temperature first, id 1 has exp(-0.3) = 0.74 of the most probable one; unscaled it had 0.86.
    assert {sample(logits, tables, positions=torch.tensor([p]))[0].item() for p in range(40)} == {0}
    tables.real_SF[0, column.MIN_P] = 0.7
    assert {sample(logits, tables, positions=torch.tensor([p]))[0].item() for p in range(40)} == {0, 1}


def test_logits_are_read_only():
    logits = distinct_logits(2, 30, 0)
    before = logits.clone()
    tables = make_tables(2, 30, {column.TEMPERATURE: 0.7, column.REPETITION: 1.5, column.TOP_P: 0.5})
    tables.seen_SV[:] = 3
    tables.bias_SB[:] = 2.0
    sample(logits, tables)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [7, 130, 4096, 5003])
def test_the_lowest_of_equal_ids_wins(vocab, dtype):
    generator = torch.Generator().manual_seed(vocab)
    for _ in range(20):
        logits = torch.randint(-3, 0, (5, vocab), generator=generator).to(dtype)
        ties = torch.randint(0, vocab, (5, 6), generator=generator)
        logits.scatter_(1, ties, 1.0)
        for features in (Feature(0), ALL_FEATURES):
            tokens, _ = sample(logits, make_tables(5, vocab), features)
            assert tokens.tolist() == ties.amin(1).tolist()


def test_greedy_rows_ignore_filters_and_noise_of_the_step():
    logits = distinct_logits(4, 50, 1)
    tables = make_tables(4, 50, {column.TEMPERATURE: [0.0, 1.0, 0.0, 2.0], column.MIN_P: 0.5}, {column.TOP_K: 3})
    tokens, _ = sample(logits, tables)
    assert tokens[[0, 2]].tolist() == logits.argmax(1)[[0, 2]].tolist()


def test_noise_is_added_to_the_filtered_distribution():
    """Against the definition: argmax of log p + Gumbel over the ids kept."""
    rows, vocab = 200, 64
    logits = distinct_logits(rows, vocab, 2, 1.0)
    real = {column.TEMPERATURE: 0.8, column.TOP_P: 0.9}
    tables = make_tables(rows, vocab, real, {column.SEED: torch.arange(rows) - 100})
    tokens, _ = sample(logits, tables)
    kept = transformers_keeps(logits, 0.8, 0, 0.9, 0.0)
    noise = gumbel_noise(torch.arange(rows) - 100, torch.arange(rows) + 40, vocab)
    score = torch.log_softmax(logits.double() / 0.8, 1).masked_fill(~kept, -math.inf) + noise
    assert tokens.tolist() == score.argmax(1).tolist()
    assert len(tokens.unique()) > 20


REAL_CASES = {
    column.TEMPERATURE: (0.0, 0.7),
    column.TOP_P: (1.0, 0.8),
    column.MIN_P: (0.0, 0.02),
    column.REPETITION: (1.0, 1.3),
    column.FREQUENCY: (0.0, 0.4),
    column.PRESENCE: (0.0, -0.6),
}
WHOLE_CASES = {column.TOP_K: (0, 20), column.MIN_TOKENS: (0, 3)}


def every_combination(vocab):
    """One slot for each combination of parameters being on or off, bias included."""
    names = [*REAL_CASES, *(f"whole {name}" for name in WHOLE_CASES), "bias"]
    cases = list(itertools.product((0, 1), repeat=len(names)))
    tables = make_tables(len(cases), vocab)
    generator = torch.Generator().manual_seed(9)
    for slot, case in enumerate(cases):
        on = dict(zip(names, case, strict=True))
        for name, values in REAL_CASES.items():
            tables.real_SF[slot, name] = values[on[name]]
        for name, values in WHOLE_CASES.items():
            tables.whole_SI[slot, name] = values[on[f"whole {name}"]]
        tables.whole_SI[slot, column.SEED] = slot * 977
        tables.whole_SI[slot, column.GENERATED] = slot % 4
        tables.stop_SK[slot] = torch.randint(0, vocab, (4,), generator=generator)
        if on["bias"]:
            tables.bias_id_SB[slot, :2] = torch.randperm(vocab, generator=generator)[:2]
            tables.bias_SB[slot, :2] = torch.tensor([4.0, -50.0])
    tables.seen_SV[: len(cases)] = torch.randint(0, 4, (len(cases), vocab), generator=generator, dtype=torch.int32)
    return tables, len(cases)


@pytest.mark.parametrize("vocab", [67, 1031])
def test_a_row_alone_equals_the_row_in_any_batch(vocab):
    """Every combination of parameters gives the same, bit for bit, however much work the other rows of the batch
    need."""
    tables, slots = every_combination(vocab)
    logits = distinct_logits(slots, vocab, 3, 2.0)
    draft = torch.randint(0, vocab, (slots, 3), generator=torch.Generator().manual_seed(4))
    window = torch.arange(slots) % 4
    positions = torch.arange(slots) + 40
    together, fault = sample(logits, tables, draft=draft, window=window)
    assert fault == 0
    assert len(together.unique()) > 20
    order = torch.randperm(slots, generator=torch.Generator().manual_seed(5))[:37]
    shuffled, _ = sample(logits[order], tables, ALL_FEATURES, order, positions[order], draft[order], window[order])
    assert shuffled.tolist() == together[order].tolist()
    for slot in range(slots):
        one = slice(slot, slot + 1)
        alone, _ = sample(
            logits[one].clone(), tables, needed(tables, slot), [slot], positions[one], draft[one], window[one]
        )
        assert alone.item() == together[slot].item(), slot


def needed(tables, slot):
    real, whole = tables.real_SF[slot].tolist(), tables.whole_SI[slot].tolist()
    features = Feature(0)
    features |= Feature.NOISE if real[column.TEMPERATURE] else Feature(0)
    features |= Feature.TOP_P if real[column.TOP_P] < 1 else Feature(0)
    features |= Feature.FLOOR if real[column.MIN_P] else Feature(0)
    features |= Feature.TOP_K if whole[column.TOP_K] else Feature(0)
    features |= Feature.MIN_TOKENS if whole[column.MIN_TOKENS] else Feature(0)
    features |= Feature.BIAS if tables.bias_SB[slot].any() else Feature(0)
    neutral = (real[column.REPETITION], real[column.FREQUENCY], real[column.PRESENCE]) == (1.0, 0.0, 0.0)
    return features | (Feature(0) if neutral else Feature.PENALTIES)


@pytest.mark.parametrize("features", [Feature(0), ALL_FEATURES])
@pytest.mark.parametrize("poison", [math.nan, math.inf, "all masked"])
def test_broken_logits_are_counted_and_give_a_valid_id(poison, features):
    logits = distinct_logits(4, 40, 6)
    if poison == "all masked":
        logits[2] = -math.inf
    else:
        logits[2, 17] = poison
    tables = make_tables(4, 40, {column.TEMPERATURE: 0.0 if features == Feature(0) else 1.0})
    tokens, fault = sample(logits, tables, features)
    assert fault == 1
    assert tokens[2] == 0
    clean, fault = sample(torch.where(torch.arange(4).unsqueeze(1) == 2, 0.0, logits), tables, features)
    assert fault == 0
    assert tokens[[0, 1, 3]].tolist() == clean[[0, 1, 3]].tolist()


def test_single_masked_ids_are_no_fault():
    logits = distinct_logits(1, 40, 6)
    logits[0, logits.argmax()] = -math.inf
    tokens, fault = sample(logits, make_tables(1, 40, {column.TEMPERATURE: 1.0}))
    assert fault == 0
    assert logits[0, tokens[0]] > -math.inf


@pytest.mark.parametrize("features", [Feature(0), ALL_FEATURES])
def test_padded_rows_give_zero_whatever_their_logits(features):
    logits = torch.full((3, 40), math.nan)
    logits[1] = distinct_logits(1, 40, 6)
    tables = make_tables(3, 40)
    tokens, fault = sample(logits, tables, features, slots=[-1, 1, 3])
    assert fault == 0
    assert tokens.tolist() == [0, int(logits[1].argmax()), 0]


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 100.0])
def test_extreme_temperatures(temperature):
    logits = distinct_logits(50, 40, 6, 30.0)
    tokens, fault = sample(logits, make_tables(50, 40, {column.TEMPERATURE: temperature}))
    assert fault == 0
    if temperature < 1:
        assert tokens.tolist() == logits.argmax(1).tolist()


def test_filters_of_the_table_of_floors_hold_together(monkeypatch):
    """The highest floor decides, top_k counts what it leaves, and neutral rows keep their tokens."""
    logits = distinct_logits(6, 600, 5)
    value = torch.tensor([0.0, 0.0, 0.05, 0.2, 0.2, 0.9])
    real = {column.TEMPERATURE: 1.0, column.MIN_P: [0.0, 0.1, 0.0, 0.1, 0.5, 0.1], column.TOP_P: [1, 1, 1, 1, 1, 0.9]}
    before = make_tables(6, 600, real, {column.TOP_K: [0, 5, 5, 0, 9, 0]})
    floors = reference.filter_floor(logits - logits.amax(1, keepdim=True), torch.arange(6), before, FILTERS)[0]
    monkeypatch.setitem(FLOORS, "toy", lambda share, scaled: share.log())
    tables = SlotTables.allocate(7, 4, 4, CPU, {"toy": 0.0})
    assert tables.real_SF[:, -1].tolist() == [0.0] * 7
    tables.real_SF[:6, :-1], tables.real_SF[:6, -1] = before.real_SF[:6], value
    tables.whole_SI[:6] = before.whole_SI[:6]
    both = reference.filter_floor(logits - logits.amax(1, keepdim=True), torch.arange(6), tables, FILTERS)[0]
    assert torch.equal(both[:2], floors[:2])
    most = {column.TEMPERATURE: 1.0, column.MIN_P: torch.maximum(value, torch.tensor(real[column.MIN_P]))}
    monkeypatch.delitem(FLOORS, "toy")
    alone = make_tables(6, 600, {**real, **most}, {column.TOP_K: [0, 5, 5, 0, 9, 0]})
    assert torch.equal(
        both, reference.filter_floor(logits - logits.amax(1, keepdim=True), torch.arange(6), alone, FILTERS)[0]
    )


def test_a_filter_that_no_kernel_knows_is_refused_on_a_gpu(monkeypatch):
    monkeypatch.setitem(FLOORS, "toy", lambda share, scaled: share.log())
    tables = SlotTables.allocate(2, 4, 4, CPU, {"toy": 0.0})
    nothing = torch.zeros(0)
    with pytest.raises(
        NotImplementedError, match="no sampling kernel reads toy: name its column in kernels/sampling/tab"
    ):
        launch.sample(nothing, None, tables, nothing, nothing, ALL_FEATURES, None)
