"""Plans the steps of one replica ahead of their results."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import chain, count

from msgspec.structs import replace

from kernels.page import PAGE_TOKENS, pages_for
from workers.protocol.grammar import CompileGrammar, ForgetGrammar, GrammarReady
from workers.protocol.messages import EngineStats, FinishReason, Request, RequestOutput
from workers.protocol.plan import Admission, PageGrant, PrefillRow, StepPlan, StepResult, TopLogprobs
from workers.protocol.prompt import Prompt
from workers.protocol.scores import Scores
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.counters import Counters
from workers.scheduler.grammars import Grammars
from workers.scheduler.intake import why_impossible
from workers.scheduler.mixed_target import MixedTarget
from workers.scheduler.queue import NOT_SERVED, turn, urgency
from workers.scheduler.rows import Rows, by_rank
from workers.scheduler.sequence import Flight, Phase, Sequence
from workers.scheduler.shares import Shares
from workers.scheduler.soundness import BAD_LOGITS, PROBE_ID, STUCK, Soundness, may_be_a_victim, probe
from workers.scheduler.speculation import Speculation
from workers.scheduler.tokens import Tokens

PLAN_PAGES = 16_384
"""Pages of prompts that a plan looks up before it admits nobody more, some ten milliseconds of work: hundreds of
choices of one long cached prompt feed few tokens each, and would otherwise be admitted in one plan."""


class Scheduler:
    """Decides which rows run in the next step, on which slots and pages.

    Order. Decode rows come first, all of them, in slot order; prefill chunks fill what is left of the token budget by
    rank: (priority, arrival), with what its API key has had between the two where requests name keys (`shares`); chunks
    of prompts that are being read by what their keys have had by now, so that a long one holds up no other key. A
    request is admitted only with pages for its whole prompt, and nobody takes the place of the head of the queue (one
    that waits for a prefix lets others pass, but a slot and pages are kept for it), so only decode rows ever lack
    pages: then the last in rank is preempted, which has the lowest priority. Ranks are fixed when requests are first
    admitted, and those of newcomers grow with every token that their keys are given. Hence the first in rank always
    gets its pages, and as it fits the pool alone (`add` checks), it finishes; then the next is first. Priorities are
    strict: a lower one waits for as long as more urgent requests keep coming.

    Ahead of results. A step is planned while up to `pipeline` - 1 earlier ones are in flight. Workers execute plans in
    order, so pages that are given up now may be granted in the very next plan: steps in flight that still touch them
    for their former row come before. Slots are kept until no step in flight has them, which costs a free slot one step
    and lets workers prepare a plan's slots on the host while earlier steps run.
    """

    def __init__(self, config: SchedulerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._rows = Rows(config)
        self._speculation = Speculation(config)
        self._mixed = MixedTarget(config, self._speculation.times)
        self._counters = Counters()
        self._soundness = Soundness()
        self._grammars = Grammars(config.grammar_timeout_s)
        self._shares = Shares()
        self._arrivals = count()
        self._live: dict[str, Sequence] = {}
        self._flights: deque[Flight] = deque()
        self._step = 0

    @property
    def idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return not self._live and not self._flights

    def add(self, request: Request) -> RequestOutput | None:
        """Queue a request, or return the output that refuses one: this one, or where no more may wait, one that waits
        and whose key has more than its share of the line. Nothing a user can send raises. Requests whose prompt is one
        `Prompt` share it: its ids are looked at and its pages hashed for the first of them."""
        prompt, sampling, config = request.prompt, request.sampling, self.config
        if request.request_id in self._live:
            return _refusal(request, f"request id {request.request_id!r} is in use by a request that has not ended")
        if reason := why_impossible(request, config):
            return _refusal(request, reason)
        share = self._shares.of(request.key, request.weight)
        full = len(self._live) >= config.slots + config.queue_limit
        victim = self._rows.queue.gives_way(request.priority, share) if full and share is not None else None
        if full and victim is None:
            why_full = f"queue full: {config.slots} requests can run and {config.queue_limit} wait, and all do"
            return _refusal(request, why_full, overloaded=True)
        grammar = sampling.grammar
        if grammar is not None and (why := self._grammars.why_refused(grammar)):
            return _refusal(request, why.reason, unavailable=why.unavailable)
        sequence = Sequence(
            request=request,
            rank=(request.priority, 0.0 if share is None else NOT_SERVED, next(self._arrivals)),
            limit=min(len(prompt) + sampling.max_tokens, config.max_context),
            tokens=Tokens(Prompt.of(prompt)),
            stop_ids=frozenset(sampling.stop_ids),
            # A grammar's masks allow a stop id before min_tokens only where nothing else is allowed.
            min_total=len(prompt) + (sampling.min_tokens if grammar is None else 0),
            logprobs=sampling.logprobs,
            share=share,
            arrived=self._clock(),
        )
        self._live[request.request_id] = sequence
        if grammar is None or self._grammars.take(sequence, grammar):
            self._rows.enqueue(sequence)
        else:
            sequence.phase = Phase.COMPILING
        return None if victim is None else self._make_way(victim)

    def _make_way(self, victim: Sequence) -> RequestOutput:
        self._end(victim)
        why = "the queue is full, and other keys, or more urgent requests, have a right to this request's place in it"
        return _refusal(victim.request, why, overloaded=True)

    def grammar_work(self) -> list[CompileGrammar | ForgetGrammar]:
        """What rank 0 must be told about grammars before the next plan; each message is given once."""
        work, self._grammars.outbox = self._grammars.outbox, []
        return work

    def grammar_ready(self, message: GrammarReady) -> tuple[RequestOutput, ...]:
        """Take in what rank 0 says of a grammar: those who waited for it are queued at their old place, or refused."""
        waited = self._grammars.answered(message)
        if message.error:
            return tuple(self._refuse(sequence, f"the grammar cannot be used: {message.error}") for sequence in waited)
        for sequence in waited:
            self._rows.enqueue(sequence)
        return ()

    def expire(self) -> tuple[RequestOutput, ...]:
        """Refuse those whose grammar takes too long to compile."""
        return tuple(self._refuse(late, why.reason, why.unavailable) for late, why in self._grammars.overdue())

    def _refuse(self, sequence: Sequence, reason: str, unavailable: bool = False) -> RequestOutput:
        self._end(sequence)
        return _refusal(sequence.request, reason, unavailable=unavailable)

    def cancel(self, request_id: str) -> tuple[RequestOutput, ...]:
        """End a request now, whatever its state; its last output is returned. Unknown and ended ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return ()
        self._end(sequence)
        return (RequestOutput(request_id, (), "cancelled"),)

    def plan(self) -> StepPlan | None:
        """The next step; None while `pipeline` steps are in flight or nothing can run before a result or a request."""
        if len(self._flights) >= self.config.pipeline:
            return None
        width, drafts = self._speculation.choose(len(self._rows.decoding))
        grants: list[PageGrant] = []
        admissions: list[Admission] = []
        decode, preempted = self._plan_decode(width, grants)
        budget = self._mixed.budget(len(decode), width, self.config.token_budget - width * len(decode))
        prefilled, prefill = self._plan_prefill(budget, admissions, grants, admit=not preempted)
        if not decode and not prefill:
            return None
        self._speculation.planned(drafts)
        self._step += 1
        plan = StepPlan(
            step=self._step,
            width=width,
            drafts=drafts,
            decode_slots=tuple([sequence.slot for sequence in decode]),
            prefill=tuple(prefill),
            admissions=tuple(admissions),
            grants=tuple(grants),
            scrub=self._rows.pool.to_scrub(),
            constrained=tuple(
                [sequence.slot for sequence in decode if sequence.grammar]
                + [s.slot for s, row in zip(prefilled, prefill, strict=True) if row.final and s.grammar]
            ),
            logprobs=max(
                chain(
                    (sequence.logprobs for sequence in decode),
                    (sequence.logprobs for sequence, row in zip(prefilled, prefill, strict=True) if row.final),
                ),
                default=-1,
            ),
        )
        self._flights.append(Flight(plan, decode, prefilled))
        return plan

    def apply(self, result: StepResult) -> tuple[RequestOutput, ...]:
        """Take in a step's result; returns what its requests gained. RuntimeError for a result that does not belong to
        the oldest step in flight: scheduler and worker disagree, and nothing after it could be trusted. Unsound when
        the model gives no finite numbers for anybody."""
        flight = self._check(result)
        plan = flight.plan
        self._flights.popleft()
        outputs: list[RequestOutput] = []
        bad, stuck = self._bad_rows(flight, result), self._stuck_rows(flight, result)
        over = bad.keys() | stuck.keys()
        # Before the step's own tokens are added.
        context = 0 if plan.prefill else sum([sequence.tokens.length for sequence in flight.decode])
        offered = accepted = 0
        rows, ended = zip(flight.decode, result.tokens, strict=False), Phase.ENDED
        stood: list[tuple[Sequence, int]] = []
        for index, (sequence, tokens) in enumerate(rows):
            sequence.upper -= plan.width - len(tokens)
            if sequence.phase is not ended and not sequence.void and index not in over:  # `gains`, without a call
                output = self._gain(sequence, tokens, result, index, decoded=True)
                outputs.append(output)
                offered += plan.width - 1
                accepted += min(len(output.tokens), len(tokens) - 1)
                stood.append((sequence, len(tokens) - 1))
            self._rows.landed(sequence, sampled=True)
        self._speculation.observe(plan.width, stood, result.duration, alone=not plan.prefill)
        index, scores = len(flight.decode), iter(result.scores)
        for sequence, row in zip(flight.prefill, plan.prefill, strict=True):
            if row.scored:
                _take_scores(sequence, row, next(scores))
            if row.final:
                if sequence.gains and index not in over:
                    outputs.append(self._gain(sequence, result.tokens[index], result, index, decoded=False))
                index += 1
            self._rows.landed(sequence, sampled=row.final)
        self._counters.drafts_offered += offered
        self._counters.drafts_accepted += accepted
        prompt_tokens = sum(len(row.tokens) for row in plan.prefill)
        self._mixed.observe(len(flight.decode), plan.width, prompt_tokens, result.duration)
        self._counters.count_step(len(flight.decode), prompt_tokens, result.duration)
        if not plan.prefill:
            self._counters.decode_fed += plan.width * len(flight.decode)
            self._counters.decode_context += context
        return (*self._judge(outputs, bad), *stuck.values())

    def stats(self) -> EngineStats:
        """Gauges of now, counters since start."""
        rows = self._rows
        gauges = EngineStats(
            running=len(rows.decoding) + len(rows.prefilling),
            waiting=len(rows.queue) + self._grammars.waiting,
            prefill_backlog=rows.queue.tokens + sum(s.goal - s.cursor for s in rows.prefilling),
            pages_total=rows.pool.total,
            pages_free=rows.cache.available,
            slots=self.config.slots,
            queue_limit=self.config.queue_limit,
            preemptions=rows.preemptions,
            width=self._speculation.best,
            acceptance=self._speculation.by_position(),
            acceptance_falls=self._speculation.falls,
            bad_rows=self._soundness.bad_rows,
            prefix_keys=rows.cache.newest_keys(self.config.prefix_sample),
        )
        return self._counters.into(gauges)

    # Planning

    def _plan_decode(self, width: int, grants: list[PageGrant]) -> tuple[list[Sequence], bool]:
        """Every decode row that may still need a token, in slot order, with pages for all it may write. Also whether
        another row had to be preempted for that."""
        rows = [s for s in self._rows.decoding if s.tokens.length + s.promised < s.limit]
        reach = width + self.config.draft_margin
        preempted = False
        for sequence in sorted((s for s in rows if s.upper + reach > s.capacity), key=by_rank):
            if sequence.phase is Phase.DECODE:  # else it was preempted for one before it
                grant, others = self._rows.grow(sequence, sequence.upper + reach)
                preempted |= others
                if grant is not None:
                    grants.append(grant)
        if preempted:
            rows = [s for s in rows if s.phase is Phase.DECODE]
        for sequence in rows:
            sequence.upper += width
            sequence.promised += 1
            sequence.in_flight += 1
        return rows, preempted

    def _plan_prefill(
        self, budget: int, admissions: list[Admission], grants: list[PageGrant], admit: bool
    ) -> tuple[list[Sequence], list[PrefillRow]]:
        """Chunks of running and newly admitted prompts, by rank, until the budget is spent. When a row was just
        preempted nobody is admitted, lest the pages go round in circles. Nor when enough was admitted for one plan."""
        sequences: list[Sequence] = []
        rows: list[PrefillRow] = []
        running = deque(sorted(self._rows.prefilling, key=turn))
        looked_up = 0
        while budget > 0:
            head = self._rows.queue.head() if admit else None
            if head is not None and (not running or urgency(head) < turn(running[0])):
                newcomer = self._rows.admit()
                looked_up += pages_for(head.tokens.length)
                admit = newcomer is not None and looked_up < PLAN_PAGES
                if newcomer is None or newcomer.phase is Phase.WAITING:
                    continue
                sequence = newcomer
                admissions.append(_admission(sequence, with_tokens=self.config.reads_tokens))
                grants.append(PageGrant(sequence.slot, 0, tuple(sequence.pages.pages)))
                self._count_prompt(sequence)
            elif running:
                sequence = running.popleft()
            else:
                break
            row = self._chunk(sequence, budget)
            budget -= len(row.tokens)
            sequences.append(sequence)
            rows.append(row)
        self._rows.planned(sequences)
        return sequences, rows

    def _count_prompt(self, sequence: Sequence) -> None:
        """Count an admitted prompt, once: what a preemption makes it compute again is no new prompt."""
        if sequence.cached < 0:
            sequence.cached = sequence.paid_to = sequence.write_from
            sequence.queued = self._clock() - sequence.arrived
            self._counters.prompt_tokens += sequence.tokens.prompt.length
            self._counters.cached_tokens += sequence.cached

    def _chunk(self, sequence: Sequence, budget: int) -> PrefillRow:
        """The next chunk of a running prompt, `budget` tokens at the most."""
        start, tokens = sequence.cursor, sequence.tokens
        end = min(start + budget, sequence.goal)
        final = end == sequence.goal
        sequence.cursor = end
        if sequence.share is not None:
            sequence.pay(start)
        self._rows.filled(sequence, start)
        sequence.in_flight += 1
        if final:
            sequence.promised += 1
            self._rows.start_decoding(sequence)
        score_from = score_to = top = 0
        if sequence.unscored:
            # The last token of the prompt has none of the prompt behind it.
            score_from = min(max(sequence.scores_from - start, 0), end - start)
            score_to = max(min(end, tokens.prompt.length - 1) - start, score_from)
            top = sequence.request.sampling.prompt_logprobs
        return PrefillRow(
            slot=sequence.slot,
            start=start,
            tokens=tokens.span(start, end),
            write_from=sequence.write_from,
            final=final,
            next_token=-1 if final else tokens[end],
            score_from=score_from,
            score_to=score_to,
            score_top=top,
        )

    # Results

    def _check(self, result: StepResult) -> Flight:
        if not self._flights:
            raise RuntimeError(f"result of step {result.step}, but no step is in flight")
        flight = self._flights[0]
        plan = flight.plan
        if result.step != plan.step:
            raise RuntimeError(f"result of step {result.step}, but step {plan.step} is the oldest in flight")
        sampled = plan.layout.sampled_rows
        if len(result.tokens) != sampled:
            raise RuntimeError(f"step {plan.step} sampled {sampled} rows, its result has {len(result.tokens)}")
        decode = len(flight.decode)
        for index, tokens in enumerate(result.tokens):
            if not 1 <= len(tokens) <= (plan.width if index < decode else 1) or min(tokens) < 0:
                if not tokens and (index in result.bad or index in result.stuck):
                    continue
                raise RuntimeError(f"step {plan.step} (width {plan.width}) gave sampled row {index} tokens {tokens}")
        if plan.logprobs >= 0 and [len(row) for row in result.logprobs] != flight.logprobs_owed(result.tokens):
            raise RuntimeError(f"step {plan.step} owes one log-probability for every token of the rows that asked")
        if [part.count for part in result.scores] != [row.scored for row in plan.prefill if row.scored]:
            raise RuntimeError(f"step {plan.step} owes a score for every token of a prompt that was asked about")
        return flight

    def _gain(
        self, sequence: Sequence, tokens: tuple[int, ...], result: StepResult, index: int, *, decoded: bool
    ) -> RequestOutput:
        """A live request's tokens of a step, as a decode row or at the end of its prompt: cut at the first stop or at
        its limit; it may have ended then."""
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
                unread = self.config.drafting and not decoded and sequence.write_from > 0
                last = sequence.write_from // PAGE_TOKENS - 1 if unread else None
                self._rows.cache.vouch(sequence.pages, registered if sequence.sound else 0, last)
                sequence.sound = not unread
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
            self._end(sequence)
        name = sequence.request.request_id
        return RequestOutput(name, kept, finish, logprobs, cached, prompt=prompt, queued=queued)

    def _bad_rows(self, flight: Flight, result: StepResult) -> dict[int, RequestOutput | None]:
        """The sampled rows of a step that are bad, of requests that live, are ended or start again. The last output of
        those that are ended."""
        bad: dict[int, RequestOutput | None] = {}
        sampled = flight.sampled() if result.bad else []
        for index in result.bad:
            sequence = sampled[index]
            if not sequence.gains:
                continue
            bad[index] = None
            if may_be_a_victim(sequence):
                sequence.scores.clear()
                sequence.scored = 0
                self._rows.start_again(sequence)
                continue
            self._forget(sequence)
            self._rows.end_bad(sequence)
            bad[index] = RequestOutput(sequence.request.request_id, (), failed=BAD_LOGITS)
        return bad

    def _stuck_rows(self, flight: Flight, result: StepResult) -> dict[int, RequestOutput]:
        """The last outputs of the live requests whose grammars allowed no token, by sampled row."""
        stuck: dict[int, RequestOutput] = {}
        sampled = flight.sampled() if result.stuck else []
        for index in result.stuck:
            if (sequence := sampled[index]).gains:
                self._end(sequence)
                stuck[index] = RequestOutput(sequence.request.request_id, (), failed=STUCK, stuck=True)
        return stuck

    def _judge(self, outputs: list[RequestOutput], bad: dict[int, RequestOutput | None]) -> list[RequestOutput]:
        """What leaves the scheduler of a step's outputs and of its bad rows. The replica's own probe does not."""
        if not bad and not self._soundness.doubts:
            return outputs
        ended = [output for output in bad.values() if output is not None]
        probe_was_bad = any(output.request_id == PROBE_ID for output in ended)
        if self._soundness.observe(len(outputs), len(bad), probe_was_bad):
            sequence = probe(next(self._arrivals))
            self._live[PROBE_ID] = sequence
            self._rows.enqueue(sequence)
        if any(output.request_id == PROBE_ID for output in outputs):
            self._soundness.probed()
        return [output for output in outputs + ended if output.request_id != PROBE_ID]

    def _end(self, sequence: Sequence) -> None:
        self._forget(sequence)
        if sequence.phase is Phase.COMPILING:
            sequence.phase = Phase.ENDED
        else:
            self._rows.end(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._live[sequence.request.request_id]
        if sequence.grammar:
            self._grammars.leave(sequence)


def _refusal(request: Request, reason: str, *, overloaded: bool = False, unavailable: bool = False) -> RequestOutput:
    return RequestOutput(request.request_id, (), refused=reason, overloaded=overloaded, unavailable=unavailable)


def _admission(sequence: Sequence, *, with_tokens: bool) -> Admission:
    """What the workers must know of a request that takes a slot."""
    sampling = sequence.request.sampling
    history: tuple[int, ...] = ()
    if sampling.has_penalties:
        history = sequence.tokens.span(0, sequence.tokens.length)
    elif sequence.grammar:
        history = sequence.tokens.span(sequence.tokens.prompt.length, sequence.tokens.length)
    if sequence.grammar:
        sampling = replace(sampling, grammar=None)  # the ticket says which
    tokens = sequence.tokens.packed() if with_tokens else b""
    return Admission(sequence.slot, sampling, sequence.generated, history, sequence.grammar, tokens)


def _take_scores(sequence: Sequence, row: PrefillRow, scores: Scores) -> None:
    """What a chunk of its prompt says, unless the request has ended or starts again."""
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
    return TopLogprobs(entry.chosen, entry.ids[:count], entry.logprobs[:count])
