"""Texts that a grammar binds and a stop ends: a string that the front finds in the text, or an id of the request's own.
Each is what the plain engine writes, one token a step and alone, up to the first stop, whatever stands in one step."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from grammar_model import EOS, TEXTS, text_of, write_grammar_model
from msgspec.structs import replace
from test_constrained_steps import KINDS, SAMPLERS, SCHEMA

from deploy.text.stop import StopMatcher
from tests.tiny_models import VOCAB
from tests.workers.crowd import Job, of_all_widths
from tests.workers.good_drafts import good_drafts
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.grammar import Grammar
from workers.protocol.messages import RequestOutput
from workers.protocol.plan import SamplingParams

WIDTHS = [1, 2, 3, 4]
SOME = [width if width == 3 else pytest.param(width, marks=pytest.mark.long) for width in WIDTHS]
MOST = 40
FORCED = ('"tags": ["', '": ', "}", '"n')
"""Stop strings that the schema leads every text to, whatever the model wants."""


@dataclass
class Said:
    """Answer that a client gets: text, piece by piece, and why it ended."""

    stops: tuple[str, ...] = ()
    pieces: list[str] | None = None
    finish: str = ""

    def __post_init__(self) -> None:
        self.pieces = []
        self.matcher = StopMatcher(self.stops) if self.stops else None

    def take(self, output: RequestOutput) -> None:
        """Take an output as a front does."""
        assert self.pieces is not None
        for token in output.tokens:
            piece = text_of([token])
            self.pieces.append(self.matcher.feed(piece) if self.matcher is not None and piece else piece)
            if self.matcher is not None and self.matcher.matched is not None:
                self.finish = f"stop at {self.matcher.matched}"
                return
        if output.finish or output.failed:
            self.pieces.append(self.matcher.flush() if self.matcher is not None else "")
            self.finish = output.finish or "failed"

    @property
    def text(self) -> str:
        return "".join(self.pieces or ())


class StoppingEngine(InlineEngine):
    """Ends requests whose texts have a stop string, as the front does: it cancels them when it finds one."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.stops: dict[str, tuple[str, ...]] = {}
        self.said: dict[str, Said] = {}
        self.spanning = 0
        """Stop strings that began before, and ended in, an accepted draft."""

    def deliver(self, outputs: tuple[RequestOutput, ...]) -> None:
        super().deliver(outputs)
        for output in outputs:
            said = self.said.setdefault(output.request_id, Said(self.stops.get(output.request_id, ())))
            if said.finish:
                continue
            said.take(output)
            if said.matcher is not None and said.matcher.matched is not None:
                self._count(said, output)
                super().deliver(tuple(self.scheduler.cancel(output.request_id)))

    def _count(self, said: Said, output: RequestOutput) -> None:
        assert said.matcher is not None
        stop, tokens = said.matcher.matched, self.finished[output.request_id].tokens
        known = len(tokens) - len(output.tokens)
        last = next(n for n in range(1, len(tokens) + 1) if stop in text_of(tokens[:n])) - 1
        if last >= known and output.drafts[last - known] and stop not in text_of(tokens[last : last + 1]):
            self.spanning += 1

    def answers(self, asked: list[Job], stops: list[tuple[str, ...]]) -> list[tuple[str, str]]:
        """Text and end of each request."""
        names = [f"r{len(self.finished)}-{index}" for index in range(len(asked))]
        for name, (prompt, params), ending in zip(names, asked, stops, strict=True):
            self.stops[name] = ending
            self.add(name, prompt, params)
        self.run()
        return [(self.said[name].text, self.said[name].finish) for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_grammar_model(tmp_path_factory.mktemp("v3"))


def engine(folder: Path, **settings: Any) -> StoppingEngine:
    defaults = {"max_rows": 8, "token_budget": 150, "cache_pages": 160, "max_context": 300, "selftest": False}
    return StoppingEngine(EngineConfig(model=str(folder), device="cpu", invariant=True, **{**defaults, **settings}))


def jobs() -> list[Job]:
    """Every grammar, greedy and sampled; the schema most often."""
    rng = random.Random(7)
    kinds = [KINDS[0][0], KINDS[2][0], KINDS[0][0], KINDS[3][0], KINDS[0][0], KINDS[1][0]]
    return [
        (
            [rng.randrange(VOCAB) for _ in range(rng.choice((1, 17, 60)))],
            SamplingParams(MOST, seed=index, stop_ids=(EOS,), grammar=grammar, **SAMPLERS[index % len(SAMPLERS)]),
        )
        for index, grammar in enumerate(kinds)
    ]


@cache
def plain(folder: Path) -> list[list[int]]:
    """Tokens of each of the jobs, alone, one a step and without stops."""
    run = engine(folder, width=1)
    return [run.generate([prompt], [params])[0] for prompt, params in jobs()]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str] | None:
    """Text and end where one of the stops ends first; of those that end together the longest. None: there is none."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(found, key=len)
            return text[: end - len(stop)], f"stop at {stop}"
    return None


def wanted(tokens: list[int], stops: tuple[str, ...]) -> tuple[str, str]:
    return cut(text_of(tokens), stops) or (text_of(tokens), "stop" if tokens[-1] == EOS else "length")


def drawn_stops(folder: Path, seed: int) -> list[tuple[str, ...]]:
    """Draw stop strings: some that stand in the text of each job, of up to four tokens and mostly from within one token
    to within another; some that do not; for the schema also those that it forces."""
    rng, drawn = random.Random(seed), []
    for number, tokens in enumerate(plain(folder)):
        text = text_of(tokens)
        begin = rng.randrange(len(text))
        inside = text[begin : begin + rng.randint(1, 6)]
        forced = rng.choice(FORCED) if number % 2 == 0 else "?!"
        drawn.append(
            ((inside,), (forced, text + "?"), ("?", "!!"), (inside, inside[1:] + "?", forced))[rng.randrange(4)]
        )
    return drawn


@pytest.mark.parametrize(
    ("width", "seeds"), [(3, 1), *(pytest.param(width, 6, marks=pytest.mark.long) for width in WIDTHS)]
)
def test_stop_strings_cut_the_same_text_at_every_width(
    monkeypatch: pytest.MonkeyPatch, folder: Path, width: int, seeds: int
) -> None:
    run = engine(folder, width=width, max_rows=3)
    for seed in range(seeds):
        stops = drawn_stops(folder, seed)
        want = [wanted(tokens, ending) for tokens, ending in zip(plain(folder), stops, strict=True)]
        names = [f"r{len(run.finished)}-{index}" for index in range(len(stops))]
        with monkeypatch.context() as patch:
            if width > 1:
                good_drafts(patch, run, dict(zip(names, plain(folder), strict=True)), share=0.9)
            assert run.answers(jobs(), stops) == want
    ends = [said.finish for said in run.said.values()]
    assert "stop" in ends
    assert sum(end.startswith("stop at ") for end in ends) > 2 * seeds
    assert any(end == f"stop at {stop}" for end in ends for stop in FORCED)
    assert (run.spanning > seeds // 2) == (width > 1), "no stop string lies across accepted drafts"
    assert run.scheduler.idle


@pytest.mark.parametrize("width", WIDTHS)
def test_a_stop_string_that_the_grammar_forces(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int) -> None:
    """Only the tags come behind the name: the model has no say in it."""
    schema = {**SCHEMA, "properties": {name: SCHEMA["properties"][name] for name in ("name", "tags")}}  # type: ignore[index]
    grammar = Grammar("json_schema", json.dumps(schema))
    job = [5, 9, 30], SamplingParams(60, temperature=1.0, seed=2, stop_ids=(EOS,), grammar=grammar)
    [tokens] = engine(folder, width=1).generate([job[0]], [job[1]])
    text = text_of(tokens)
    assert '"tags":' in text
    for stop in ('"tags"', 'ags": [', '": ', "{"):
        run = engine(folder, width=width)
        good_drafts(monkeypatch, run, {"r0-0": tokens}, share=1.0)
        [(said, finish)] = run.answers([job], [(stop,)])
        assert (said, finish) == (text[: text.index(stop)], f"stop at {stop}")
        with pytest.raises(json.JSONDecodeError):
            json.loads(said)


@pytest.mark.parametrize("width", SOME)
def test_preempted_requests_stop_where_they_would_have(
    monkeypatch: pytest.MonkeyPatch, folder: Path, width: int
) -> None:
    """Pages for one more row than run. Others stop in the middle, which gives their pages back."""
    rng = random.Random(1)
    grammar = KINDS[0][0]
    asked = [
        (
            [rng.randrange(VOCAB) for _ in range(52)],
            SamplingParams(60, temperature=1.0, seed=seed, stop_ids=(EOS,), grammar=grammar),
        )
        for seed in range(4)
    ]
    alone = engine(folder, width=1)
    tokens = [alone.generate([prompt], [params])[0] for prompt, params in asked]
    small = {"max_rows": 4, "cache_pages": 6, "max_context": 150, "token_budget": 250, "prefix_cache": False}
    run = engine(folder, width=width, **small)
    stops = [(text_of(said)[-3 - index :],) for index, said in enumerate(tokens)]
    if width > 1:
        good_drafts(monkeypatch, run, {f"r0-{index}": said for index, said in enumerate(tokens)})
    answers = run.answers(asked, stops)
    assert answers == [wanted(said, ending) for said, ending in zip(tokens, stops, strict=True)]
    assert all(finish.startswith("stop at ") for _, finish in answers)
    assert run.scheduler.stats().preemptions > 0


def test_whatever_widths_follow_each_other(folder: Path) -> None:
    run = of_all_widths(engine(folder, width=4, max_rows=3), 2)
    stops = drawn_stops(folder, 1)
    want = [wanted(tokens, ending) for tokens, ending in zip(plain(folder), stops, strict=True)]
    assert run.answers(jobs(), stops) == want  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", SOME)
def test_stop_ids_of_the_request_end_a_bound_text(monkeypatch: pytest.MonkeyPatch, folder: Path, width: int) -> None:
    """The text is cut in the middle, behind `min_tokens`, and the id is its last token."""
    run = engine(folder, width=width)
    comma = TEXTS.index('", "'), TEXTS.index(","), TEXTS.index(", "), TEXTS.index('": ')
    asked, want = [], []
    for (prompt, params), tokens in zip(jobs(), plain(folder), strict=True):
        if params.min_tokens:
            continue
        stop_ids = (EOS, *comma, tokens[len(tokens) // 2])
        asked.append((prompt, replace(params, stop_ids=stop_ids)))
        end = next((n for n, token in enumerate(tokens, 1) if token in stop_ids), len(tokens))
        want.append(tokens[:end])
    if width > 1:
        good_drafts(monkeypatch, run, {f"r0-{index}": tokens for index, tokens in enumerate(plain(folder))}, share=0.9)
    got = run.generate([prompt for prompt, _ in asked], [params for _, params in asked])
    assert got == want
    assert any(tokens[-1] != EOS for tokens in got)


DEAD_END = Grammar("ebnf", 'root ::= "a" "b" "x" "~"')
"""`~` is no token of this model: behind `abx` there is nothing to write."""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(
    ("fields", "stops", "want"),
    [
        ({}, (), ("abx", "failed")),
        ({}, ("b",), ("a", "stop at b")),
        ({}, ("bx",), ("a", "stop at bx")),
        ({}, ("x", "?"), ("ab", "stop at x")),
        ({}, ("x~",), ("abx", "failed")),
        ({"max_tokens": 3}, (), ("abx", "length")),
        ({"max_tokens": 4}, (), ("abx", "failed")),
        ({"stop_ids": (EOS, TEXTS.index("b"))}, (), ("ab", "stop")),
        ({"stop_ids": (EOS, TEXTS.index("x"))}, (), ("abx", "stop")),
        ({"logprobs": 2}, (), ("abx", "failed")),
        ({"logprobs": 2, "stop_ids": (EOS, TEXTS.index("x"))}, (), ("abx", "stop")),
    ],
)
def test_what_comes_before_a_dead_end_counts(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    width: int,
    fields: dict[str, Any],
    stops: tuple[str, ...],
    want: tuple[str, str],
) -> None:
    """A row that comes to a dead end behind a draft keeps the tokens before it, as it would if each had a step of its
    own: they may be the end."""
    says = [TEXTS.index(char) for char in "abx"] + [TEXTS.index("a")] * 5
    ab = TEXTS.index("ab")
    params = SamplingParams(9, 0.0, logit_bias=((ab, -100.0),), grammar=DEAD_END)
    params = replace(params, **{"stop_ids": (EOS,), **fields})
    run = engine(folder, width=width)
    good_drafts(monkeypatch, run, {"r0-0": says, "r0-1": says}, share=1.0)
    beside = [8, 3], SamplingParams(12, 0.0)
    (said, free) = run.answers([([4], params), beside], [stops, ()])
    assert said == want
    assert free[1] == "length"
    record = run.finished["r0-0"]
    entries = [entry for output in record.outputs for entry in output.logprobs]
    assert len(entries) == (len(record.tokens) if "logprobs" in fields else 0)
    assert run.scheduler.idle
