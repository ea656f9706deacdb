"""Batch latency of an engine: the same batch run to two output lengths that share ramp-up and tail.

Time per output token is the difference of the two wall times over the difference of the two lengths, so that start-up,
prefill and the last partial step cancel.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deploy.cli.local import settled_stats
from workers.protocol.front import Engine
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

Prompts = list[tuple[int, ...]]
_serial = itertools.count()


@dataclass(frozen=True)
class LatencyShape:
    """Shape of the measurement for each batch size."""

    input: int
    """Prompt tokens of every request."""
    short: int
    long: int
    """Output tokens of the two runs that are compared."""
    repeats: int
    """Runs of each kind; the best counts."""

    def __post_init__(self) -> None:
        if self.input < 1 or self.repeats < 1 or not 1 <= self.short < self.long:
            raise ValueError(f"need input, repeats >= 1 and 1 <= short < long output, got {self}")


@dataclass(frozen=True)
class LatencyResult:
    """Result for one batch size. Times in seconds, speeds in tokens per second."""

    batch: int
    input: int
    short: int
    long: int
    time_per_output_token: float
    """(time at `long` - time at `short`) / (long - short), best of the repeats each."""
    prefill_time: float
    """Wall time of the whole batch with one output token."""
    prefill_speed: float
    decode_speed: float
    """batch / time_per_output_token."""
    spread_short: float
    """Worst less best wall time of the repeats."""
    spread_long: float
    drafts_offered: int
    drafts_accepted: int
    distinct_last_tokens: int
    """Distinct last tokens in the last batch of the long runs. In a large batch of random prompts, 1 would mean that
    the model computes nothing."""

    @property
    def acceptance(self) -> float | None:
        """Accepted share of the drafts; None without drafts."""
        return self.drafts_accepted / self.drafts_offered if self.drafts_offered else None

    def report(self) -> dict[str, Any]:
        """Return every field for JSON, in its unit, and the acceptance."""
        return {**asdict(self), "acceptance": self.acceptance}


class PromptSource:
    """Seeded random prompts, new ones at every call so that nothing can be reused; or always one given prompt."""

    def __init__(self, vocab_size: int, seed: int, fixed: tuple[int, ...] | None = None) -> None:
        self._random = random.Random(seed)
        self._fixed = fixed
        self._vocab_size = vocab_size
        # The lowest ids are most often special tokens.
        self._least = 10 if vocab_size > 20 else 0

    def batch(self, rows: int, tokens: int) -> Prompts:
        """`rows` prompts of `tokens` tokens."""
        if self._fixed is not None:
            return [self._fixed] * rows
        return [
            tuple(self._random.randrange(self._least, self._vocab_size) for _ in range(tokens)) for _ in range(rows)
        ]


async def run_batch(engine: Engine, prompts: Prompts, output: int) -> tuple[float, list[int]]:
    """Submit all prompts at once, greedy, past end-of-sequence; (wall seconds until the last ends, last token of each).

    RuntimeError when a request ends with another number of tokens than asked for.
    """
    sampling = SamplingParams(max_tokens=output, temperature=0.0)

    async def one(index: int) -> int:
        count, last = 0, -1
        async for item in engine.generate(Request(f"bench-{next(_serial)}", prompts[index], sampling)):
            if item.tokens:
                count, last = count + len(item.tokens), item.tokens[-1]
        if count != output:
            raise RuntimeError(f"asked for {output} tokens, got {count}")
        return last

    begin = time.perf_counter()
    lasts = await asyncio.gather(*(one(index) for index in range(len(prompts))))
    return time.perf_counter() - begin, lasts


async def measure(
    engine: Engine,
    batches: Sequence[int],
    shape: LatencyShape,
    source: PromptSource,
    done: Callable[[LatencyResult], None],
) -> list[LatencyResult]:
    """Warm up, then measure every batch size; `done` is told each result as it comes."""
    await run_batch(engine, source.batch(min(2, max(batches)), min(128, shape.input)), min(16, shape.long))
    results = []
    for batch in batches:

        async def times(output: int, repeats: int, rows: int = batch) -> tuple[list[float], list[int]]:
            runs = [await run_batch(engine, source.batch(rows, shape.input), output) for _ in range(repeats)]
            return sorted(seconds for seconds, _ in runs), runs[-1][1]

        await times(min(4, shape.long), 1)
        prefill, _ = await times(1, shape.repeats)
        before = await settled_stats(engine)
        short, _ = await times(shape.short, shape.repeats)
        long, lasts = await times(shape.long, shape.repeats)
        after = await settled_stats(engine)
        per_token = (long[0] - short[0]) / (shape.long - shape.short)
        result = LatencyResult(
            batch=batch,
            input=shape.input,
            short=shape.short,
            long=shape.long,
            time_per_output_token=per_token,
            prefill_time=prefill[0],
            prefill_speed=batch * shape.input / prefill[0],
            decode_speed=batch / per_token if per_token > 0 else 0.0,
            spread_short=short[-1] - short[0],
            spread_long=long[-1] - long[0],
            drafts_offered=after.drafts_offered - before.drafts_offered,
            drafts_accepted=after.drafts_accepted - before.drafts_accepted,
            distinct_last_tokens=len(set(lasts)),
        )
        results.append(result)
        done(result)
    return results
