"""Counters since start."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from msgspec import structs

from workers.messages import EngineStats


@dataclass(slots=True)
class Counters:
    """Named as in `EngineStats`, which documents them."""

    steps: int = 0
    decode_steps: int = 0
    prefill_steps: int = 0
    mixed_steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0

    def count_step(self, decode_rows: int, prefill_rows: int, seconds: float) -> None:
        """One applied step."""
        self.steps += 1
        self.step_seconds += seconds
        if decode_rows and prefill_rows:
            self.mixed_steps += 1
        elif decode_rows:
            self.decode_steps += 1
        else:
            self.prefill_steps += 1

    def into(self, gauges: EngineStats) -> EngineStats:
        """`gauges` with these counters."""
        return structs.replace(gauges, **asdict(self))
