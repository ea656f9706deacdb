"""Speculation changes no answer: the same tokens where a seed fixes them, the same distribution over seeds."""

import itertools
import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_loop import Loop, chi_square_p, drafts_of, exact_rule, likeliest_drafts, random_drafts, transitions
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from workers.protocol.plan import SamplingParams

VOCAB = 12
SLOTS_A_CASE, TOKENS = 400, 52  # 20,800 draws a case
CASES = {
    "plain": SamplingParams(TOKENS, temperature=1.0),
    "top_k": SamplingParams(TOKENS, temperature=0.7, top_k=5),
    "top_p": SamplingParams(TOKENS, temperature=1.3, top_p=0.8),
    "min_p": SamplingParams(TOKENS, temperature=0.9, min_p=0.1),
}
PASS, FAIL = 1e-4, 1e-9


def model(seed, spread=1.2):
    return torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


TARGET, DRAFT = model(1), model(1) * 0.6 + model(2) * 0.8


def filtered_distribution(params):
    """[V, V] by transformers' warpers."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    return torch.softmax(warpers(torch.zeros(VOCAB, 1).long(), TARGET.double()), 1)


def seeded(params, seed):
    return SamplingParams(**{**{f: getattr(params, f) for f in params.__struct_fields__}, "seed": seed})


def p_values(drafts, width, rule=exact_rule, cases=tuple(CASES)):
    params = [seeded(CASES[case], 1000 * i + s) for i, case in enumerate(cases) for s in range(SLOTS_A_CASE)]
    prompts = [(slot % VOCAB,) for slot in range(len(params))]
    loop = Loop(TARGET, params, prompts, drafts, rule)
    tokens = loop.run(TOKENS, width)
    result = {}
    for index, case in enumerate(cases):
        rows = slice(index * SLOTS_A_CASE, (index + 1) * SLOTS_A_CASE)
        observed = transitions(tokens[rows], [prompt[0] for prompt in prompts[rows]], VOCAB)
        assert int(observed.sum()) >= 20_000
        expected = filtered_distribution(CASES[case]) * observed.sum(1, keepdim=True)
        result[case] = chi_square_p(observed, expected)
    return result, loop


QUICK = (
    ("other distribution", 1),
    ("same noise unknown", 2),
    ("likeliest", 3),
    ("other distribution", 4),
    ("near", 3),
    ("near, not told", 2),
    ("perfect", 3),
    ("random", 2),
    ("likeliest", 2),
)
"""Sources of drafts, and widths: every source once or twice."""


def sources_and_widths(sources, widths):
    """All cases. The longer lane has the least and the greatest width of each source; others soak."""

    def mark(source, width):
        if (source, width) in QUICK:
            return ()
        return pytest.mark.long if width in (widths[0], widths[-1]) else pytest.mark.soak

    return [pytest.param(*case, marks=mark(*case)) for case in itertools.product(sources, widths)]


@pytest.mark.parametrize(
    ("source", "width"),
    sources_and_widths(["other distribution", "same noise unknown", "likeliest"], [1, 2, 3, 4]),
)
def test_emitted_tokens_follow_the_filtered_distribution(width, source):
    drafts = {
        "other distribution": drafts_of(DRAFT),
        "same noise unknown": random_drafts(VOCAB),
        "likeliest": likeliest_drafts(TARGET),
    }[source]
    values, loop = p_values(drafts, width)
    assert all(value > PASS for value in values.values()), values
    if width > 1:
        assert 0.03 < loop.accepted / loop.offered < 0.9


def accept_everything(target, draft):
    return torch.full((len(target),), draft.shape[1])


def compare_with_the_next_position(target, draft):
    return (target[:, 1:] == draft).long().cumprod(1).sum(1)


def accept_a_draft_more(target, draft):
    return (exact_rule(target, draft) + 1).clamp(max=draft.shape[1])


def count_all_matches(target, draft):
    return (target[:, :-1] == draft).long().sum(1)


@pytest.mark.parametrize(
    "rule",
    [
        accept_everything,
        pytest.param(compare_with_the_next_position, marks=pytest.mark.long),
        accept_a_draft_more,
        pytest.param(count_all_matches, marks=pytest.mark.long),
    ],
)
def test_a_broken_acceptance_rule_fails_the_same_test(rule):
    values, _ = p_values(drafts_of(DRAFT), 3, rule)
    assert all(value < FAIL for value in values.values()), values


def test_noise_frozen_at_one_position_fails_the_same_test(monkeypatch):
    """The frozen noise is what a graph that captured its random offset would compute."""
    from kernels.sampling import reference
    from kernels.sampling.reference import gumbel_noise

    monkeypatch.setattr(reference, "gumbel_noise", lambda s, p, v: gumbel_noise(s, torch.zeros_like(p), v))
    values, _ = p_values(drafts_of(DRAFT), 2)
    assert all(value < FAIL for value in values.values()), values


@cache
def likeliest_run():
    return p_values(likeliest_drafts(TARGET), 2, cases=("plain", "top_k"))[1]


def test_a_point_mass_draft_is_accepted_with_its_probability():
    """A draft d chosen without the noise is accepted with probability p(d)."""
    loop = likeliest_run()
    assert len(loop.first_drafts) > 20_000
    mean = variance = total = 0.0
    distributions = [filtered_distribution(CASES[case]) for case in ("plain", "top_k")]
    for index, (before, draft, accepted) in enumerate(loop.first_drafts):
        case = (index % (2 * SLOTS_A_CASE)) // SLOTS_A_CASE
        p = float(distributions[case][before, draft])
        mean, variance, total = mean + p, variance + p * (1 - p), total + accepted
    assert abs(total - mean) < 4 * math.sqrt(variance)


def test_shared_noise_accepts_more_than_independent_sampling_would():
    """With drafts from q, independent sampling accepts sum(p q); noise in common comes near sum(min(p, q))."""
    _, loop = p_values(drafts_of(DRAFT), 2, cases=("plain",))
    p, q = torch.softmax(TARGET, 1), torch.softmax(DRAFT, 1)
    befores = torch.tensor([before for before, _, _ in loop.first_drafts])
    independent = float((p * q).sum(1)[befores].mean())
    bound = float(torch.minimum(p, q).sum(1)[befores].mean())
    share = sum(total for _, _, total in loop.first_drafts) / len(loop.first_drafts)
    assert independent + 0.2 < share
    assert 0.85 * bound < share <= bound + 0.01


MIXED = [
    SamplingParams(60, temperature=0.0),
    SamplingParams(60, temperature=0.8, seed=1),
    SamplingParams(60, temperature=0.8, seed=2**64 - 1, top_k=4),
    SamplingParams(60, temperature=1.1, seed=3, top_p=0.7, min_p=0.05),
    SamplingParams(60, temperature=0.0, repetition_penalty=1.4),
    SamplingParams(60, temperature=0.0, frequency_penalty=0.9, presence_penalty=-0.4),
    SamplingParams(60, temperature=0.9, seed=4, frequency_penalty=0.6, repetition_penalty=0.8, top_p=0.9),
    SamplingParams(60, temperature=1.0, seed=5, logit_bias=((3, 2.5), (0, -100.0))),
    SamplingParams(60, temperature=0.0, stop_ids=(1, 2, 3, 4, 5), min_tokens=17),
    SamplingParams(60, temperature=1.0, seed=6, stop_ids=(0, 7, 8, 9), min_tokens=9, presence_penalty=1.5, top_k=9),
    SamplingParams(60, temperature=1e-3, seed=7),
    # New ones come last: `test_the_window_matters` knows these by their places.
]
PROMPTS = [(slot % VOCAB, (5 * slot) % VOCAB, 3) for slot in range(len(MIXED))]


@cache
def without_drafts(index=None):
    params = MIXED if index is None else [MIXED[index]]
    prompts = PROMPTS if index is None else [PROMPTS[index]]
    return Loop(TARGET, params, prompts, random_drafts(VOCAB)).run(60, 1)


@pytest.mark.parametrize(
    ("source", "width"),
    sources_and_widths(["near", "near, not told", "perfect", "random", "likeliest"], [2, 3, 4, 8]),
)
def test_drafts_change_no_token(width, source):
    """Greedy and seeded, with every kind of parameter in one batch: the tokens of width 1, one by one."""
    drafts = {
        "near": drafts_of(DRAFT),
        "near, not told": drafts_of(DRAFT, told=False),
        "perfect": drafts_of(TARGET),
        "random": random_drafts(VOCAB),
        "likeliest": likeliest_drafts(TARGET),
    }[source]
    loop = Loop(TARGET, MIXED, PROMPTS, drafts)
    assert loop.run(60, width) == without_drafts()
    if source == "perfect":
        # A draft layer equal to the target, told what it drafted, is never wrong: noise, penalties, masks all agree.
        assert loop.accepted == loop.offered


@pytest.mark.parametrize("index", range(len(MIXED)))
def test_a_request_alone_gives_the_tokens_it_gives_in_a_batch(index):
    assert without_drafts(index)[0] == without_drafts()[index]


ID = st.integers(0, VOCAB - 1)
ANY_PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(16),
    temperature=st.one_of(st.just(0.0), st.floats(0.01, 3.0)),
    top_k=st.integers(0, VOCAB + 1),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
    seed=st.integers(-(2**63), 2**64 - 1),
    presence_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    frequency_penalty=st.one_of(st.just(0.0), st.floats(-2.0, 2.0)),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    logit_bias=st.dictionaries(ID, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
    stop_ids=st.lists(ID, max_size=3).map(tuple),
    min_tokens=st.integers(0, 12),
)


any_batch = given(
    params=st.lists(ANY_PARAMS, min_size=1, max_size=4),
    prompts=st.lists(st.lists(ID, min_size=1, max_size=5).map(tuple), min_size=4, max_size=4),
    width=st.integers(2, 5),
)


def alone_as_batched(params, prompts, width):
    batched = Loop(TARGET, params, prompts[: len(params)], drafts_of(DRAFT)).run(16, width)
    for index, request in enumerate(params):
        alone = Loop(TARGET, [request], [prompts[index]], random_drafts(VOCAB)).run(16, 1)
        assert alone == [batched[index]]


@settings(max_examples=8, deadline=None)
@any_batch
def test_any_parameters_alone_without_drafts_or_batched_with_drafts(params, prompts, width):
    alone_as_batched(params, prompts, width)


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@any_batch
def test_many_parameters_alone_without_drafts_or_batched_with_drafts(params, prompts, width):
    alone_as_batched(params, prompts, width)


def test_the_window_matters():
    """The penalised requests of the batch are such that ignoring drafts inside the window would show."""
    from kernels.sampling import reference

    plain = reference.adjusted_logits
    try:
        reference.adjusted_logits = lambda x, slot, t, f, _draft, _window: plain(x, slot, t, f, None, None)
        tokens = Loop(TARGET, MIXED, PROMPTS, drafts_of(TARGET)).run(60, 4)
    finally:
        reference.adjusted_logits = plain
    differ = {index for index, (a, b) in enumerate(zip(tokens, without_drafts(), strict=True)) if a != b}
    assert {5, 6, 8, 9} <= differ
    assert not differ & {0, 1, 2, 3, 7, 10}
