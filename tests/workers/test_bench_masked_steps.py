"""The benchmark of what masks cost a step: what it counts, and that its rows stay busy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from workers.protocol.messages import Distribution, EngineStats, Request, RequestOutput
from workers.protocol.plan import SamplingParams
from workers.vocabulary.folder import text_of_tokens

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import masked_steps

    return masked_steps


def stats(decode: int, mixed: int, seconds: float, rows: float, tokens: int) -> EngineStats:
    return EngineStats(
        step_seconds={"decode": Distribution((decode, 0), seconds), "mixed": Distribution((mixed,), 50.0)},
        step_decode_rows={"decode": Distribution((0, decode), rows), "mixed": Distribution((mixed,), 50.0)},
        generated_tokens=tokens,
    )


def a_point(bench: ModuleType, seconds: float) -> Any:
    before, after = stats(100, 10, 5.0, 400, 1000), stats(300, 60, 5.0 + seconds, 1160, 3000)
    return bench.Point.of(before, after, 4.0, 2.0, 3)


def test_what_is_counted(bench: ModuleType) -> None:
    one = a_point(bench, 2.0)
    assert (one.step_ms, one.cpu_share, one.cpu_ms) == pytest.approx((10.0, 0.5, 8.0))
    assert one.report()["mean_rows"] == pytest.approx(3.8)
    assert one.report()["tokens_per_s"] == pytest.approx(500.0)
    both = one + a_point(bench, 3.0)
    assert (both.steps, both.all_steps, both.ended, both.step_ms) == (400, 500, 6, pytest.approx(12.5))
    with pytest.raises(RuntimeError, match="no step of decode rows alone"):
        bench.Point.of(EngineStats(), stats(0, 7, 0.0, 0, 7), 1.0, 1.0, 0)


@pytest.mark.parametrize(("bound", "status"), [(None, 0), (1.6, 0), (1.4, 1)])
def test_the_verdict(
    bench: ModuleType, bound: float | None, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bench.options().parse_args(["--model", "demo", "--json", str(tmp_path / "figures")])
    given.bound = bound
    assert bench.verdict(a_point(bench, 2.0), a_point(bench, 3.0), given) == status
    printed = capsys.readouterr().out
    assert "of masks" in printed
    assert "5.000" in printed
    assert "a step takes 1.500 times as long under masks" in printed
    assert ("that is more than 1.4" in printed) == bool(status)
    assert json.loads((tmp_path / "figures").read_text())["ratio"] == pytest.approx(1.5)


@pytest.mark.parametrize(("bound", "status"), [("0.6", 0), ("0.4", 1)])
def test_the_verdict_on_what_rank_0_takes(
    bench: ModuleType, bound: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    given = bench.options().parse_args(["--model", "demo", "--cpu-bound", bound])
    assert bench.verdict(a_point(bench, 2.0), a_point(bench, 3.0), given) == status
    assert ("rank 0 is busy with 0.50 processors, more than 0.4" in capsys.readouterr().out) == bool(status)


class Engine:
    """Gives every request two tokens at a time, as many as it asks for."""

    def __init__(self) -> None:
        self.running, self.most, self.left = 0, 0, 0

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(0, request.sampling.max_tokens, 2):
                await asyncio.sleep(0.001)
                yield RequestOutput(request.request_id, (1, 2))
        finally:
            self.running -= 1
            self.left += 1


async def test_rows_stay_busy_and_are_left_in_the_end(bench: ModuleType) -> None:
    engine = Engine()
    streams = bench.Streams(engine, 3, lambda place, number: Request(str(number), (1,), SamplingParams(6)))
    await streams.decoding()
    while streams.ended < 9:
        streams.check()
        assert engine.running == 3
        await asyncio.sleep(0.001)
    await streams.end()
    assert (engine.running, engine.most) == (0, 3)
    assert engine.left >= 12
    assert min(streams.given) >= 6


async def test_what_a_stream_fails_with_is_raised(bench: ModuleType) -> None:
    class Failing(Engine):
        async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
            raise OSError("no grammar")
            yield

    streams = bench.Streams(Failing(), 2, lambda place, number: Request(str(number), (1,), SamplingParams(6)))
    with pytest.raises(OSError, match="no grammar"):
        await streams.decoding()
    await streams.end()


def test_a_made_up_vocabulary_takes_the_place_of_the_folders(bench: ModuleType, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text("{}")
    with bench.with_full_vocabulary(tmp_path, 2000) as folder:
        assert (folder / "config.json").read_text() == "{}"
        read = text_of_tokens(folder)
        assert read is not None
        assert len(read[0]) == 2000
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_the_demo_model(bench: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--model demo --device cpu --rows 2 --width 2 --input 8 --context 256 --settle 0 --seconds 0.3 --rounds 1"
    given = bench.options().parse_args([*words.split(), "--quiet", "--json", str(tmp_path / "figures")])
    assert bench.run(given) == 0
    figures = json.loads((tmp_path / "figures").read_text())
    for kind in ("free", "constrained"):
        assert figures[kind]["steps"] > 0
        assert 1 <= figures[kind]["mean_rows"] <= 2
        assert figures[kind]["cpu_seconds"] > 0
    assert "2 rows of width 2" in capsys.readouterr().out
