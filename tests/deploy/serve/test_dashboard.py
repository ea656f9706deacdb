"""The dashboard asks for figures that exist, and the documents name all of them."""

import json
import re
from pathlib import Path

import pytest

from deploy.cluster.environment import DASHBOARD_FILE
from deploy.observability.front_metrics import COUNTERS, GAUGES, HISTOGRAMS, WORKER_COUNTERS, WORKER_GAUGES

ROOT = Path(__file__).resolve().parents[3]


class Recorded:
    """Stands for Ray's metric classes: what matters here is which names are used, with which tags and how."""

    created: dict[str, "Recorded"]

    def __init__(self, name: str, description: str = "", boundaries: list | None = None, tag_keys: tuple = ()) -> None:
        assert description
        self.name, self.tags, self.values, self.total = name, tag_keys, [], 0.0
        self.buckets = boundaries is not None
        self.of: dict[tuple[str, ...], float] = {}
        """The newest value, or the sum, by the values of its tags."""
        Recorded.created[name] = self

    def _place(self, tags: dict | None) -> tuple[str, ...]:
        assert set(tags or {}) == set(self.tags)
        return tuple((tags or {})[tag] for tag in self.tags)

    def set(self, value: float, tags: dict | None = None) -> None:
        self.values.append(value)
        self.of[self._place(tags)] = value

    observe = set

    def inc(self, value: float, tags: dict | None = None) -> None:
        assert value > 0, "Ray refuses"
        self.total += value
        self.of[self._place(tags)] = self.of.get(self._place(tags), 0.0) + value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    Recorded.created = {}
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(f"deploy.observability.ray_metrics.{kind}", Recorded)
    return Recorded.created


def names(recorded: dict[str, Recorded]) -> set[str]:
    from deploy.observability.ray_metrics import RayEngineMetrics, RayFrontMetrics
    from deploy.routing.arrivals import Arrivals

    RayFrontMetrics(Arrivals())
    RayEngineMetrics()
    return set(recorded)


def test_every_panel_asks_for_a_figure_that_exists(recorded: dict[str, Recorded]) -> None:
    known = names(recorded)
    dashboard = json.loads(DASHBOARD_FILE.read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    asked = {name for e in expressions for name in re.findall(r"ray_(latentserve_\w+)", e)}
    known |= {f"{name}_bucket" for name in known if recorded[name].buckets}
    assert asked <= known
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
    for part in ("pages_free", "cached_tokens", "drafts_offered", "drafts_accepted", "acceptance_falls"):
        assert any(part in name for name in asked), part
    for part in (*HISTOGRAMS, *WORKER_COUNTERS, *WORKER_GAUGES):
        assert any(part in name for name in asked), part
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))


def test_panels_ask_for_labels_that_their_figures_have(recorded: dict[str, Recorded]) -> None:
    """Prometheus takes any label: by one that a figure has not, it gives a single line, whose name is then wrong."""
    names(recorded)
    ours = {"application", "deployment", "replica"}  # Serve's tags, which every figure has
    figure = re.compile(r"ray_(latentserve_\w+)\{([^}]*)\}")
    for panel in json.loads(DASHBOARD_FILE.read_text())["panels"]:
        for target in panel.get("targets", ()):
            text = target["expr"]
            known: dict[str, set[str]] = {}
            for name, matchers in figure.findall(text):
                histogram = recorded.get(name.removesuffix("_bucket"))
                tags = {*histogram.tags, "le"} if histogram and histogram.buckets else {*recorded[name].tags}
                known[name] = ours | tags
                asked = set(re.findall(r"(\w+)=", matchers))
                assert {"application", "replica"} <= asked <= known[name], panel["title"]
            grouped = re.findall(r"\b(?:sum|avg|min|max)(?: by \(([^)]*)\))? \((?:rate\()?" + figure.pattern, text)
            assert len(grouped) == len(figure.findall(text)), f"{panel['title']}: a figure that is not put together"
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for labels, name, _ in grouped:
                by = set(labels.split(", ")) - {""}
                assert by <= known[name], panel["title"]
                assert shown <= by, f"{panel['title']}: {target['legendFormat']}"


def test_every_panel_says_what_it_shows_and_in_what_unit() -> None:
    panels = [p for p in json.loads(DASHBOARD_FILE.read_text())["panels"] if p["type"] != "row"]
    for panel in panels:
        defaults = panel["fieldConfig"]["defaults"]
        assert panel["description"], panel["title"]
        assert defaults["unit"], panel["title"]
        assert defaults["min"] == 0, panel["title"]
        assert (defaults.get("max") == 1) == (defaults["unit"] == "percentunit"), panel["title"]
        # What Grafana writes in the legend of a target that says nothing is the whole expression.
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]
    titles = [panel["title"] for panel in panels]
    assert len(titles) == len(set(titles))


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
    # The series of a histogram of the engine have one line together.
    series = re.compile(f"({'|'.join(HISTOGRAMS)})_(bucket|sum|count)$")
    figures = {series.sub(r"\1", name) for name in names(recorded)}
    missing = {name for name in figures if f"`{name}`" not in text}
    assert not missing


def test_counters_of_the_scheduler_become_growth(recorded: dict[str, Recorded]) -> None:
    from deploy.observability.ray_metrics import RayEngineMetrics
    from workers.protocol.messages import EngineStats

    metrics = RayEngineMetrics()
    metrics.report(EngineStats(running=3, generated_tokens=10, preemptions=4), None)
    metrics.report(EngineStats(running=2, generated_tokens=10, preemptions=9), None)
    metrics.report(EngineStats(running=0, generated_tokens=25, preemptions=9, width=3, acceptance=(0.9, 0.5)), "dead")
    assert recorded["latentserve_engine_generated_tokens_total"].total == 25
    assert recorded["latentserve_engine_preemptions_total"].total == 9
    assert recorded["latentserve_engine_running"].values == [3, 2, 0]
    assert recorded["latentserve_engine_healthy"].values == [1, 1, 0]
    assert recorded["latentserve_engine_width"].values == [1, 1, 3]
    assert recorded["latentserve_engine_acceptance"].values == [0.9, 0.5]
    assert {f"latentserve_engine_{name}" for name in GAUGES} <= set(recorded)
    assert {f"latentserve_engine_{name}_total" for name in COUNTERS} <= set(recorded)


def test_histograms_become_the_series_that_prometheus_knows(recorded: dict[str, Recorded]) -> None:
    from deploy.observability.ray_metrics import RayEngineMetrics
    from workers.protocol.messages import STEP_BUCKETS, Distribution, EngineStats

    metrics = RayEngineMetrics()
    bounds = STEP_BUCKETS["step_seconds"]
    first = [0] * (len(bounds) + 1)
    first[1], first[-1] = 3, 1  # 3 steps of 1 ... 2 ms, one of more than a second
    second = [n + 1 for n in first]
    metrics.report(EngineStats(step_seconds={"decode": Distribution(tuple(first), 1.5)}), None)
    metrics.report(EngineStats(step_seconds={"decode": Distribution(tuple(second), 4.5)}), None)
    bucket = recorded["latentserve_engine_step_seconds_bucket"].of
    assert bucket["decode", "0.001"] == 1
    assert bucket["decode", "0.002"] == bucket["decode", "0.003"] - 1 == 5
    assert bucket["decode", "1.0"] == bucket["decode", "+Inf"] - 2 == 3 + len(bounds)
    assert recorded["latentserve_engine_step_seconds_sum"].of == {("decode",): 4.5}
    assert recorded["latentserve_engine_step_seconds_count"].of == {("decode",): 4 + len(second)}


def test_figures_of_the_worker_are_passed_on(recorded: dict[str, Recorded]) -> None:
    from deploy.observability.ray_metrics import RayEngineMetrics
    from workers.graphs.stats import GraphStats
    from workers.protocol.messages import EngineStats

    metrics, graphs = RayEngineMetrics(), GraphStats(replays=5, rows=20, padded_rows=3, bytes=1000, capture_seconds=2.0)
    metrics.report(EngineStats(), None)  # nothing is known before the first heartbeat
    graphs.eager["prefill rows"] = 2
    metrics.report(EngineStats(worker=graphs.figures()), None)
    graphs.replays, graphs.eager["prefill rows"], graphs.eager["width 2, 0 drafts"] = 9, 3, 1
    metrics.report(EngineStats(worker=graphs.figures()), None)
    found = {name.removeprefix("latentserve_engine_graph_"): metric.of for name, metric in recorded.items()}
    assert found["replays_total"] == {(): 9}
    assert found["rows_total"] == {(): 20}
    assert found["padded_rows_total"] == {(): 3}
    assert found["eager_steps_total"] == {("prefill rows",): 3, ("width 2, 0 drafts",): 1}
    assert found["bytes"] == {(): 1000}
    assert found["capture_seconds"] == {(): 2.0}


def test_the_front_s_measurements_are_passed_on_and_kept(recorded: dict[str, Recorded]) -> None:
    from deploy.observability.ray_metrics import RayFrontMetrics
    from deploy.routing.arrivals import Arrivals, RoutingRecord
    from workers.protocol.messages import EngineStats

    arrivals = Arrivals()
    arrivals.arrive(RoutingRecord("r", 1, 70, 1))
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
