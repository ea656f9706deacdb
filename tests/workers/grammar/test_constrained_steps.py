"""Requests with grammars in every kind of step: what they write parses and validates, and is the same at every width,
alone and among others, and after a preemption."""

from __future__ import annotations

import json
import random
import re
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from grammar_model import EOS, TEXTS, THINK_END, text_of, write_grammar_model
from msgspec.structs import replace

from kernels.sampling import TokenMasks
from tests.tiny_models import VOCAB
from tests.workers.crowd import Job, crowd, of_all_widths
from tests.workers.good_drafts import good_drafts
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.grammar.rows import ConstrainedRows
from workers.protocol.grammar import Grammar
from workers.protocol.plan import SamplingParams
from workers.rank.runner import Launched
from workers.step.masks import StepMasks

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4},
        "size": {"type": "integer", "minimum": -5, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["ab", "abc", "x"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["name", "tags"],
    "additionalProperties": False,
}
CHOICES = ["abc", "ab", "10", "a true tale"]
REGEX = r"[a-c]{2,9}(12|10)\.[0-9]{3}"


def valid_json(text: str) -> None:
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))


def valid_choice(text: str) -> None:
    assert text in CHOICES


def valid_regex(text: str) -> None:
    assert re.fullmatch(REGEX, text)


def valid_sum(text: str) -> None:
    assert re.fullmatch(r"\d(\+\d){0,6}_", text)


KINDS: tuple[tuple[Grammar, Callable[[str], None]], ...] = (
    (Grammar("json_schema", json.dumps(SCHEMA)), valid_json),
    (Grammar("choice", json.dumps(CHOICES)), valid_choice),
    (Grammar("regex", REGEX), valid_regex),
    (Grammar("ebnf", 'root ::= d ("+" d){0,6} "_"\nd ::= [0-9]'), valid_sum),
)
SAMPLERS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_p": 0.9, "top_k": 30},
    {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": ((EOS, 5.0), (40, 2.0)), "logprobs": 2},
    {"temperature": 1.5, "min_p": 0.02, "min_tokens": 12},
)


def constrained(index: int, rng: random.Random, most: int = 28) -> Job:
    grammar = KINDS[index % len(KINDS)][0]
    sampler = SAMPLERS[index % len(SAMPLERS)]
    prompt = [rng.randrange(VOCAB) for _ in range(rng.choice((1, 2, 17, 40, 70)))]
    return prompt, SamplingParams(most, seed=index, stop_ids=(EOS,), grammar=grammar, **sampler)


def jobs(count: int, seed: int = 0, most: int = 28) -> list[Job]:
    """Every second one has a grammar."""
    rng = random.Random(seed)
    free = crowd(count, VOCAB, seed)
    return [constrained(index // 2, rng, most) if index % 2 else free[index] for index in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grammar_model(tmp_path_factory.mktemp("v3"))


def engine(folder: Path, **settings: Any) -> InlineEngine:
    defaults = {"max_rows": 12, "token_budget": 150, "cache_pages": 160, "max_context": 500, "selftest": False}
    return InlineEngine(EngineConfig(model=str(folder), device="cpu", invariant=True, **{**defaults, **settings}))


def served(run: InlineEngine, asked: list[Job]) -> list[list[int]]:
    before = len(run.finished)
    tokens = run.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    records = list(run.finished.values())[before:]
    checks = dict(KINDS)
    for (_, params), got, record in zip(asked, tokens, records, strict=True):
        assert record.finish in ("stop", "length")
        if params.grammar is not None and record.finish == "stop":
            assert got[-1] == EOS
            checks[params.grammar](text_of(got))
        elif params.grammar is not None:
            assert len(got) == params.max_tokens
    return tokens


def one_after_the_other(folder: Path, asked: list[Job]) -> list[list[int]]:
    """Serve each request alone, at width 1."""
    run = engine(folder, width=1)
    return [served(run, [job])[0] for job in asked]


@cache
def expected(folder: Path) -> list[list[int]]:
    return one_after_the_other(folder, jobs(8))


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.long), 3])
def test_a_mixed_crowd_is_valid_and_the_same_alone_and_together(folder: Path, width: int) -> None:
    run = engine(folder, width=width, max_rows=6)
    assert served(run, jobs(8)) == expected(folder)
    finishes = [record.finish for name, record in run.finished.items() if int(name.split("-")[1]) % 2]
    assert "stop" in finishes
    constrained_plans = [plan for plan in run.plans if plan.constrained]
    assert any(plan.prefill and plan.decode_slots for plan in constrained_plans)
    assert any(not plan.prefill for plan in constrained_plans)
    assert any(set(plan.constrained) < set(plan.decode_slots) for plan in constrained_plans)


def with_good_drafts(patch: pytest.MonkeyPatch, folder: Path, width: int) -> tuple[InlineEngine, list[list[int]]]:
    run = engine(folder, width=width, max_rows=6)
    good_drafts(patch, run, {f"r0-{index}": tokens for index, tokens in enumerate(expected(folder))})
    return run, served(run, jobs(8))


@pytest.mark.parametrize("width", [4, 8])
def test_windows_that_are_accepted_to_every_length(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int) -> None:
    run, tokens = with_good_drafts(monkeypatch, folder, width)
    assert tokens == expected(folder)
    stats = run.scheduler.stats()
    assert stats.drafts_accepted > 0.3 * stats.drafts_offered


def by_request(patch: pytest.MonkeyPatch) -> None:
    """The mask of a row's first position serves all of them."""
    honest = ConstrainedRows.fill

    def fill(rows: Any, layout: Any, slots: Any, constrained: Any, masks: StepMasks) -> Any:
        dead_ends = honest(rows, layout, slots, constrained, masks)
        for row in range(layout.decode_rows):
            begin, *others = layout.logits_rows_of(row)
            masks._index_N[others] = masks._index_N[begin]
        return dead_ends

    patch.setattr(ConstrainedRows, "fill", fill)


def of_the_drafts_before_last(patch: pytest.MonkeyPatch) -> None:
    """Masks follow from the drafts that the step before has verified."""
    honest, kept = ConstrainedRows.drafted, {}

    def drafted(rows: Any, slot: int, drafts: Any) -> None:
        honest(rows, slot, kept.get((id(rows), slot), drafts))
        kept[id(rows), slot] = drafts

    patch.setattr(ConstrainedRows, "drafted", drafted)


def frozen(patch: pytest.MonkeyPatch) -> None:
    """Every step samples under the masks of the first."""
    honest, first = StepMasks.upload, []

    def upload(masks: StepMasks) -> Any:
        uploaded = honest(masks)
        first.append(TokenMasks(uploaded.index_N.clone(), uploaded.bits_MB.clone()))
        return first[0]

    patch.setattr(StepMasks, "upload", upload)


@pytest.mark.parametrize("fault", [by_request, of_the_drafts_before_last, pytest.param(frozen, marks=pytest.mark.long)])
def test_planted_faults_show(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    want = expected(folder)
    fault(monkeypatch)
    try:
        _, tokens = with_good_drafts(monkeypatch, folder, 4)
    except (AssertionError, ValueError, jsonschema.ValidationError):
        return  # a request failed, or its text is not valid
    assert tokens != want


@pytest.mark.parametrize(
    "width", [pytest.param(w, marks=pytest.mark.long if w in (1, 8) else pytest.mark.soak) for w in (1, 2, 3, 4, 8)]
)
def test_a_larger_crowd_is_the_same_at_every_width(folder: Path, width: int) -> None:
    asked = jobs(16, seed=5, most=250)
    assert served(engine(folder, width=width), asked) == one_after_the_other(folder, asked)


@pytest.mark.long
def test_a_preempted_request_goes_on_where_its_grammar_stood(folder: Path) -> None:
    """Pages for one more row than run: rows lose theirs in the middle of their texts."""
    rng = random.Random(1)
    asked = [([rng.randrange(VOCAB) for _ in range(52)], constrained(0, rng, 30)[1]) for _ in range(4)]
    asked = [(prompt, replace(params, temperature=1.0, seed=index)) for index, (prompt, params) in enumerate(asked)]
    run = engine(folder, width=3, max_rows=4, cache_pages=6, max_context=150, prefix_cache=False)
    assert served(run, asked) == one_after_the_other(folder, asked)
    assert run.scheduler.stats().preemptions > 0


@pytest.mark.long
def test_whatever_widths_follow_each_other(folder: Path) -> None:
    """Wider and narrower steps, on slots that were drafted for by others."""
    run = of_all_widths(engine(folder, width=4, max_rows=6), 2)
    assert served(run, jobs(8)) == expected(folder)
    assert {plan.width for plan in run.plans if plan.constrained} == {1, 2, 3, 4}


def test_steps_are_launched_ahead_of_results(folder: Path) -> None:
    """A step is launched before the result of the one before is collected, as on a GPU."""
    run = engine(folder, width=3, max_rows=6)
    asked = jobs(8)
    names = [f"r-{index}" for index in range(len(asked))]
    for name, (prompt, params) in zip(names, asked, strict=True):
        run.add(name, prompt, params)
    run.compile_grammars()
    launched: deque[Launched] = deque()
    while not run.scheduler.idle:
        while (plan := run.scheduler.plan()) is not None:
            launched.append(run.runner.launch(plan))
        run.deliver(run.scheduler.apply(run.runner.collect(launched.popleft())))
    assert [run.finished[name].tokens for name in names] == expected(folder)


@pytest.mark.parametrize("width", [1, 3])
def test_a_grammar_may_begin_behind_a_tag(folder: Path, width: int) -> None:
    """Text before the tag is free, but cannot end; the tag may come anywhere within a step's tokens."""
    think = TEXTS.index(THINK_END)
    grammar = Grammar("choice", json.dumps(CHOICES), begin_after=(think,))
    run = engine(folder, width=width, max_rows=6)
    bias = ((think, 6.0), (EOS, 9.0))
    params = [
        SamplingParams(120, temperature=1.2, seed=seed, stop_ids=(EOS,), grammar=grammar, logit_bias=bias)
        for seed in range(6)
    ]
    tokens = run.generate([[5, 9, 30]] * 6, params)
    for got in tokens:
        assert got[-1] == EOS
        assert EOS not in got[:-1]
        begin = got.index(think) + 1
        valid_choice(text_of(got[begin:]))
    assert any(got.index(think) > 0 for got in tokens)
    if width > 1:
        assert tokens == engine(folder, width=1).generate([[5, 9, 30]] * 6, params)


def test_a_complete_grammar_ends_before_min_tokens(folder: Path) -> None:
    """The grammar ends whatever the request wants of stop ids; before it is complete, min_tokens holds."""
    run = engine(folder, width=3)
    params = SamplingParams(40, temperature=1.0, seed=3, stop_ids=(EOS, 10), min_tokens=30)
    digits = Grammar("regex", "[0-9]{2,}")
    choice = Grammar("choice", '["ab"]')
    short = replace(params, grammar=choice)
    long = replace(params, grammar=digits, logit_bias=((EOS, 20.0),))
    first, second = run.generate([[7], [8]], [short, long])
    assert text_of(first) == "ab"
    assert first[-1] == EOS
    assert len(second) == 31
    assert second[-1] == EOS


def test_a_row_whose_grammar_allows_nothing_ends_alone(folder: Path) -> None:
    """`~` is no token of this model: behind an `x` there is nothing to write."""
    run = engine(folder, width=3)
    dead_ends = Grammar("ebnf", 'root ::= "a" "b" | "x" "~"')
    params = [
        SamplingParams(9, 0.0, stop_ids=(EOS,), grammar=dead_ends, logit_bias=((TEXTS.index("x"), 100.0),)),
        SamplingParams(9, 0.0, stop_ids=(EOS,), grammar=dead_ends, logit_bias=((TEXTS.index("a"), 100.0),)),
        SamplingParams(9, 0.0),
    ]
    first, second, third = run.generate([[4], [4], [4]], params)
    names = list(run.finished)
    assert text_of(first) in ("", "x")
    assert "allows no token" in run.finished[names[0]].outputs[-1].failed
    assert text_of(second) == "ab"
    assert len(third) == 9


def test_a_grammar_that_cannot_be_used_refuses_its_requests_alone(folder: Path) -> None:
    run = engine(folder, width=1)
    bad = SamplingParams(5, stop_ids=(EOS,), grammar=Grammar("regex", "(a"))
    run.generate([[4], [4]], [bad, SamplingParams(5, 0.0)])
    first, second = run.finished.values()
    assert "parenthesis" in first.outputs[-1].refused
    assert len(second.tokens) == 5


def test_a_grammar_is_forgotten_when_nobody_needs_it(folder: Path) -> None:
    run = engine(folder, width=1)
    asked = [job for job in jobs(8) if job[1].grammar is not None]
    served(run, asked)
    run.compile_grammars()
    assert run.replica.grammars is not None
    for grammar_id in range(1, 9):
        with pytest.raises(KeyError):
            run.replica.grammars.ready(grammar_id)
