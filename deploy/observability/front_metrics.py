"""Metrics of the HTTP front: counters, gauges and histograms of this process, for Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from typing_extensions import override

from workers.protocol.messages import STEP_BUCKETS, EngineStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

FIRST_TOKEN_BUCKETS = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
TOKEN_BUCKETS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
REQUEST_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0, 600.0)
QUEUE_BUCKETS = (0.001, 0.01, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0)
PROMPT_BUCKETS = (16, 64, 256, 1024, 4096, 16384, 65536, 131072)

GAUGES: dict[str, str] = {
    "running": "Requests that hold a slot.",
    "waiting": "Requests that wait for a slot or for pages.",
    "prefill_backlog": "Prompt tokens still to be computed.",
    "prefill_backlog_seconds": "Seconds that they take at the pace of all steps with prompt tokens so far.",
    "pages_total": "Pages of latent cache.",
    "cache_shards": "Ranks that share out the pages of the latent cache; 1: each has all of them.",
    "pages_free": "Free pages, those that only the prefix cache holds included.",
    "host_pages_total": "Pages that host memory holds behind the latent cache; on a GPU as far as it is pinned.",
    "host_pages": "Of these, pages in use.",
    "disk_pages_total": "Pages that the disk holds behind host memory; 0 where it has failed.",
    "disk_pages": "Of these, pages in use.",
    "slots": "Requests that can run at once.",
    "queue_limit": "Requests that may wait beyond them.",
    "width": "Tokens that a decode row feeds in one step, as it pays at present: one more than it has drafts.",
}
ACCEPTANCE = ("acceptance", "How probable it is that a draft is accepted where those before it are.", "position")
"""A gauge with a value for each draft of a row: its name, what it is, and its label."""
COUNTERS: dict[str, str] = {
    "prompt_tokens": "Prompt tokens of admitted requests.",
    "generated_tokens": "Tokens generated.",
    "cached_tokens": "Prompt tokens served from the prefix cache.",
    "host_saved_pages": "Pages copied to host memory.",
    "host_loaded_pages": "Pages copied back from host memory.",
    "host_load_seconds": "Seconds that copying pages back from host memory took.",
    "host_dropped_pages": "Pages that left the device and were never copied to host memory: time or room lacked.",
    "host_lost_pages": "Pages of host memory forgotten because a copy failed.",
    "disk_saved_pages": "Pages copied from host memory to the disk.",
    "disk_loaded_pages": "Pages read back from the disk into host memory.",
    "disk_load_seconds": "Seconds that reading pages back from the disk took.",
    "disk_dropped_pages": "Pages that left host memory and were never copied to the disk: leave or room lacked.",
    "disk_lost_pages": "Pages on disk forgotten because they could not be written, or were not read as written.",
    "disk_late_loads": "Prompts computed because the disk took longer than that.",
    "drafts_offered": "Draft tokens verified, or left out as unlikely.",
    "drafts_accepted": "Draft tokens that were accepted.",
    "decode_fed": "Tokens that steps of decode rows alone fed, with drafts, also those left out as unlikely.",
    "decode_context": "Tokens that their rows had before them, summed over steps.",
    "preemptions": "Requests put back to the queue because pages ran out.",
    "acceptance_falls": "How often half as many first drafts were accepted as before.",
    "bad_rows": "Rows whose logits were not finite: their requests failed, or were computed again.",
}
HISTOGRAMS: dict[str, str] = {
    "step_seconds": "Seconds that a step took on rank 0, by kind: decode, prefill or mixed.",
    "step_decode_rows": "Decode rows of a step that has any, by kind.",
    "step_prefill_tokens": "Prefill tokens of a step that has any, by kind.",
    "step_context": "Tokens that each token of a step had before it, on average, by kind.",
}
WORKER_GAUGES: dict[str, str] = {
    "graph_portions_left": "Portions of graphs still to be captured and proven, while it serves without them.",
    "graph_capture_seconds": "Seconds that capturing the graphs took.",
    "graph_bytes": "Device memory of the graphs and their scratch.",
    "step_weight_bytes": "Of the matrices that a step reads on rank 0 whatever its tokens are.",
    "step_expert_bytes": "Of all routed experts on rank 0.",
    "step_expert_share": "Share of the routed experts that a token chooses.",
    "step_entry_bytes": "That a row reads of the cache for each token of its context.",
    "step_bandwidth": "Bytes a second that the device can read by its own account; 0 where it says nothing.",
}
WORKER_COUNTERS: dict[str, tuple[str, str | None]] = {
    "graph_replays": ("Steps that were one replay of a graph, or two with masks filled between.", None),
    "graph_rows": ("Decode rows of these steps.", None),
    "graph_padded_rows": ("Rows that padded them to their buckets.", None),
    "graph_mixed_steps": ("Steps with prefill rows whose segments were replayed.", None),
    "graph_tokens": ("Tokens of these steps.", None),
    "graph_padded_tokens": ("Tokens that padded them to their buckets.", None),
    "graph_eager_steps": ("Steps of which nothing was replayed, by reason.", "reason"),
}
"""Counters of the ranks: a description, and the name of the label if there is one."""

KEY_REQUESTS = ("latentserve_key_requests", "Sequences ended, by name of the API key and reason.", ("key", "reason"))
KEY_PROMPT = ("latentserve_key_prompt_tokens", "Tokens of prompts, by name of the API key.", ("key",))
KEY_GENERATED = ("latentserve_key_generated_tokens", "Tokens generated, by name of the API key.", ("key",))
KEY_SEQUENCES = ("latentserve_key_sequences", "Sequences that run or wait, by name of the API key.", ("key",))
KEY_LIMITED = ("latentserve_key_limited", "Requests refused for a limit of their API key.", ("key", "limit"))
KEY_QUEUE = ("latentserve_key_queue_seconds", "Wait for a slot and pages, by name of the API key.", ("key",))
"""Name, what it is, and labels."""


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """(upper bound, values up to it) of every bucket of a histogram, as Prometheus wants them. The last of `counts` is
    of what lies above all `bounds`."""
    return list(zip([*map(floatToGoString, bounds), "+Inf"], accumulate(counts), strict=True))


class _EngineCollector(Collector):
    """Renders the scheduler's newest figures when Prometheus asks: nothing is copied in between."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    @override
    def collect(self) -> Iterable[Metric]:
        stats = self._stats()
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"latentserve_engine_{name}", text, value=float(getattr(stats, name)))
        acceptance = GaugeMetricFamily(f"latentserve_engine_{ACCEPTANCE[0]}", ACCEPTANCE[1], labels=ACCEPTANCE[2:])
        for position, share in enumerate(stats.acceptance, start=1):
            acceptance.add_metric((str(position),), share)
        yield acceptance
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"latentserve_engine_{name}", text, value=float(getattr(stats, name)))
        for name, text in HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"latentserve_engine_{name}", text, labels=("kind",))
            for kind, part in getattr(stats, name).items():
                histogram.add_metric((kind,), cumulative(STEP_BUCKETS[name], part.counts), part.total)
            yield histogram
        for name, text in WORKER_GAUGES.items():
            value = stats.worker.get(name, {}).get("", 0.0)
            yield GaugeMetricFamily(f"latentserve_engine_{name}", text, value=value)
        for name, (text, label) in WORKER_COUNTERS.items():
            counter = CounterMetricFamily(f"latentserve_engine_{name}", text, labels=(label,) if label else ())
            for of, value in stats.worker.get(name, {} if label else {"": 0.0}).items():
                counter.add_metric((of,) if label else (), value)
            yield counter


class _Intervals(Collector):
    """A histogram of values that come many at a time. prometheus_client's asks for each what may be observed, and goes
    through all bounds, which shows where there is one for every token."""

    def __init__(self, name: str, text: str, buckets: Sequence[float]) -> None:
        """`buckets`: their upper bounds, which are inclusive."""
        self._name, self._text, self._bounds = name, text, tuple(buckets)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def add(self, values: Sequence[float]) -> None:
        """Count them."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._total += sum(values)

    @override
    def collect(self) -> Iterable[Metric]:
        histogram = HistogramMetricFamily(self._name, self._text)
        histogram.add_metric((), cumulative(self._bounds, self._counts), self._total)
        yield histogram


class FrontMetrics:
    """The sink of the front's measurements. Subclasses that mirror them elsewhere override the methods and call these.

    - `latentserve_requests_total{endpoint, reason}`: sequences ended; reason is stop, length, cancelled (the client
      left), refused or error.
    - `latentserve_requests_in_flight`: sequences handed to the engine and not ended.
    - `latentserve_prompt_tokens_total`, `latentserve_cached_tokens_total`, `latentserve_generated_tokens_total`.
    - `latentserve_prompt_length_tokens`: histogram of prompt lengths.
    - `latentserve_handed_prompts_total`: long prompts that came encoded from their router.
    - `latentserve_time_to_first_token_seconds`: from the request's arrival to its first token, tokenizing and queueing
      included.
    - `latentserve_inter_token_seconds`: between consecutive outputs of a sequence (an output may hold several tokens).
    - `latentserve_time_per_output_token_seconds`: mean over one sequence, without its first output.
    - `latentserve_request_seconds`: from arrival to the end of a sequence.
    - `latentserve_http_responses_total{path, status}`.
    - `latentserve_key_*{key}`, by the names of API keys where they have any: `_requests_total{reason}`,
      `_prompt_tokens_total`, `_generated_tokens_total`, `_sequences` (in flight), `_limited_total{limit}` (requests
      answered 429 for a limit of the key), `_queue_seconds` (in the scheduler's waiting line).
    - `latentserve_engine_*`: the scheduler's figures (`EngineStats`), and those of rank 0.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        r = self.registry
        self._requests = Counter(
            "latentserve_requests", "Sequences ended, by endpoint and reason.", ("endpoint", "reason"), registry=r
        )
        self._in_flight = Gauge(
            "latentserve_requests_in_flight", "Sequences handed to the engine and not ended.", registry=r
        )
        self._prompt = Counter("latentserve_prompt_tokens", "Tokens of prompts.", registry=r)
        self._cached = Counter("latentserve_cached_tokens", "Prompt tokens taken from the prefix cache.", registry=r)
        self._generated = Counter("latentserve_generated_tokens", "Tokens generated.", registry=r)
        self._handed = Counter(
            "latentserve_handed_prompts", "Long prompts that came encoded from their router.", registry=r
        )
        self._prompt_length = Histogram(
            "latentserve_prompt_length_tokens", "Tokens of a prompt.", buckets=PROMPT_BUCKETS, registry=r
        )
        self._first = Histogram(
            "latentserve_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=r,
        )
        self._inter = _Intervals(
            "latentserve_inter_token_seconds", "Between consecutive outputs of a sequence.", TOKEN_BUCKETS
        )
        r.register(self._inter)
        self._per_token = Histogram(
            "latentserve_time_per_output_token_seconds",
            "Mean time per token of a sequence after its first output.",
            buckets=TOKEN_BUCKETS,
            registry=r,
        )
        self._request = Histogram(
            "latentserve_request_seconds",
            "From arrival to the end of a sequence.",
            buckets=REQUEST_BUCKETS,
            registry=r,
        )
        self._responses = Counter(
            "latentserve_http_responses", "HTTP answers by path and status.", ("path", "status"), registry=r
        )

        self._key_requests = Counter(*KEY_REQUESTS, registry=r)
        self._key_prompt = Counter(*KEY_PROMPT, registry=r)
        self._key_generated = Counter(*KEY_GENERATED, registry=r)
        self._key_sequences = Gauge(*KEY_SEQUENCES, registry=r)
        self._key_limited = Counter(*KEY_LIMITED, registry=r)
        self._key_queue = Histogram(*KEY_QUEUE, buckets=QUEUE_BUCKETS, registry=r)

    def watch_engine(self, stats: Callable[[], EngineStats]) -> None:
        """Render the engine's figures too."""
        self.registry.register(_EngineCollector(stats))

    def prompt_handed_over(self) -> None:
        """A request's prompt had been encoded by its router, and is not encoded again."""
        self._handed.inc()

    def request_started(self, endpoint: str, prompt_tokens: int) -> None:
        """A sequence is handed to the engine."""
        self._in_flight.inc()
        self._prompt.inc(prompt_tokens)
        self._prompt_length.observe(prompt_tokens)

    def first_token(self, seconds: float) -> None:
        """A sequence's first token came, this long after the request."""
        self._first.observe(seconds)

    def token_intervals(self, seconds: Sequence[float]) -> None:
        """Intervals between consecutive outputs of a sequence, some at a time: this is not called per token."""
        self._inter.add(seconds)

    def request_finished(
        self, endpoint: str, reason: str, seconds: float, generated: int, cached: int, per_token: float | None
    ) -> None:
        """A sequence ended, `seconds` after its request arrived; `per_token`: mean seconds per token, if it had several
        outputs."""
        self._in_flight.dec()
        self._requests.labels(endpoint, reason).inc()
        self._request.observe(seconds)
        self._generated.inc(generated)
        self._cached.inc(cached)
        if per_token is not None:
            self._per_token.observe(per_token)

    def key_started(self, key: str, prompt_tokens: int) -> None:
        """A sequence of the API key of this name is handed to the engine."""
        self._key_sequences.labels(key).inc()
        self._key_prompt.labels(key).inc(prompt_tokens)

    def key_finished(self, key: str, reason: str, generated: int, queued: float | None) -> None:
        """Count the end of a key's request. `queued`: seconds that it waited for a slot and pages, None if it never got
        them."""
        self._key_sequences.labels(key).dec()
        self._key_requests.labels(key, reason).inc()
        self._key_generated.labels(key).inc(generated)
        if queued is not None:
            self._key_queue.labels(key).observe(queued)

    def key_limited(self, key: str, limit: str) -> None:
        """A request was refused for a limit of the API key: requests, tokens or sequences."""
        self._key_limited.labels(key, limit).inc()

    def http_response(self, path: str, status: int) -> None:
        """An HTTP answer was begun; `path` is a route, never what the client made up."""
        self._responses.labels(path, str(status)).inc()

    def render(self) -> bytes:
        """The text of /metrics."""
        return generate_latest(self.registry)
