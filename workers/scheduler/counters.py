"""Counters since start."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields

from msgspec import structs

from workers.protocol.messages import STEP_BUCKETS, Distribution, EngineStats


class Histogram:
    """Values of a step, by kind of step."""

    def __init__(self, name: str, kinds: tuple[str, ...]) -> None:
        """`name`: which of `STEP_BUCKETS`."""
        self._bounds = STEP_BUCKETS[name]
        self._counts = {kind: [0] * (len(self._bounds) + 1) for kind in kinds}
        self._totals = dict.fromkeys(kinds, 0.0)

    def add(self, kind: str, value: float) -> None:
        """Count one value."""
        self._counts[kind][bisect_left(self._bounds, value)] += 1
        self._totals[kind] += value

    def distributions(self) -> dict[str, Distribution]:
        """Return the counts so far, by kind."""
        return {kind: Distribution(tuple(counts), self._totals[kind]) for kind, counts in self._counts.items()}


@dataclass(slots=True)
class Counters:
    """Named as in `EngineStats`, which documents them."""

    step_seconds: Histogram = field(default_factory=lambda: Histogram("step_seconds", ("decode", "prefill", "mixed")))
    step_decode_rows: Histogram = field(default_factory=lambda: Histogram("step_decode_rows", ("decode", "mixed")))
    step_prefill_tokens: Histogram = field(
        default_factory=lambda: Histogram("step_prefill_tokens", ("prefill", "mixed"))
    )
    step_context: Histogram = field(default_factory=lambda: Histogram("step_context", ("decode", "prefill", "mixed")))
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0
    decode_fed: int = 0
    decode_context: int = 0

    def count_step(self, decode_rows: int, prefill_tokens: int, seconds: float) -> None:
        """Count one applied step."""
        kind = "decode" if not prefill_tokens else "mixed" if decode_rows else "prefill"
        self.step_seconds.add(kind, seconds)
        if decode_rows:
            self.step_decode_rows.add(kind, decode_rows)
        if prefill_tokens:
            self.step_prefill_tokens.add(kind, prefill_tokens)

    def into(self, gauges: EngineStats) -> EngineStats:
        """`gauges` with these counters."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return structs.replace(
            gauges,
            **{
                name: value.distributions() if isinstance(value, Histogram) else value for name, value in values.items()
            },
        )
