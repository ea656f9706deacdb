"""GET /live."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine, say, serving
from test_selftest_endpoint import REPORT
from tiny_tokenizer import tiny

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.observability.live import PERIOD_S, ReplicaFigures, ReplicaState, Window, replica_figures
from workers.protocol.messages import Distribution, EngineStats

FIGURES = EngineStats(
    running=3,
    waiting=2,
    prefill_backlog=70,
    pages_total=100,
    pages_free=40,
    cache_shards=2,
    slots=64,
    queue_limit=512,
    width=3,
    acceptance=(0.8, 0.6),
    acceptance_falls=2,
    step_seconds={"decode": Distribution((10, 0), 0.05), "mixed": Distribution((2, 0), 0.04)},
    step_decode_rows={"decode": Distribution((10, 0), 30.0), "mixed": Distribution((2, 0), 4.0)},
    step_prefill_tokens={"mixed": Distribution((2, 0), 200.0)},
    prompt_tokens=300,
    generated_tokens=80,
    cached_tokens=64,
    drafts_offered=40,
    drafts_accepted=30,
    worker={
        "graph_replays": {"": 9.0},
        "graph_mixed_steps": {"": 2.0},
        "graph_eager_steps": {"width": 1.0},
        "graph_portions_left": {"": 4.0},
    },
    prefix_keys=bytes(16),
)


class Script:
    """`Replicas` that say what they are told."""

    own = "b"

    def __init__(self, *states: ReplicaState) -> None:
        self.list, self.asked = list(states), 0

    async def states(self) -> list[ReplicaState]:
        self.asked += 1
        return self.list


def test_figures_are_rates_and_means_since_the_last_look() -> None:
    shown = replica_figures(EngineStats(), FIGURES, 4.0)
    assert (shown.running, shown.waiting, shown.pages_free, shown.width) == (3, 2, 40, 3)
    assert shown.cache_shards == 2
    assert (shown.acceptance, shown.acceptance_falls) == ([0.8, 0.6], 2)
    assert (shown.generated_tokens_per_s, shown.prompt_tokens_per_s, shown.steps_per_s) == (20.0, 75.0, 3.0)
    assert shown.steps.keys() == {"decode", "mixed"}
    decode, mixed = shown.steps["decode"], shown.steps["mixed"]
    assert (decode.per_second, decode.seconds, decode.decode_rows, decode.prefill_tokens) == (2.5, 0.005, 3.0, 0.0)
    assert (mixed.per_second, mixed.seconds, mixed.decode_rows, mixed.prefill_tokens) == (0.5, 0.02, 2.0, 100.0)
    assert shown.drafts_accepted == 0.75
    assert shown.graph_hit_rate == pytest.approx(11 / 12)
    assert shown.eager_steps == {"width": 1}
    assert shown.graph_portions_left == 4
    assert (decode.floor_bytes, decode.floor_seconds, mixed.floor_bytes) == (None, None, None)
    still = replica_figures(FIGURES, FIGURES, 4.0)
    assert (still.generated_tokens_per_s, still.steps) == (0.0, {})
    assert (still.drafts_accepted, still.graph_hit_rate) == (None, None)


@pytest.mark.parametrize("bandwidth", [0, 1e6])
def test_a_decode_step_has_a_floor_of_bytes(bandwidth: float) -> None:
    reads = {"weight_bytes": 1000, "expert_bytes": 8000, "expert_share": 0.5, "entry_bytes": 10, "bandwidth": bandwidth}
    worker = {f"step_{name}": {"": float(value)} for name, value in reads.items()}
    now = msgspec.structs.replace(FIGURES, decode_fed=20, decode_context=4000, worker=worker)
    shown = replica_figures(EngineStats(), now, 4.0).steps
    # 10 steps, so two tokens of a step choose three quarters of the experts, and there are 400 entries.
    assert shown["decode"].floor_bytes == pytest.approx(1000 + 6000 + 4000)
    assert shown["decode"].floor_seconds == (pytest.approx(0.011) if bandwidth else None)
    assert shown["mixed"].floor_bytes is None


def test_a_window_keeps_a_few_seconds_and_the_sample_before_a_pause() -> None:
    now = [100.0]
    window = Window(lambda: now[0])
    assert window.figures(FIGURES).window_s == 0
    for tokens in range(0, 1000, 10):  # ten a second
        window.sample(EngineStats(generated_tokens=tokens))
        now[0] += 1.0
    shown = window.figures(EngineStats(generated_tokens=1000))
    assert 4.0 <= shown.window_s <= 6.0
    assert shown.generated_tokens_per_s == pytest.approx(10.0)
    now[0] += 100.0
    window.sample(EngineStats(generated_tokens=1000))
    now[0] += 0.1
    assert window.figures(EngineStats(generated_tokens=1000)).window_s > 100  # rather than none


def test_a_window_begins_anew_with_another_scheduler() -> None:
    """The new scheduler counts from its own start: nothing fell, and nothing grew by what it has counted since."""
    now = [100.0]
    window = Window(lambda: now[0])
    for steps in range(0, 1000, 100):
        window.sample(EngineStats(generated_tokens=steps, step_seconds={"decode": Distribution((steps,), 1.0)}))
        now[0] += 1.0
    restarted = EngineStats(generated_tokens=20, step_seconds={"decode": Distribution((20,), 1.0)})
    assert window.figures(restarted).window_s == 0
    window.sample(restarted)
    now[0] += 2.0
    later = EngineStats(generated_tokens=40, step_seconds={"decode": Distribution((40,), 2.0)})
    assert window.figures(later).generated_tokens_per_s == pytest.approx(10.0)


def get(app: Any, path: str = "/live", **headers: str) -> httpx.Response:
    with serving(app) as port:
        return httpx.get(f"http://127.0.0.1:{port}{path}", headers=headers)


def test_a_front_that_stands_alone_shows_itself() -> None:
    engine = FakeEngine(say([5]))
    engine.stats, engine.selftest = FIGURES, REPORT
    answer = get(create_app(engine, tiny(), ApiConfig(served_model_names=("a", "b")))).json()
    assert answer["model"] == {
        "names": ["a", "b"],
        "max_model_len": 256,
        "max_width": 4,
        "chat": True,
        "max_logprobs": 20,
    }
    [replica] = answer["replicas"]
    assert (replica["state"], replica["cause"]) == ("serving", "")
    assert replica["figures"]["running"] == 3
    assert replica["figures"]["generated_tokens_per_s"] is None
    assert answer["total"]["serving"] == 1
    assert (answer["total"]["pages_total"], answer["total"]["pages_free"]) == (100, 40)
    assert answer["selftest"] == json.loads(json.dumps(REPORT.to_json()))


def test_the_self_test_can_be_left_out_and_may_not_have_run() -> None:
    engine = FakeEngine(say([5]))
    app = create_app(engine, tiny())
    assert get(app).json()["selftest"] is None
    engine.selftest = REPORT
    assert get(app, "/live?selftest=false").json()["selftest"] is None


def test_an_engine_that_failed_is_shown_with_its_cause() -> None:
    engine = FakeEngine(say([5]))
    engine.fault = "rank 1 exited with signal 9"
    answer = get(create_app(engine, None)).json()
    assert answer["model"] is None
    assert answer["total"]["serving"] == 0
    assert [(one["state"], one["cause"]) for one in answer["replicas"]] == [("failed", engine.fault)]


def test_sums_are_of_replicas_that_serve() -> None:
    def figures(running: int, tokens: int) -> ReplicaFigures:
        return replica_figures(EngineStats(), EngineStats(running=running, generated_tokens=tokens, pages_total=7), 2.0)

    states = [
        ReplicaState(name="a", state="serving", at=1.0, figures=figures(1, 10)),
        ReplicaState(name="b", state="serving", at=1.0, figures=figures(2, 30)),
        ReplicaState(name="c", state="failed", cause="rank 0", at=1.0, figures=figures(9, 9000)),
        ReplicaState(name="d", state="starting", at=1.0),
    ]
    answer = get(create_app(FakeEngine(say([5])), tiny(), replicas=Script(*states))).json()
    assert answer["replica"] == "b"
    assert [one["name"] for one in answer["replicas"]] == ["a", "b", "c", "d"]
    total = answer["total"]
    assert (total["serving"], total["running"], total["pages_total"]) == (2, 3, 14)
    assert total["generated_tokens_per_s"] == 20.0


def test_it_needs_the_key() -> None:
    app = create_app(FakeEngine(say([5])), tiny(), ApiConfig(api_keys=("sesame",)))
    assert get(app).status_code == 401
    assert get(app, authorization="Bearer sesame").status_code == 200


async def test_those_who_ask_at_a_time_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    assert PERIOD_S == 1.0
    replicas = Script()
    transport = httpx.ASGITransport(create_app(FakeEngine(say([5])), tiny(), replicas=replicas))
    monkeypatch.setattr("deploy.api.status.PERIOD_S", 3600.0)
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as http:
        answers = await asyncio.gather(*(http.get("/live") for _ in range(20)))
        assert {answer.status_code for answer in answers} == {200}
        assert replicas.asked == 1
        monkeypatch.setattr("deploy.api.status.PERIOD_S", 0.0)
        await http.get("/live")
        assert replicas.asked == 2
