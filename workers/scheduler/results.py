"""Takes in the results of steps: what every request gained, which rows were bad, and who has ended, and how. And what
of all that is counted.

A row that is not a number, because of its prompt or of memory that failed for a moment, harms nobody but those who read
its cache entries. So its request ends with an error of its own, what it wrote is neither found nor reused before it is
zeroed (`PrefixCache.mark_suspect`, `PagePool.mark_suspect`), and everybody else goes on.

Who read pages of others for which nobody has vouched yet may be such a victim, and computes its tokens once more,
alone: every page by itself. A page is vouched for (`Entry.sound`) once a row that reads it has sampled a token from
finite logits, for one entry that is not finite makes every token behind it NaN.

Whether the replica itself is broken, no request can say, since a client may send the same bad prompt again and again.
So where a step has non-finite rows alone, or one step after the other has some, the replica is put to the test by a
request of its own (`Soundness`): one token, from a slot and a page of its own, that nobody else has a part in. If that
is bad, the replica ends.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field, fields
from typing import Final

from msgspec import structs

from kernels.page import PAGE_TOKENS
from workers.protocol.messages import STEP_BUCKETS, Distribution, EngineStats, FinishReason, Request, RequestOutput
from workers.protocol.plan import PrefillRow, SamplingParams, StepResult, TopLogprobs
from workers.protocol.request import Prompt
from workers.protocol.scores import Scores
from workers.scheduler.grammars import Grammars
from workers.scheduler.queue import Arrivals
from workers.scheduler.rows import Rows
from workers.scheduler.sequence import Flight, Phase, Sequence, Tokens

CANARY_ID: Final = "the replica's own probe"
CANARY_TOKEN: Final = 0
"""Token of the canary request. It is in every vocabulary, and begins a text in most."""
NONFINITE_STEPS: Final = 16
"""Steps in a row, each with a non-finite row, that put the replica to the test although others gain tokens."""

NONFINITE_LOGITS: Final = (
    "the model gave no finite numbers (NaN or infinite logits) for this request, which ends here; tokens that were "
    "sent before stand. Try another prompt; if many requests end so, tell whoever runs this server"
)
DEAD_END: Final = (
    "the request's grammar allows no token that this model has behind those generated so far, or takes too long to be "
    "followed; tokens that were sent before stand. Make the grammar simpler"
)


class Unsound(RuntimeError):
    """The replica gives no finite numbers for anybody; the message is for whoever runs it."""


class Soundness:
    """Judges steps by their non-finite rows."""

    def __init__(self) -> None:
        self.bad_rows = 0
        """Rows so far whose logits were not finite."""
        self._in_a_row = 0
        self._probing = False

    @property
    def doubts(self) -> bool:
        """Whether there is anything to learn from a step without non-finite rows."""
        return self._probing or self._in_a_row > 0

    def observe(self, sound: int, nonfinite: int, canary_was_nonfinite: bool) -> bool:
        """A step was applied, with so many sound and non-finite rows of live requests. Whether to make a canary request
        now.

        Raises Unsound if the canary request that was made is not finite.
        """
        self.bad_rows += nonfinite
        if canary_was_nonfinite:
            raise Unsound(
                f"the model gives no finite numbers: after {self.bad_rows} rows with NaN or infinite logits not even a "
                "single token by itself had any. Check the weights, and the dtype for overflow"
            )
        if nonfinite:
            self._in_a_row += 1
        elif sound:
            self._in_a_row = 0
        doubtful = nonfinite > 0 and (not sound or self._in_a_row >= NONFINITE_STEPS)
        if not doubtful or self._probing:
            return False
        self._probing, self._in_a_row = True, 0
        return True

    def canary_ended(self) -> None:
        """The canary request has ended, and was sound."""
        self._probing = False


def canary(arrival: int) -> Sequence:
    """The replica's own request, before all others."""
    request = Request(CANARY_ID, (CANARY_TOKEN,), SamplingParams(1, temperature=0.0), priority=-(2**62))
    return Sequence(
        request=request,
        rank=(request.priority, 0.0, arrival),
        limit=2,
        tokens=Tokens(Prompt.of(request.prompt)),
        stop_ids=frozenset(),
        min_total=1,
        logprobs=-1,
        alone=True,
    )


def may_be_a_victim(sequence: Sequence) -> bool:
    """Whether a non-finite row read what others wrote and nobody vouched for: then it is not known whose fault it
    is."""
    if sequence.alone:
        return False
    if sequence.write_from > 0 and not all(snapshot.sound for snapshot in sequence.snapshots[:1]):
        return True
    if sequence.phase is Phase.PREEMPTED:  # whose pages they were is forgotten
        return sequence.write_from > 0
    shared = sequence.pages.chain[: sequence.write_from // PAGE_TOKENS]
    return not all(entry.sound for entry in shared)


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
    """Counters since start, named as in `EngineStats`, which documents them."""

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


class Live(dict[str, Sequence]):
    """Every request from its arrival to its end, by its id. Whoever ends one calls `end` or `end_nonfinite`, which take
    it from here, from its grammar, and from where it waits or runs."""

    def __init__(self, rows: Rows, grammars: Grammars) -> None:
        super().__init__()
        self._rows, self._grammars = rows, grammars

    def end(self, sequence: Sequence) -> None:
        """A request is over, whatever its state: finished, cancelled or refused."""
        self._forget(sequence)
        if sequence.phase is Phase.COMPILING:
            sequence.phase = Phase.ENDED
        else:
            self._rows.end(sequence)

    def end_nonfinite(self, sequence: Sequence) -> None:
        """A row was bad, and its request is over."""
        self._forget(sequence)
        self._rows.end_nonfinite(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self[sequence.request.request_id]
        if sequence.grammar:
            self._grammars.leave(sequence)


class Results:
    """Makes outputs of results, and lets the rows of a step go on, start again or end as these say.

    It changes the scheduler's `live` requests and `rows`; the scheduler itself only plans with what is left.
    """

    def __init__(self, live: Live, rows: Rows, counters: Counters, arrivals: Arrivals, *, drafting: bool) -> None:
        """`arrivals` numbers requests, the replica's own canary request among them; `drafting`: there is a draft
        layer."""
        self._live, self._rows, self._counters = live, rows, counters
        self._arrivals, self._drafting = arrivals, drafting
        self._soundness = Soundness()

    @property
    def bad_rows(self) -> int:
        """Rows so far whose logits were not finite."""
        return self._soundness.bad_rows

    def take(self, flight: Flight, result: StepResult) -> tuple[list[RequestOutput], list[tuple[Sequence, int]]]:
        """Take in the result, which `check` has found to be the step's. The outputs that leave the replica; and the
        decode rows that gained tokens, each with the number of its drafts that were accepted. Unsound when the model
        gives no finite numbers for anybody."""
        plan = flight.plan
        outputs: list[RequestOutput] = []
        nonfinite, dead_ends = self._nonfinite_rows(flight, result), self._dead_end_rows(flight, result)
        over = nonfinite.keys() | dead_ends.keys()
        # Before the step's own tokens are added.
        context = sum([sequence.tokens.length for sequence in flight.decode])
        self._counters.step_context.add(*_mean_context(flight, context))
        offered = accepted = 0
        rows, ended = zip(flight.decode, result.tokens, strict=False), Phase.ENDED
        accepted_drafts: list[tuple[Sequence, int]] = []
        for index, (sequence, tokens) in enumerate(rows):
            sequence.upper -= plan.width - len(tokens)
            if sequence.phase is not ended and not sequence.void and index not in over:  # `gains`, without a call
                output = self._gain(sequence, tokens, result, index, decoded=True, offered=plan.width - 1)
                outputs.append(output)
                offered += plan.width - 1
                accepted += min(len(output.tokens), len(tokens) - 1)
                accepted_drafts.append((sequence, len(tokens) - 1))
            self._rows.landed(sequence, sampled=True)
        index, scores = len(flight.decode), iter(result.scores)
        for sequence, row in zip(flight.prefill, plan.prefill, strict=True):
            if row.scored:
                _take_scores(sequence, row, next(scores))
            if row.final:
                if sequence.gains and index not in over:
                    outputs.append(self._gain(sequence, result.tokens[index], result, index, decoded=False, offered=0))
                index += 1
            self._rows.landed(sequence, sampled=row.final)
        self._counters.drafts_offered += offered
        self._counters.drafts_accepted += accepted
        if not plan.prefill:
            self._counters.decode_fed += plan.width * len(flight.decode)
            self._counters.decode_context += context
        return [
            *self._judge(outputs, nonfinite),
            *(output for ended in dead_ends.values() for output in ended),
        ], accepted_drafts

    def _gain(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        result: StepResult,
        index: int,
        *,
        decoded: bool,
        offered: int,
    ) -> RequestOutput:
        """A live request's tokens of a step, as a decode row with `offered` drafts or at the end of its prompt: cut at
        the first stop or at its limit; it may have ended then."""
        mine = sequence.tokens
        known = mine.length
        kept = tokens[: sequence.limit - known]
        finish: FinishReason | None = "length" if known + len(kept) == sequence.limit else None
        if not sequence.stop_ids.isdisjoint(kept):
            for end, token in enumerate(kept, start=1):
                # A stop id may be a request's token number min_tokens + 1 at the earliest.
                if token in sequence.stop_ids and known + end > sequence.min_total:
                    kept, finish = kept[:end], "stop"
                    break
        mine.generated.extend(kept)
        mine.length = total = known + len(kept)
        self._counters.generated_tokens += len(kept)
        if sequence.share is not None:
            sequence.share.charge(len(kept))
        full = (total - 1) // PAGE_TOKENS
        if sequence.phase is Phase.DECODE:
            registered = len(sequence.pages.chain)
            if full > registered or not sequence.sound:
                if full > registered:
                    self._rows.cache.register(sequence.pages, mine, full)
                # With a draft layer the last cached token of a prefix hit is computed again, so its entry is not read
                # before the row decodes.
                unread = self._drafting and not decoded and sequence.write_from > 0
                last = sequence.write_from // PAGE_TOKENS - 1 if unread else None
                self._rows.cache.vouch(sequence.pages, registered if sequence.sound else 0, last)
                sequence.sound = not unread
                for snapshot in sequence.snapshots:
                    snapshot.sound = True
        logprobs: tuple[TopLogprobs, ...] = ()
        if sequence.logprobs >= 0:
            logprobs = tuple(_first(entry, sequence.logprobs) for entry in result.logprobs[index][: len(kept)])
        cached, queued, prompt = 0, 0.0, None
        if not sequence.reported:
            cached, queued = sequence.cached, sequence.queued
            if sequence.request.sampling.prompt_logprobs >= 0:
                prompt = Scores.joined(sequence.scores)
                sequence.scores.clear()
        sequence.reported = True
        if finish is not None:
            self._live.end(sequence)
        name = sequence.request.request_id
        at = known - mine.prompt.length
        return RequestOutput(name, kept, finish, logprobs, cached, prompt=prompt, queued=queued, offered=offered, at=at)

    def _nonfinite_rows(self, flight: Flight, result: StepResult) -> dict[int, RequestOutput | None]:
        """The sampled rows of a step that are bad, of requests that live, are ended or start again. The last output of
        those that are ended."""
        nonfinite: dict[int, RequestOutput | None] = {}
        sampled = flight.sampled() if result.nonfinite else []
        for index in result.nonfinite:
            sequence = sampled[index]
            if not sequence.gains:
                continue
            nonfinite[index] = None
            if may_be_a_victim(sequence):
                sequence.scores.clear()
                sequence.scored = 0
                self._rows.start_again(sequence)
                continue
            self._live.end_nonfinite(sequence)
            nonfinite[index] = RequestOutput(sequence.request.request_id, (), failed=NONFINITE_LOGITS)
        return nonfinite

    def _dead_end_rows(self, flight: Flight, result: StepResult) -> dict[int, list[RequestOutput]]:
        """The last outputs of the live requests whose grammars allowed no token, by sampled row. The tokens before
        that stand, and the request may have ended with one of them."""
        dead_ends: dict[int, list[RequestOutput]] = {}
        sampled = flight.sampled() if result.dead_ends else []
        for index in result.dead_ends:
            if not (sequence := sampled[index]).gains:
                continue
            outputs = dead_ends[index] = []
            if tokens := result.tokens[index]:
                decoded = index < len(flight.decode)
                offered = flight.plan.width - 1 if decoded else 0
                outputs.append(self._gain(sequence, tokens, result, index, decoded=decoded, offered=offered))
                self._counters.drafts_offered += offered
                self._counters.drafts_accepted += min(len(outputs[0].tokens), len(tokens) - 1)
            if sequence.gains:
                self._live.end(sequence)
                outputs.append(RequestOutput(sequence.request.request_id, (), failed=DEAD_END, dead_end=True))
        return dead_ends

    def _judge(self, outputs: list[RequestOutput], nonfinite: dict[int, RequestOutput | None]) -> list[RequestOutput]:
        """Return those of a step's outputs, and of its non-finite rows', that leave the replica. The outputs of its own
        canary request stay."""
        if not nonfinite and not self._soundness.doubts:
            return outputs
        ended = [output for output in nonfinite.values() if output is not None]
        canary_was_nonfinite = any(output.request_id == CANARY_ID for output in ended)
        if self._soundness.observe(len(outputs), len(nonfinite), canary_was_nonfinite):
            sequence = canary(self._arrivals.number())
            self._live[CANARY_ID] = sequence
            self._rows.enqueue(sequence)
        if any(output.request_id == CANARY_ID for output in outputs):
            self._soundness.canary_ended()
        return [output for output in outputs + ended if output.request_id != CANARY_ID]


def check(flight: Flight, result: StepResult) -> None:
    """RuntimeError if the result cannot be that of this step, the oldest in flight."""
    plan = flight.plan
    if result.step != plan.step:
        raise RuntimeError(f"result of step {result.step}, but step {plan.step} is the oldest in flight")
    sampled = plan.layout.sampled_rows
    if len(result.tokens) != sampled:
        raise RuntimeError(f"step {plan.step} sampled {sampled} rows, its result has {len(result.tokens)}")
    decode = len(flight.decode)
    for index, tokens in enumerate(result.tokens):
        if not 1 <= len(tokens) <= (plan.width if index < decode else 1) or min(tokens) < 0:
            if not tokens and (index in result.nonfinite or index in result.dead_ends):
                continue
            raise RuntimeError(f"step {plan.step} (width {plan.width}) gave sampled row {index} tokens {tokens}")
    if plan.logprobs >= 0 and [len(row) for row in result.logprobs] != flight.logprobs_owed(result.tokens):
        raise RuntimeError(f"step {plan.step} owes one log-probability for every token of the rows that asked")
    if [part.count for part in result.scores] != [row.scored for row in plan.prefill if row.scored]:
        raise RuntimeError(f"step {plan.step} owes a score for every token of a prompt that was asked about")


def _take_scores(sequence: Sequence, row: PrefillRow, scores: Scores) -> None:
    """Take in the scores of a chunk of its prompt, unless the request has ended or starts again."""
    if not sequence.gains:
        return
    if row.start + row.score_from != sequence.scored:
        raise RuntimeError(f"scores from token {row.start + row.score_from} on follow {sequence.scored} others")
    sequence.scores.append(scores)
    sequence.scored += scores.count


def _first(entry: TopLogprobs, count: int) -> TopLogprobs:
    """The `count` most probable of what the step computed for the row that asked for most."""
    if len(entry.ids) <= count:
        return entry
    return TopLogprobs(entry.chosen, entry.ids[:count], entry.logprobs[:count], entry.named)


def _mean_context(flight: Flight, decoding: int) -> tuple[str, float]:
    """The kind of a step, and how many tokens its tokens have before them on average. `decoding`: those that its decode
    rows have, all together."""
    width, prefill = flight.plan.width, flight.plan.prefill
    tokens = width * len(flight.decode) + sum([len(row.tokens) for row in prefill])
    pairs = width * decoding + sum([len(row.tokens) * (row.start + (len(row.tokens) - 1) / 2) for row in prefill])
    kind = "decode" if not prefill else "mixed" if flight.decode else "prefill"
    return kind, pairs / max(tokens, 1)
