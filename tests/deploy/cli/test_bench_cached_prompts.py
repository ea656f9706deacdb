"""The benchmark of streams behind cached prompts: what it asks for, and which gaps it counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.deploy.loadtest.sse_server import Exchange, completions, serving

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import cached_prompts

    return cached_prompts


def given(bench: ModuleType, url: str, more: str = "") -> Any:
    asked = f"--model m --rows 1,3 --input 20 --output 12 --url {url} {more}"
    return bench.options().parse_args(asked.split())


async def test_prompts_are_taken_in_once_and_decoded_behind_twice(
    bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(partial(completions, gap_s=0.005)) as server:
        found = await bench.measured(given(bench, server.url))
    one, three = found
    assert (one.rows, three.rows) == (1, 3)
    for figures in found:
        assert figures.prefill_s >= 0.005
        # Never early; late by what a busy machine adds.
        assert all(5 <= gaps.percentiles[0] < 100 for gaps in figures.gaps)
        assert all(5 <= mean < 100 for mean in figures.mean_ms)
    bodies = [exchange.body for exchange in server.exchanges]
    assert [body["max_tokens"] for body in bodies] == [8] * 2 + [1, 12, 12] + [1] * 3 + [12] * 6
    prompts = [tuple(body["prompt"]) for body in bodies]
    assert prompts[2] == prompts[3] == prompts[4]
    assert len(set(prompts[5:])) == 3
    assert sorted(prompts[5:8]) == sorted(prompts[8:11]) == sorted(prompts[11:])
    assert all(len(prompt) == 20 for prompt in prompts)
    three.show(20)
    assert capsys.readouterr().out.startswith("3 prompts of 20 ids: taken in within ")


def test_gaps_count_while_all_streams_decode(bench: ModuleType) -> None:
    def answer(*at: float) -> Any:
        return bench.Answer("stream", 0.0, [(second, 1) for second in at])

    answers = [answer(1.0, 1.5, 2.0, 2.5, 3.0), answer(1.9, 2.2, 2.8)]
    assert bench.gaps_of(answers) == pytest.approx([0.5, 0.5, 0.3])
    with pytest.raises(bench.Failed, match="give more --output"):
        bench.gaps_of([answer(1.0, 1.5), answer(2.0, 2.5)])


async def test_an_error_of_the_server_is_said(bench: ModuleType) -> None:
    async def refused(exchange: Exchange) -> None:
        await exchange.json("400 Bad Request", {"error": {"message": "too long"}})

    async with serving(refused) as server:
        with pytest.raises(bench.Failed, match=r"^stream \d: HTTP 400: too long$"):
            await bench.measured(given(bench, server.url))
