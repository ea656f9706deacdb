"""The proof that replayed segments compute what eager ones compute: a random mixed step in every token bucket.

Decode rows, chunks that end their prompt, chunks that do not, with cached context and suppressed writes, fill the
bucket all but a few tokens, as far as pages allow, on random state with poison in what no row may touch (see
`fixture`). The step runs eagerly in fresh memory of the bucket's size, and as a replay in memory that was poison
before. Both must agree bit for bit in tokens, accepted counts, logits, cache writes and slot state, and must have
changed nothing else. Against a mistake that both share, the logits are compared with those of the same step without
padding, both with nothing rounded to FP8 (see `decode_steps`). Where attention is sparse some row of a step is so long
that it does not attend to everything, if pages allow.

Run before a replica serves: it overwrites slots and cache. All ranks run it together, from equal seeds.

Shape legend: N logits rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS, pages_for
from kernels.runtime.repeat import nothing_repeated
from workers.memory.scratch import Scratch
from workers.models.choices import Recorded, Taken
from workers.models.selecting import pages_to_select
from workers.proof.decode_steps import (
    AGREED,
    ATTEMPTS,
    differences,
    mixtures,
    quantizes_activations,
    selecting,
    shared,
    timed_runs,
    tolerance,
)
from workers.proof.fixture_pool import FixturePool, FreePages
from workers.proof.rows import Row
from workers.proof.step_fixture import Outcome, StepFixture
from workers.protocol.plan import PrefillRow, StepPlan
from workers.protocol.report import BucketReport, StepTime
from workers.step.mixed import MixedStep, Stage
from workers.step.parts import StepOutput, StepParts

MOST_DECODE_ROWS = 6
MOST_CONTEXT = 3 * PAGE_TOKENS
POISON = 0xFF
"""A float filled with it is NaN, an id -1."""


def most_pages(parts: StepParts, tokens: int) -> int:
    """Return the pages that a step of so many tokens has in its proof, where the pool has them."""
    context = pages_for(MOST_CONTEXT + 2 * parts.width) + 1
    return pages_for(tokens) + parts.state.slots * context + pages_to_select(parts.model.config, parts.width) + 1


class SegmentProof:
    """Tests the stages of one rank, one after the other."""

    def __init__(self, parts: StepParts, seed: int = 0, *, granted: Sequence[int] | None = None) -> None:
        """`granted`: see `FixturePool`."""
        self._parts, self._seed, self._granted = parts, seed, granted

    @torch.inference_mode()
    def run(self, stages: Sequence[Stage], progress: Callable[[str], None] | None = None) -> list[BucketReport]:
        """Prove the stages; returns one report per stage, in order. Slots and cache are zero_filled afterwards."""
        reports: list[BucketReport] = []
        fixture_pool = self._fixture_pool(max((stage.tokens for stage in stages), default=0))
        try:
            for stage in stages:
                reports.append(self._bucket(stage, fixture_pool))
                if progress is not None and not reports[-1].passed:
                    progress(f"self-test: {reports[-1]}: {'; '.join(reports[-1].problems)}")
        finally:
            fixture_pool.clear()
        return reports

    def _fixture_pool(self, tokens: int) -> FixturePool:
        """Make a pool with pages for any step of up to `tokens` tokens."""
        return FixturePool(self._parts, self._seed, most_pages(self._parts, tokens), self._granted)

    def _bucket(self, stage: Stage, fixture_pool: FixturePool) -> BucketReport:
        begin, parts = time.perf_counter(), self._parts
        bound, least, most_agreed = tolerance(parts), torch.inf, 0.0
        problems: list[str] = []
        for _ in range(ATTEMPTS):
            former, free = fixture_pool.pages()
            plan, rows = self._plan(stage.tokens, fixture_pool, free)
            fixture = fixture_pool.fixture(rows, former)
            try:
                eager, error, agreed = self._eager(fixture, plan, stage.tokens)
                stage.fill(POISON)
                problems += fixture.problems(eager, fixture.outcome(self._run(plan, stage)))
            except IndexError as oops:
                # A CPU notices what would read or write anywhere on a GPU.
                problems.append(f"indexed out of bounds: {oops}")
                break
            least, most_agreed = min(least, error), max(most_agreed, agreed)
            if error <= bound and agreed >= AGREED:
                break
        else:
            problems += differences(least, most_agreed, bound, "logits", "the step without padding")
        # Whatever is wrong: all ranks run the same steps.
        decode_rows, prompt_tokens = len(plan.decode_slots), sum(len(row.tokens) for row in plan.prefill)
        took = self._seconds(fixture, plan, stage) if decode_rows else 0.0
        return BucketReport(
            kind="mixed",
            bucket=f"{stage.tokens} tokens",
            seconds=time.perf_counter() - begin,
            problems=tuple(dict.fromkeys(problems)),
            drafts=plan.drafts,
            rows=len(rows),
            logits_error=least,
            step_time=StepTime(decode_rows, plan.width, took, prompt_tokens) if took else None,
        )

    def _seconds(self, fixture: StepFixture, plan: StepPlan, stage: Stage) -> float:
        """Return the seconds that the device takes for the step while the host is ahead of it, as a replica's is: the
        least of some; 0 where none is timed. The fixture is at its beginning afterwards."""
        device = self._parts.device
        if not (timed := timed_runs(device)):
            return 0.0
        marks = [tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) for _ in range(timed + 1)]  # type: ignore[no-untyped-call]
        for begin, end in marks:
            fixture.restore()
            begin.record()
            self._run(plan, stage)
            end.record()
        torch.cuda.synchronize(device)
        fixture.restore()
        # While the first one ran the others were launched.
        return min(1e-3 * float(begin.elapsed_time(end)) for begin, end in marks[1:])

    def _eager(self, fixture: StepFixture, plan: StepPlan, bucket: int) -> tuple[Outcome, float, float]:
        """Run the eager step on a fixture, which is at its beginning again afterwards. Return its outcome; the distance
        of its logits from those of the same step without padding, which takes its experts (the median over rows); and
        the share of choices in which both agree."""
        paths, recorded = self._parts.model.paths, Recorded()
        with nothing_repeated():  # what is repeated is to be proven
            with paths.choosing(recorded):
                eager = fixture.outcome(self._run(plan, self._fresh(bucket)))
            fixture.restore()
            with paths.without_w8a8():
                padded_NV: Tensor | None = eager.logits_NV
                if quantizes_activations(self._parts, bucket):
                    recorded = Recorded()
                    with paths.choosing(recorded):
                        padded_NV = self._run(plan, self._fresh(bucket)).logits_NV
                    fixture.restore()
                kinds = bool(plan.decode_slots) + bool(plan.prefill)
                taken = Taken(recorded, mixtures(self._parts), selecting=kinds * selecting(self._parts))
                with paths.choosing(taken):
                    exact_NV = self._run(plan, self._fresh(plan.layout.tokens)).logits_NV
            fixture.restore()
        assert padded_NV is not None
        assert exact_NV is not None
        error_N = (padded_NV - exact_NV).norm(dim=-1) / exact_NV.norm(dim=-1)
        # Whether to try another state is one decision for all ranks. NaN must not pass for small.
        error = float(self._parts.group.broadcast(torch.nan_to_num(error_N, nan=torch.inf).median()))
        return eager, error, shared(self._parts, taken)

    def _run(self, plan: StepPlan, stage: Stage) -> StepOutput:
        return MixedStep(self._parts).run(plan, stage)

    def _fresh(self, tokens: int) -> Stage:
        device = self._parts.device
        return Stage(self._parts, tokens, Scratch(device), Scratch(device))

    def _plan(self, bucket: int, fixture_pool: FixturePool, free: FreePages) -> tuple[StepPlan, list[Row]]:
        """A step of nearly `bucket` tokens, fewer where slots, pages or positions do not suffice. It takes its pages
        from `free`."""
        parts, width, number = self._parts, self._parts.width, fixture_pool.number
        drafts = width - 1
        longest = min(parts.model.max_positions, parts.state.pages_per_row * PAGE_TOKENS) - 2 * width
        slots = fixture_pool.order(parts.state.slots)
        left = bucket - number(0, bucket // 16)
        rows: list[Row] = []
        prefill: list[PrefillRow] = []

        def take(start: int, cached: int, end: int, logits_rows: int) -> Row:
            need = pages_for(end + 2 * width)
            drafted = drafts if logits_rows else 0
            row = Row(slots.pop(), start, cached, end, logits_rows, drafted, free.take(need))
            rows.append(row)
            return row

        for _ in range(number(0, min(MOST_DECODE_ROWS, parts.state.slots - 1, (left - 1) // width))):
            length = number(1, min(MOST_CONTEXT, longest - width))
            beyond = 0 if rows else fixture_pool.beyond_selection(longest - width)
            if beyond and pages_for(beyond + 3 * width) < free.most():
                length = beyond
            # A page is left for the prefill row that every mixed step has.
            if pages_for(length + 3 * width) < free.most():
                take(length, length, length + width, width)
                left -= width
        decode = tuple(row.slot for row in rows)
        while left > 0 and slots and free:
            start = number(0, 1) * number(0, min(MOST_CONTEXT, longest - 1))
            beyond = 0 if prefill else fixture_pool.beyond_selection(longest - 1)
            if beyond and (not rows or number(0, 1)):
                start = beyond
            room = min(longest, free.most() * PAGE_TOKENS - 2 * width)
            if start >= room:
                start = 0
            # The last slot takes all that is left, and a chunk is long enough to fill a large bucket with few rows.
            count = min(left, room - start, left if len(slots) == 1 else number(1, max(left, 1)))
            if count < 1:
                break
            final = not prefill or bool(number(0, 1))
            suppressed = min(number(0, 1), start)
            if parts.cache.rings:  # whose rows begin behind a snapshot, and write all that they feed
                suppressed = 0
            row = take(start, start + suppressed, start + count, int(final))
            tokens = tuple(fixture_pool.numbers(count, parts.model.config.vocab_size))
            prefill.append(PrefillRow(row.slot, start, tokens, row.cached, final, -1 if final else 1))
            left -= count
        if not prefill:
            raise RuntimeError("the self-test needs a pool of at least 2 pages, the null page included")
        return StepPlan(1, width, drafts, decode, tuple(prefill)), rows
