"""The dashboard asks for figures that exist, and the documents name all of them."""

import json
import re
from pathlib import Path

import pytest

from deploy.environment import DASHBOARD_FILE
from deploy.metrics import COUNTERS, GAUGES

ROOT = Path(__file__).resolve().parents[3]


class Recorded:
    """Stands for Ray's metric classes: what matters here is which names are used, with which tags and how."""

    created: dict[str, "Recorded"]

    def __init__(self, name: str, description: str = "", boundaries: list | None = None, tag_keys: tuple = ()) -> None:
        assert description
        self.name, self.tags, self.values, self.total = name, tag_keys, [], 0.0
        Recorded.created[name] = self

    def set(self, value: float, tags: dict | None = None) -> None:
        self.values.append(value)

    observe = set

    def inc(self, value: float, tags: dict | None = None) -> None:
        assert value > 0, "Ray refuses"
        assert set(tags or {}) == set(self.tags)
        self.total += value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    Recorded.created = {}
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"deploy.observability.metrics.{kind}", Recorded)
    return Recorded.created


def names(recorded: dict[str, Recorded]) -> set[str]:
    from deploy.arrivals import Arrivals
    from deploy.observability.metrics import RayEngineMetrics, RayFrontMetrics

    RayFrontMetrics(Arrivals())
    RayEngineMetrics()
    return set(recorded)


def test_every_panel_asks_for_a_figure_that_exists(recorded: dict[str, Recorded]) -> None:
    known = names(recorded)
    dashboard = json.loads(DASHBOARD_FILE.read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    asked = {name for e in expressions for name in re.findall(r"ray_(latentserve_\w+)", e)}
    assert {re.sub(r"_bucket$", "", name) for name in asked} <= known
    # What the operator must be able to see.
    for part in (
        "running",
        "waiting",
        "generated_tokens",
        "prompt_tokens",
        "time_to_first_token",
        "time_per_output_token",
    ):
        assert any(part in name for name in asked), part
    for part in ("pages_free", "cached_tokens", "drafts_offered", "drafts_accepted", "step_seconds", "mixed_steps"):
        assert any(part in name for name in asked), part
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD_FILE.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_every_figure_is_documented(recorded: dict[str, Recorded]) -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    missing = {name for name in names(recorded) if f"`{name}`" not in text}
    assert not missing


def test_counters_of_the_scheduler_become_growth(recorded: dict[str, Recorded]) -> None:
    from deploy.observability.metrics import RayEngineMetrics
    from workers.messages import EngineStats

    metrics = RayEngineMetrics()
    metrics.report(EngineStats(running=3, generated_tokens=10, steps=4), None)
    metrics.report(EngineStats(running=2, generated_tokens=10, steps=9), None)
    metrics.report(EngineStats(running=0, generated_tokens=25, steps=9, drafting=False), "dead")
    assert recorded["latentserve_engine_generated_tokens_total"].total == 25
    assert recorded["latentserve_engine_steps_total"].total == 9
    assert recorded["latentserve_engine_running"].values == [3, 2, 0]
    assert recorded["latentserve_engine_healthy"].values == [1, 1, 0]
    assert recorded["latentserve_engine_drafting"].values == [1, 1, 0]
    assert {f"latentserve_engine_{name}" for name in GAUGES} <= set(recorded)
    assert {f"latentserve_engine_{name}_total" for name in COUNTERS} <= set(recorded)


def test_the_front_s_measurements_are_passed_on_and_kept(recorded: dict[str, Recorded]) -> None:
    from deploy.arrivals import Arrivals, Ticket
    from deploy.observability.metrics import RayFrontMetrics
    from workers.messages import EngineStats

    arrivals = Arrivals()
    arrivals.arrive(Ticket("r", 1, 70, 1))
    metrics = RayFrontMetrics(arrivals)
    metrics.request_started("completions", 70)
    metrics.report()
    metrics.first_token(0.25)
    metrics.request_finished("completions", "stop", 1.5, 20, 64, 0.05)
    metrics.http_response("/v1/completions", 200)
    metrics.report()
    assert recorded["latentserve_time_to_first_token_seconds"].values == [0.25]
    assert recorded["latentserve_time_per_output_token_seconds"].values == [0.05]
    assert recorded["latentserve_request_seconds"].values == [1.5]
    assert recorded["latentserve_requests_in_flight"].values == [1, 0]
    assert recorded["latentserve_requests_total"].total == recorded["latentserve_http_responses_total"].total == 1
    assert arrivals.load(EngineStats()).backlog == arrivals.load(EngineStats()).rows == 0
    assert b"latentserve_generated_tokens_total 20.0" in metrics.render()
