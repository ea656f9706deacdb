"""Decode rows of several tokens, captured for 1 to 8 rows.

What went wrong elsewhere: an engine captured its verification with sequences of one token, fewer than the tokens that
a row feeds. A row's first tokens then had an empty causal span, and so had padded rows, whose length minus the later
tokens fell to zero and below. Softmax over nothing left NaN in the dummy page; from there it came back as draft ids
that were none, and requests died. With few pages the synthetic rows even wrote outside of the pool.

Here padded rows have length 0 and emit no work, live ones have at least as many entries as tokens, and padding has a
page of its own, which holds NaN throughout these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kernels import decode_state
from tests.scenarios.served import (
    DRAFTERS,
    Fault,
    Place,
    alone,
    greedy_jobs,
    named,
    places,
    poison_null_page,
    replica,
    serve,
    tiny,
)
from tests.workers.faults import frozen, lengths_off, one_token
from workers.scheduler import Unsound

PLACES = places(pytest.mark.gpu)
JOBS = (10, 30, 14)
"""Ten requests, prompts of up to 30 tokens, up to 14 more of each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("v3"))


class Lengths:
    """Watches what every step feeds."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.padded = self.live = 0
        self.wrong: list[tuple[int, int, int]] = []
        honest = decode_state.feed

        def feed(state: Any, slot_R: torch.Tensor, token_RW: torch.Tensor, *out: Any) -> None:
            honest(state, slot_R, token_RW, *out)
            if slot_R.is_cuda:
                return  # within a capture nothing can be looked at; answers must do
            for slot, length in zip(slot_R.tolist(), out[2].tolist(), strict=True):
                self.padded += slot < 0
                self.live += slot >= 0
                if (length != 0) if slot < 0 else (length < token_RW.shape[1]):
                    self.wrong.append((slot, length, token_RW.shape[1]))

        patch.setattr(decode_state, "feed", feed)


@pytest.mark.parametrize("place", PLACES, ids=named)
@pytest.mark.parametrize(
    ("drafter", "rows"),
    [
        ("eagle3", 2),
        *(pytest.param("eagle3", rows, marks=pytest.mark.long) for rows in (1, 5, 8)),
        *(pytest.param("eagle3", rows, marks=pytest.mark.soak) for rows in (3, 4, 6, 7)),
        ("mtp", 3),
        *(pytest.param("mtp", rows, marks=pytest.mark.long) for rows in (1, 8)),
        ("ngram", 5),
    ],
)
def test_ten_of_ten_requests_are_served(
    folder: Path, monkeypatch: pytest.MonkeyPatch, rows: int, place: Place, drafter: str
) -> None:
    expected = alone(folder, place[0], *JOBS)
    lengths = Lengths(monkeypatch)
    run = replica(folder, place, max_rows=rows, width=3, **DRAFTERS[drafter])
    poison_null_page(run)
    assert serve(run, greedy_jobs(*JOBS)) == expected
    assert run.scheduler.stats().bad_rows == 0
    assert lengths.wrong == []
    if place == ("cpu", True):
        assert lengths.padded >= rows, "nothing was ever padded"


@pytest.mark.parametrize("place", PLACES, ids=named)
@pytest.mark.parametrize(
    ("drafter", "width"),
    [("eagle3", 2), ("mtp", 2), *(pytest.param(drafter, 4, marks=pytest.mark.long) for drafter in ("eagle3", "mtp"))],
)
def test_a_cache_of_two_pages_serves_one_request_after_the_other(
    folder: Path, width: int, place: Place, drafter: str
) -> None:
    """One of the two is the null page."""
    run = replica(folder, place, width=width, cache_pages=2, **DRAFTERS[drafter])
    poison_null_page(run)
    assert serve(run, greedy_jobs(*JOBS)) == alone(folder, place[0], *JOBS)


def padding_of_one_token() -> Fault:
    """A padded row is as long as a sequence of one token, shorter than what it feeds, and attends to the null page."""

    def plant(patch: pytest.MonkeyPatch, parts: Any) -> None:
        honest = decode_state.feed

        def feed(state: Any, slot_R: torch.Tensor, token_RW: torch.Tensor, *out: Any) -> None:
            honest(state, slot_R, token_RW, *out)
            out[2].add_((slot_R < 0).to(out[2].dtype))

        patch.setattr(decode_state, "feed", feed)

    return plant


@pytest.mark.parametrize("drafter", ["eagle3", "mtp"])
def test_padding_of_one_token_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch, drafter: str) -> None:
    """Padding would not change an answer here, because nothing reads what it makes: the lengths themselves show it."""
    padding_of_one_token()(monkeypatch, None)
    lengths = Lengths(monkeypatch)
    serve(replica(folder, ("cpu", True), max_rows=8, **DRAFTERS[drafter]), greedy_jobs(*JOBS))
    assert {(slot, length) for slot, length, _ in lengths.wrong} == {(-1, 1)}


WRONG = {
    "captured for one token a row": one_token,
    "lengths of the capture": lambda: frozen("feed", 5),
    "an entry past the row": lambda: lengths_off(lambda width: 1),
}


@pytest.mark.parametrize("place", PLACES[1:], ids=named)
@pytest.mark.parametrize("drafter", ["eagle3", "mtp"])
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_capture_does_not_serve_ten_of_ten(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: Place, drafter: str
) -> None:
    expected = alone(folder, place[0], *JOBS)
    run = replica(folder, place, WRONG[name](), monkeypatch, max_rows=8, width=3, **DRAFTERS[drafter])
    poison_null_page(run)
    try:
        tokens = serve(run, greedy_jobs(*JOBS))
    except Unsound:
        return  # the replica ended: it gave no finite numbers at all
    assert tokens != expected
