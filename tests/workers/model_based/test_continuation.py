"""Requests that go on in another engine give what they would have given, against the reference, which knows of no
engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.workers.model_based.continued import Continue, as_it_was, soak_cuts
from tests.workers.model_based.drive import Bench
from tests.workers.model_based.planted import min_tokens_begin_anew
from tests.workers.model_based.schedules import Add
from workers.protocol.messages import Request, RequestOutput
from workers.protocol.request import pack_tokens
from workers.scheduler.results import Results


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("v3"))


def test_requests_that_are_cut_at_a_random_token_go_on_as_if_nothing_had_been(bench: Bench) -> None:
    outcome = soak_cuts(bench, 20, 200_000)
    assert outcome.problem == ""
    assert outcome.seen["cut before a token came"] > 0
    assert outcome.seen["cut and sampled"] > 3


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_of_1000_requests_that_are_cut_none_differs(bench: Bench) -> None:
    outcome = soak_cuts(bench, 1000, 210_000)
    assert outcome.problem == ""
    seen = outcome.seen
    assert seen["near ties"] < seen["tokens"] / 500
    for asked in ("penalties", "a grammar", "log-probabilities", "a scored prompt"):
        assert seen[f"cut with {asked}"] > 30, asked
    assert all(seen[f"drafts of {drafter}"] > 100 for drafter in ("the model", "ngram", "gqa", "mla"))
    assert seen["preemptions"] > 0


def last_token_lost(name: str, request: Request, tokens: list[int], age_s: float) -> Add:
    """The newest token is not noted."""
    return replace(as_it_was(name, request, tokens, age_s), done=pack_tokens(tokens[:-1]))


def another_seed(name: str, request: Request, tokens: list[int], age_s: float) -> Add:
    """A seed is drawn anew."""
    sampling = replace(request.sampling, seed=(request.sampling.seed + 1) % 2**63)
    return replace(as_it_was(name, request, tokens, age_s), sampling=sampling)


def places_one_off(patch: pytest.MonkeyPatch) -> None:
    """Outputs of continued requests name the place behind that of their first token."""
    honest = Results._gain

    def gain(results: Results, sequence: object, *rest: object, **options: object) -> RequestOutput:
        output = honest(results, sequence, *rest, **options)  # type: ignore[arg-type]
        return replace(output, at=output.at + bool(sequence.request.done))  # type: ignore[attr-defined]

    patch.setattr(Results, "_gain", gain)


def nothing(patch: pytest.MonkeyPatch) -> None:
    """The engine is as it should be."""


PLANTED: dict[str, tuple[Continue, Callable[[pytest.MonkeyPatch], None]]] = {
    "the number of generated tokens is lost": (as_it_was, min_tokens_begin_anew),
    "the last token is lost": (last_token_lost, nothing),
    "another seed": (another_seed, nothing),
    "places are one off": (as_it_was, places_one_off),
}
QUICK = ("places are one off", "the last token is lost")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in PLANTED])
def test_a_planted_fault_of_a_continuation_is_found(bench: Bench, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, plant = PLANTED[name]
    plant(monkeypatch)
    assert soak_cuts(bench, 60, 200_000, go_on).problem
