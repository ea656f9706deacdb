"""The dashboard asks for figures that exist, and the documents name all of them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.cluster.environment import DASHBOARD_FILE
from deploy.observability.front_metrics import COUNTERS, GAUGES, HISTOGRAMS, WORKER_COUNTERS, WORKER_GAUGES
from deploy.observability.ray_metrics import RayFrontMetrics
from deploy.routing.arrivals import Arrivals, RoutingRecord
from workers.graphs.stats import GraphStats
from workers.protocol.messages import STEP_BUCKETS, Distribution, EngineStats

ROOT = Path(__file__).resolve().parents[3]


class Recorded:
    """Stands for Ray's gauges: what matters here is which names are used, with which tags and values."""

    created: dict[str, "Recorded"]

    def __init__(self, name: str, description: str = "", tag_keys: tuple = ()) -> None:
        assert description
        assert name not in Recorded.created
        self.tags, self.values = tag_keys, []
        self.of: dict[tuple[str, ...], float] = {}
        """The newest value by the values of its tags."""
        Recorded.created[name] = self

    def set(self, value: float, tags: dict | None = None) -> None:
        assert set(tags or {}) == set(self.tags)
        self.values.append(value)
        self.of[tuple((tags or {})[tag] for tag in self.tags)] = value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> dict[str, Recorded]:
    Recorded.created = {}
    monkeypatch.setattr("deploy.observability.ray_metrics.Gauge", Recorded)
    return Recorded.created


def measured() -> tuple[RayFrontMetrics, Arrivals]:
    """Metrics that have measured something of everything."""
    arrivals = Arrivals()
    arrivals.arrive(RoutingRecord("r", 1, 70, 1))
    metrics = RayFrontMetrics(arrivals)
    graphs = GraphStats(replays=5, rows=20, padded_rows=3, bytes=1000, capture_seconds=2.0)
    graphs.eager["prefill rows"] = 2
    steps = {"decode": Distribution(tuple(range(1, len(STEP_BUCKETS["step_seconds"]) + 2)), 4.5)}
    rows = {"decode": Distribution((1,) * (len(STEP_BUCKETS["step_decode_rows"]) + 1), 9.0)}
    tokens = {"mixed": Distribution((2,) * (len(STEP_BUCKETS["step_prefill_tokens"]) + 1), 7.0)}
    contexts = {"mixed": Distribution((3,) * (len(STEP_BUCKETS["step_context"]) + 1), 8.0)}
    stats = EngineStats(
        running=3,
        generated_tokens=25,
        preemptions=9,
        width=3,
        acceptance=(0.9, 0.5),
        step_seconds=steps,
        step_decode_rows=rows,
        step_prefill_tokens=tokens,
        step_context=contexts,
        worker=graphs.figures(),
    )
    metrics.watch_engine(lambda: stats)
    metrics.request_started("completions", 70)
    metrics.first_token(0.25)
    metrics.token_intervals([0.01, 0.2])
    metrics.request_finished("completions", "stop", 1.5, 20, 64, 0.05)
    metrics.http_response("/v1/completions", 200)
    metrics.key_started("ann", 70)
    metrics.key_finished("ann", "stop", 20, 0.3)
    metrics.key_limited("ann", "tokens")
    return metrics, arrivals


def names(recorded: dict[str, Recorded]) -> set[str]:
    measured()[0].report(None)
    return set(recorded)


def test_every_panel_asks_for_a_figure_that_exists(recorded: dict[str, Recorded]) -> None:
    known = names(recorded)
    dashboard = json.loads(DASHBOARD_FILE.read_text())
    expressions = [t["expr"] for panel in dashboard["panels"] for t in panel.get("targets", ())]
    asked = {name for e in expressions for name in re.findall(r"ray_(latentserve_\w+)", e)}
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
                known[name] = ours | {*recorded[name].tags}
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
    # The series of a histogram have one line together.
    found = names(recorded)
    figures = {name.removesuffix("_bucket") for name in found if not re.search("_(sum|count)$", name)}
    assert len(figures) > 50
    missing = {name for name in figures if f"`{name}`" not in text}
    assert not missing


def test_ray_is_told_exactly_what_the_replica_s_own_metrics_say(recorded: dict[str, Recorded]) -> None:
    """Every series, sums of histograms among them, as prometheus_client reads them; again after more was counted."""
    metrics, arrivals = measured()
    for more in range(3):
        for number in range(more * 50):
            metrics.request_started("chat", number)
            metrics.first_token(number * 0.0137)
            metrics.request_finished("chat", "length", number * 0.071, number, 0, number * 0.00031)
            metrics.http_response("/v1/chat/completions", 503 if number % 7 else 200)
        metrics.report(None)
        own = {
            (sample.name, tuple(sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(metrics.render().decode())
            for sample in family.samples
            if not sample.name.endswith("_created")
        }
        told = {
            (name, tuple(sorted(zip(metric.tags, values, strict=True)))): value
            for name, metric in recorded.items()
            for values, value in metric.of.items()
            if name not in ("latentserve_engine_healthy", "latentserve_engine_standby_ready")
        }
        assert told == own
    assert arrivals.load(EngineStats()).backlog == arrivals.load(EngineStats()).rows == 0
    assert recorded["latentserve_http_responses_total"].of["/v1/chat/completions", "503"] > 80
    assert recorded["latentserve_engine_graph_eager_steps_total"].of == {("prefill rows",): 2}
    assert {f"latentserve_engine_{name}" for name in (*GAUGES, *WORKER_GAUGES)} <= set(recorded)
    assert {f"latentserve_engine_{name}_total" for name in (*COUNTERS, *WORKER_COUNTERS)} <= set(recorded)


def test_an_engine_that_failed_is_told(recorded: dict[str, Recorded]) -> None:
    metrics, _ = measured()
    metrics.report(None)
    metrics.report("dead", standby=True)
    assert recorded["latentserve_engine_healthy"].values == [1, 0]
    assert recorded["latentserve_engine_standby_ready"].values == [0, 1]
