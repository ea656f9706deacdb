"""Sampling state of the slots: admission and reuse, the draft window, counts, faults."""

import dataclasses
import math

import pytest
import torch

from kernels.sampling import ALL_FEATURES, reference
from workers.protocol.plan import MAX_LOGIT_BIAS, MAX_STOP_IDS, Admission, BatchLayout, SamplingParams
from workers.step import sampling
from workers.step.sampling import SamplingState

CPU = torch.device("cpu")
VOCAB = 50


def state_with(*params, history=(), generated=0, slots=None):
    state = SamplingState(slots or len(params), VOCAB, CPU)
    state.admit([Admission(slot, p, generated, history) for slot, p in enumerate(params)])
    return state


def decode(state, logits, fed, position=100, slots=None):
    """Target tokens [D, W] of decode rows that feed `fed`."""
    fed = torch.as_tensor(fed)
    rows, width = fed.shape
    slot_R = torch.arange(rows) if slots is None else torch.as_tensor(slots)
    positions = position + torch.arange(width).repeat(rows)
    tokens = state.target_tokens(logits, BatchLayout(width, rows), slot_R, fed, positions)
    return tokens.view(rows, width)


def random_logits(rows, seed=0, scale=2.0):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


EVERYTHING = SamplingParams(
    9,
    temperature=0.9,
    top_k=7,
    top_p=0.6,
    min_p=0.1,
    seed=99,
    presence_penalty=1.0,
    frequency_penalty=1.5,
    repetition_penalty=1.7,
    logit_bias=tuple((token, 30.0 if token % 2 else -30.0) for token in range(40)),
    stop_ids=tuple(range(10, 50)),
    min_tokens=40,
)
GREEDY = SamplingParams(9, temperature=0.0)
PENALISED = SamplingParams(9, temperature=0.0, repetition_penalty=1.3)
TENANTS = [
    GREEDY,
    SamplingParams(9, temperature=1.0, seed=3),
    SamplingParams(9, temperature=1.0, seed=3, top_k=20),
    PENALISED,
    SamplingParams(9, temperature=0.0, frequency_penalty=0.5),
    SamplingParams(9, temperature=0.0, logit_bias=((3, 5.0),)),
    SamplingParams(9, temperature=0.0, stop_ids=(4,), min_tokens=2),
    SamplingParams(9, temperature=0.0, min_tokens=50),
    EVERYTHING,
]


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("reserved", [False, True])
def test_a_reused_slot_shows_nothing_of_its_former_tenant(tenant, reserved):
    """The same tokens and tables as in a state that never had another tenant."""
    used, fresh = state_with(EVERYTHING, EVERYTHING, history=(1, 2, 3, 3)), state_with(slots=2)
    if reserved:
        used.reserve()
        fresh.reserve()
    used.commit(torch.tensor([0, 1]), torch.tensor([[7, 8], [9, 9]]), torch.tensor([2, 1]))
    history = (5, 6, 6, 5) if tenant.has_penalties else ()
    tokens = []
    for state in (used, fresh):
        state.admit([Admission(0, tenant, 0, history)])
        drawn = []
        for step in range(12):
            target = decode(state, random_logits(3, step), [[5, 6, 7]], 100 + step)
            drawn.append(target.tolist())
            state.commit(torch.tensor([0]), target, torch.tensor([2]))
        tokens.append(drawn)
    assert tokens[0] == tokens[1]
    assert torch.equal(used.tables.real_SF[0], fresh.tables.real_SF[0])
    assert torch.equal(used.tables.whole_SI[0], fresh.tables.whole_SI[0])
    if tenant.has_penalties:
        assert torch.equal(used.tables.seen_SV[0], fresh.tables.seen_SV[0])


def test_doing_the_full_work_for_every_row_changes_nothing():
    """The straight-line form that a captured graph holds, against the form that leaves out what no tenant needs."""
    lean = state_with(*TENANTS, history=(1, 2, 3, 3, 9))
    full = state_with(*TENANTS, history=(1, 2, 3, 3, 9))
    full.reserve()
    assert full._groups(torch.tensor([0])) == [(ALL_FEATURES, None)]
    rows = len(TENANTS)
    for step in range(20):
        logits, fed = random_logits(rows * 3, step), random_logits(rows, step)[:, :3].argsort(1) + step
        target = decode(lean, logits, fed, 100 + step)
        assert torch.equal(target, decode(full, logits, fed, 100 + step))
        for state in (lean, full):
            state.commit(torch.arange(rows), target, torch.arange(rows) % 3 + 1)


def test_rows_of_prompts_and_decodes_have_their_own_slots():
    """A mixed step: decode rows of width 2, then final prefill rows, slots in any order."""
    params = [SamplingParams(9, temperature=0.0, logit_bias=((slot * 5, 100.0),)) for slot in range(6)]
    state = state_with(*params)
    layout = BatchLayout(2, 2, (4, 1, 7), (True, False, True))
    slot_R = torch.tensor([4, 1, 5, 2])
    tokens = state.target_tokens(
        random_logits(layout.logits_rows), layout, slot_R, torch.zeros(2, 2).long(), torch.arange(6)
    )
    assert tokens.tolist() == [20, 20, 5, 5, 25, 10]
    assert state.draft_tokens(random_logits(4), slot_R, torch.arange(4)).tolist() == [20, 5, 25, 10]


def test_only_prompts():
    state = state_with(GREEDY, PENALISED, history=(1,))
    logits = random_logits(2)
    layout = BatchLayout(3, 0, (4, 4), (True, True))
    tokens = state.target_tokens(logits, layout, torch.tensor([1, 0]), torch.empty(0, 3).long(), torch.tensor([4, 4]))
    assert tokens[1] == logits[1].argmax()


def test_noise_is_that_of_seed_and_position():
    twin = SamplingParams(9, temperature=1.0, seed=5)
    state = state_with(twin, twin, SamplingParams(9, temperature=1.0, seed=6))
    logits = torch.zeros(3, VOCAB)
    slots = torch.arange(3)
    drawn = torch.stack([state.draft_tokens(logits, slots, torch.full((3,), p)) for p in range(30)])
    assert torch.equal(drawn[:, 0], drawn[:, 1])
    assert int((drawn[:, 0] == drawn[:, 2]).sum()) < 6
    again = decode(state, torch.zeros(90, VOCAB), torch.zeros(3, 30).long(), position=0)
    assert torch.equal(again.T, drawn)


def test_a_token_may_be_placed_by_the_one_before_it():
    state = state_with(SamplingParams(9, temperature=1.0, seed=3))
    logits, layout, fed, position = random_logits(40), BatchLayout(40, 1), torch.zeros(1, 40).long(), torch.arange(40)
    one = state.target_tokens(logits, layout, torch.tensor([0]), fed, position, ahead=1)
    assert torch.equal(one, state.target_tokens(logits, layout, torch.tensor([0]), fed, position + 1))
    assert not torch.equal(one, state.target_tokens(logits, layout, torch.tensor([0]), fed, position))


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, 2**63, 2**64 - 1, -1])
def test_any_64_bit_seed(seed):
    state = state_with(SamplingParams(9, temperature=1.0, seed=seed))
    assert int(state.tables.whole_SI[0, 0]) & (2**64 - 1) == seed & (2**64 - 1)


def test_history_is_split_into_prompt_and_generated():
    """The generated tokens come back as history after a preemption: the state is the one before."""
    params = SamplingParams(9, temperature=0.0, presence_penalty=0.5)
    before = state_with(params, history=(1, 2, 2))
    before.commit(torch.tensor([0]), torch.tensor([[2, 7, 7, 9]]), torch.tensor([3]))
    after = state_with(params, history=(1, 2, 2, 2, 7, 7), generated=3)
    assert torch.equal(before.tables.seen_SV, after.tables.seen_SV)
    assert torch.equal(before.tables.whole_SI, after.tables.whole_SI)
    expected = torch.zeros(VOCAB, dtype=torch.int32)
    expected[1], expected[2], expected[7] = 1, 3, 4
    assert torch.equal(after.tables.seen_SV[0], expected)


def test_min_tokens_counts_the_window():
    """Stop ids become possible exactly at the min_tokens-th token, in the middle of a window too."""
    params = SamplingParams(9, temperature=0.0, stop_ids=(7, 11, 7, 10**6, -1), min_tokens=5)
    state = state_with(params)
    logits = torch.zeros(4, VOCAB)
    logits[:, 7], logits[:, 11], logits[:, 20] = 9.0, 8.0, 1.0
    fed = [[0, 1, 2, 3]]
    assert decode(state, logits, fed).tolist() == [[20, 20, 20, 20]]
    state.commit(torch.tensor([0]), torch.tensor([[1, 2, 3, 4]]), torch.tensor([3]))
    assert decode(state, logits, fed).tolist() == [[20, 20, 7, 7]]
    assert state.draft_tokens(logits[:1], torch.tensor([0]), torch.tensor([4])).tolist() == [20]
    drafted = torch.tensor([[1, 2]])
    assert state.draft_tokens(logits[:1], torch.tensor([0]), torch.tensor([6]), drafted).tolist() == [7]
    state.commit(torch.tensor([0]), torch.tensor([[1, 2, 3, 4]]), torch.tensor([2]))
    assert decode(state, logits, fed).tolist() == [[7, 7, 7, 7]]


def test_min_tokens_after_a_preemption():
    params = SamplingParams(9, temperature=0.0, stop_ids=(7,), min_tokens=3)
    logits = torch.zeros(1, VOCAB)
    logits[:, 7] = 9.0
    assert decode(state_with(params, generated=2), logits, [[0]]).tolist() == [[0]]
    assert decode(state_with(params, generated=3), logits, [[0]]).tolist() == [[7]]


def test_penalties_count_the_window():
    params = SamplingParams(9, temperature=0.0, frequency_penalty=1.0)
    state = state_with(params, history=(8,))
    logits = torch.zeros(4, VOCAB)
    logits[:, 8], logits[:, 9] = 2.5, 1.0  # 8 wins until it was generated twice
    assert decode(state, logits, [[3, 8, 8, 8]]).tolist() == [[8, 8, 9, 9]]
    state.commit(torch.tensor([0]), torch.tensor([[8]]), torch.tensor([1]))
    assert decode(state, logits, [[8, 8, 8, 8]]).tolist() == [[8, 9, 9, 9]]


def test_commit_counts_the_accepted_only_and_padding_writes_nothing():
    params = SamplingParams(9, temperature=0.0, frequency_penalty=1.0)
    state = state_with(params, params, params)
    before = [table.clone() for table in (state.tables.whole_SI, state.tables.seen_SV)]
    state.commit(torch.tensor([-1, 3]), torch.tensor([[5, 6], [7, -1]]), torch.tensor([2, 2]))
    assert int(state.fault_1) == 0
    assert all(map(torch.equal, before, (state.tables.whole_SI, state.tables.seen_SV)))
    state.commit(torch.tensor([2, -1, 0]), torch.tensor([[5, 6], [1, 1], [4, 4]]), torch.tensor([1, 2, 2]))
    assert state.tables.whole_SI[:, -1].tolist() == [2, 0, 1, 0]
    assert state.tables.seen_SV.nonzero().tolist() == [[0, 4], [2, 5]]
    assert state.tables.seen_SV[0, 4] == 4


@pytest.mark.parametrize("nobody", [-1, 1])
def test_padded_rows(nobody):
    state = state_with(EVERYTHING, history=(1,))
    logits = torch.full((4, VOCAB), math.nan)
    logits[2:] = random_logits(2)
    target = decode(state, logits, [[0, 0], [1, 1]], slots=[nobody, 0])
    assert target[0].tolist() == [0, 0]
    assert int(state.fault_1) == 0
    assert torch.equal(target[1:], decode(state, logits[2:], [[1, 1]], slots=[0]))


def test_broken_rows_and_ids_are_counted():
    state = state_with(SamplingParams(9, temperature=0.0))
    decode(state, random_logits(2), [[1, 2]])
    assert int(state.fault_1) == 0
    decode(state, torch.full((2, VOCAB), math.nan), [[1, 2]])
    assert int(state.fault_1) == 2
    state.commit(torch.tensor([0]), torch.tensor([[-1, VOCAB, 3]]), torch.tensor([3]))
    assert int(state.fault_1) == 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_that_are_no_tokens_do_not_reach_memory(temperature):
    """Ids out of range among the fed drafts, where penalties index by them."""
    params = SamplingParams(9, temperature=temperature, frequency_penalty=1.0)
    logits = random_logits(3)
    bad = decode(state_with(params, history=(1,)), logits, [[1, -1, 2**40]])
    none = decode(state_with(params, history=(1,)), logits[:1], [[1]])
    assert bad[0, 0] == none[0, 0]
    assert 0 <= int(bad.min()) <= int(bad.max()) < VOCAB


@pytest.mark.parametrize(
    ("admission", "message"),
    [
        (Admission(2, SamplingParams(9)), "slot 2 of 2"),
        (Admission(-1, SamplingParams(9)), "slot -1 of 2"),
        (Admission(0, SamplingParams(9, logit_bias=((VOCAB, 1.0),))), "logit_bias names token ids outside"),
        (Admission(0, SamplingParams(9, logit_bias=((1, 1.0),) * (MAX_LOGIT_BIAS + 1))), "at most 2048"),
        (Admission(0, SamplingParams(9, presence_penalty=1.0), 0, (1, -1)), "history names token ids outside"),
        (Admission(0, SamplingParams(9, presence_penalty=1.0), 3, (1, 1)), "3 generated tokens in a history of 2"),
    ],
)
def test_bad_admissions_are_refused_and_change_nothing(admission, message):
    state = state_with(EVERYTHING, EVERYTHING, history=(1,))
    before = [tensor.clone() for tensor in vars(state.tables).values()]
    with pytest.raises(ValueError, match=message):
        state.admit([Admission(1, SamplingParams(9)), admission])
    assert all(map(torch.equal, before, vars(state.tables).values()))


def test_too_many_stop_ids():
    state = SamplingState(1, 1000, CPU)
    with pytest.raises(ValueError, match="at most 64"):
        state.admit([Admission(0, SamplingParams(9, stop_ids=tuple(range(MAX_STOP_IDS + 1)), min_tokens=1))])
    state.admit([Admission(0, SamplingParams(9, stop_ids=tuple(range(500))))])  # nothing to mask: no limit


def test_counts_are_allocated_when_needed_or_when_told():
    state = state_with(GREEDY, SamplingParams(9, temperature=1.0, seed=3, top_k=20))
    assert state.tables.seen_SV.numel() == 0
    told = state_with(GREEDY)
    told.allocate(1)
    assert told.tables.seen_SV.shape == (2, VOCAB)
    state.commit(torch.tensor([0]), torch.tensor([[3]]), torch.tensor([1]))
    state.admit([Admission(1, PENALISED, 0, (1,))])
    assert state.tables.seen_SV.shape == (3, VOCAB)


def test_rows_pay_for_what_they_need(monkeypatch):
    """Noise for sampled rows only, filters for filtered rows only, no copy of the logits for greedy ones."""
    rows = {"gumbel_noise": 0, "filter_floor": 0, "adjusted_logits": 0}

    def counted(name):
        original = getattr(reference, name)

        def call(first, *rest):
            rows[name] += len(first)
            return original(first, *rest)

        return call

    for name in rows:
        monkeypatch.setattr(reference, name, counted(name))
    greedy, sampled = SamplingParams(9, temperature=0.0, top_k=3, top_p=0.1), SamplingParams(9, temperature=1.0)
    filtered = SamplingParams(9, temperature=1.0, top_k=VOCAB - 1)
    decode(state_with(greedy, greedy), random_logits(6), torch.zeros(2, 3).long())
    assert rows == {"gumbel_noise": 0, "filter_floor": 0, "adjusted_logits": 0}
    state = state_with(greedy, sampled, filtered, greedy)
    decode(state, random_logits(12), torch.zeros(4, 3).long())
    assert rows == {"gumbel_noise": 6, "filter_floor": 3, "adjusted_logits": 0}
    state.admit([Admission(1, greedy), Admission(2, greedy)])
    decode(state, random_logits(12), torch.zeros(4, 3).long())
    assert rows == {"gumbel_noise": 6, "filter_floor": 3, "adjusted_logits": 0}, "former tenants' needs are forgotten"


def test_a_parameter_that_nothing_reads_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    idle = dataclasses.replace(sampling.TABLE[-1], name="toy")
    monkeypatch.setattr(sampling, "TABLE", (*sampling.TABLE, idle))
    with pytest.raises(ValueError, match="nothing in kernels/sampling reads the parameter toy"):
        SamplingState(2, 9, torch.device("cpu"))
