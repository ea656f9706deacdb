"""Plans the steps of one replica ahead of their results."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable
from itertools import chain

from msgspec.structs import replace

from kernels.page import pages_for
from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.grammar import CompileGrammar, ForgetGrammar, GrammarProgress, GrammarReady
from workers.protocol.messages import Charges, EngineStats, Request, RequestOutput
from workers.protocol.plan import Admission, PageGrant, PrefillRow, StepPlan, StepResult
from workers.protocol.request import Prompt, pack_keys, salted_root
from workers.protocol.tiers import DiskFound, DiskMoved, DiskMoves, Moved, Moves, Pinned
from workers.scheduler.captures import Captures
from workers.scheduler.config import SchedulerConfig, why_impossible
from workers.scheduler.grammars import Grammars
from workers.scheduler.prompt_budget import MixedTarget, PromptBudget, PromptSpeed
from workers.scheduler.queue import NOT_SERVED, Arrivals, Shares, turn, urgency
from workers.scheduler.results import Counters, Live, Results, check
from workers.scheduler.rows import Rows, by_rank
from workers.scheduler.sequence import Flight, Phase, Sequence, Tokens
from workers.scheduler.speculation import Speculation
from workers.scheduler.step_limit import StepLimit

PLAN_PAGES = 16_384
"""Pages of prompts that a plan looks up before it admits nobody more, some ten milliseconds of work: hundreds of
choices of one long cached prompt feed few tokens each, and would otherwise be admitted in one plan."""
PATIENCE = 8
"""Plans in a row for which a prompt is left out that would find room for a few tokens alone."""


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
        self._counters = Counters()
        self._prompt_speed = PromptSpeed()
        self._rows = Rows(config, clock, self._prompt_speed.token_s)
        self._speculation = Speculation(config)
        self._mixed = MixedTarget(config, self._speculation.times)
        self._step_limit = StepLimit(config.step_times)
        self._captures = Captures(config.portions, self._rows.cache, config.slots, config.ranks, clock)
        self._grammars = Grammars(config.grammar_timeout_s)
        self._shares = Shares(clock)
        self._arrivals = Arrivals(clock)
        self._live = Live(self._rows, self._grammars)
        self._results = Results(self._live, self._rows, self._counters, self._arrivals, drafting=config.drafting)
        self._flights: deque[Flight] = deque()
        self._step = 0
        self._left_out = 0
        """Plans in a row that left out a prompt though there was some room."""

    @property
    def idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        return not self._live and not self._flights

    def add(self, request: Request) -> RequestOutput | None:
        """Queue a request, or return the output that refuses one: this one, or where no more may wait, one that waits
        and whose key has more than its share of the line. Nothing a user can send raises. Requests whose prompt is one
        `Prompt` share it: its ids are looked at and its pages hashed for the first of them.

        A request that another engine had before (`Request.age_s`) is never refused for the length of the queue. What
        was done of it stands: it goes on as if it had been preempted here, and its prompt is neither counted nor
        charged to its key nor scored again."""
        prompt, sampling, config = request.prompt, request.sampling, self.config
        if request.request_id in self._live:
            return _refusal(request, f"request id {request.request_id!r} is in use by a request that has not ended")
        if reason := why_impossible(request, config):
            return _refusal(request, reason)
        share = self._shares.of(request.key, request.weight)
        full = request.age_s is None and len(self._live) >= config.slots + config.queue_limit
        victim = self._rows.queue.gives_way(request.priority, share) if full and share is not None else None
        if full and victim is None:
            why_full = f"queue full: {config.slots} requests can run and {config.queue_limit} wait, and all do"
            return _refusal(request, why_full, overloaded=True)
        grammar = sampling.grammar
        if grammar is not None and (why := self._grammars.why_refused(grammar)):
            return _refusal(request, why.reason, unavailable=why.unavailable)
        arrived = self._clock() - (request.age_s or 0.0)
        sequence = Sequence(
            request=request,
            rank=(request.priority, 0.0 if share is None else NOT_SERVED, self._arrivals.number(arrived)),
            limit=min(len(prompt) + sampling.max_tokens, config.max_context),
            tokens=Tokens(Prompt.of(prompt), request.done, salted_root(config.root, request.salt)),
            stop_ids=frozenset(sampling.stop_ids),
            # A grammar's masks allow a stop id before min_tokens only where nothing else is allowed.
            min_total=len(prompt) + (sampling.min_tokens if grammar is None else 0),
            logprobs=sampling.logprobs,
            share=share,
            arrived=arrived,
        )
        if request.done:
            sequence.go_on()
        self._live[request.request_id] = sequence
        if grammar is None or self._grammars.take(sequence, grammar):
            self._rows.enqueue(sequence)
        else:
            sequence.phase = Phase.COMPILING
        return None if victim is None else self._make_way(victim)

    def _make_way(self, victim: Sequence) -> RequestOutput:
        self._live.end(victim)
        why = "the queue is full, and other keys, or more urgent requests, have a right to this request's place in it"
        return _refusal(victim.request, why, overloaded=True)

    def charges(self) -> Charges | None:
        """Return the tokens computed for API keys since the last call, for other replicas; None if there were none."""
        return self._shares.news()

    def charged_elsewhere(self, charges: Charges) -> None:
        """Keys pay for what other replicas computed for them."""
        ahead = self._shares.ahead()
        for charge in charges.items:
            if (share := self._shares.of(charge.key, charge.weight)) is not None:
                self._rows.queue.served_elsewhere(share, charge.tokens, ahead)

    def grammar_work(self) -> list[CompileGrammar | ForgetGrammar]:
        """Return the messages about grammars that rank 0 needs before the next plan; each is given once."""
        work, self._grammars.outbox = self._grammars.outbox, []
        return work

    def grammar_progress(self, message: GrammarProgress) -> None:
        """Take in how long a grammar has been worked on: whether it is to blame when it is late."""
        self._grammars.progressed(message)

    def grammar_ready(self, message: GrammarReady) -> tuple[RequestOutput, ...]:
        """Take in what rank 0 says of a grammar: those who waited for it are queued at their old place, or refused."""
        waited = self._grammars.answered(message)
        if message.error:
            return tuple(self._refuse(sequence, f"the grammar cannot be used: {message.error}") for sequence in waited)
        for sequence in waited:
            self._rows.enqueue(sequence)
        return ()

    def expire(self) -> tuple[RequestOutput, ...]:
        """Refuse those whose grammar takes too long to compile. Those whose pages the disk takes too long to read wait
        for it no longer."""
        self._rows.wait_no_longer()
        return tuple(self._refuse(late, why.reason, why.unavailable) for late, why in self._grammars.overdue())

    def _refuse(self, sequence: Sequence, reason: str, unavailable: bool = False) -> RequestOutput:
        self._live.end(sequence)
        return _refusal(sequence.request, reason, unavailable=unavailable)

    def cancel(self, request_id: str) -> tuple[RequestOutput, ...]:
        """End a request now, whatever its state; its last output is returned. Unknown and ended ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return ()
        self._live.end(sequence)
        return (RequestOutput(request_id, (), "cancelled"),)

    def plan(self) -> StepPlan | None:
        """The next step; None while `pipeline` steps are in flight or nothing can run before a result or a request."""
        if len(self._flights) >= self.config.pipeline:
            return None
        width, drafts = self._speculation.choose(len(self._rows.decoding))
        grants: list[PageGrant] = []
        admissions: list[Admission] = []
        decode, preempted = self._schedule_decode(width, grants)
        prompt_budget = self._mixed.prompt_budget(len(decode), width, self.config.token_budget - width * len(decode))
        prefilled, prefill = self._plan_prefill(prompt_budget, admissions, grants, admit=not preempted)
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
            zero_fill=self._rows.pool.to_zero_fill(),
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

    def save_pages(self) -> None:
        """Let complete pages be copied to host memory and disk, as `moves` says then. To be called when plans and
        outputs are on their way: it takes some ten microseconds a page."""
        if self._rows.tier is not None:
            self._rows.tier.save()
        if self._rows.disk is not None:
            self._rows.disk.turn()

    def moves(self) -> list[Moves | DiskMoves]:
        """What every rank must be told now of pages in host memory and on disk, before the next plan; each message is
        given once."""
        if self._rows.tier is None:
            return []
        moves: list[Moves | DiskMoves] = [*self._rows.tier.take_moves()]
        if self._rows.disk is not None:
            moves += self._rows.disk.take_moves()
        return moves

    def capture(self) -> CapturePortion | None:
        """What every rank must be told now of graphs that are still to be captured, before the next plan; None where
        nothing is due. The message is given once."""
        return self._captures.next(idle=self.idle)

    @property
    def capturing(self) -> bool:
        """Whether ranks capture graphs at present: then no step runs."""
        return self._captures.under_way

    def captured(self, message: PortionCaptured) -> None:
        """Take in that a rank has captured graphs. RuntimeError for an answer that nobody waits for."""
        self._captures.captured(message)
        if message.step_times:
            self._speculation.measured(message.step_times)
            measured = dataclasses.replace(self.config, step_times=message.step_times)
            self._mixed = MixedTarget(measured, self._speculation.times)
            self._step_limit = StepLimit(message.step_times)

    @property
    def step_limit_s(self) -> float | None:
        """Seconds until the oldest step in flight is to have its result; None where nothing says so, as while graphs
        are still to be captured, and steps run without them, or where rows have grammars, whose masks take as long as
        they take. Steps behind it count, too: ranks launch one before they tell the result of the one before, and may
        have to wait meanwhile, for a mask, or until the device has room for more launches."""
        if self._captures.left or self._captures.under_way or any(flight.plan.constrained for flight in self._flights):
            return None
        limits = [self._limit_s(flight) for flight in self._flights]
        known = [limit_s for limit_s in limits if limit_s is not None]
        return max(known) if known and len(known) == len(limits) else None

    def _limit_s(self, flight: Flight) -> float | None:
        ends = [row.start + len(row.tokens) for row in flight.plan.prefill]
        deepest = max(chain(ends, (sequence.tokens.length for sequence in flight.decode)))
        return self._step_limit.seconds(deepest, prompts=bool(flight.prefill))

    def moved(self, message: Moved) -> bool:
        """Take in that a rank has copied pages, and return whether all ranks have now. RuntimeError for an answer that
        nobody waits for."""
        return self._rows.moved(message)

    def pinned(self, message: Pinned) -> None:
        """Take in how much of host memory a rank can copy to and from."""
        if self._rows.tier is not None:
            self._rows.tier.pinned(message)

    def disk_moved(self, message: DiskMoved) -> None:
        """Take in that a rank has copied pages to or from the disk. RuntimeError for an answer that nobody waits
        for."""
        self._rows.read(message)

    def disk_found(self, message: DiskFound) -> None:
        """Take in what was on disk at the start."""
        if self._rows.disk is not None:
            self._rows.disk.found(message)

    def patience_s(self, most: float) -> float:
        """Seconds after which `expire`, `plan` or `save_pages` is to be called though nothing came, `most` at the
        most."""
        disk = self._rows.disk
        if self._rows.put_off and len(self._flights) < self.config.pipeline:
            return 0.0
        if disk is None:
            return most
        patience = 0.0 if disk.busy else disk.patience_s
        return most if patience is None else min(patience, most)

    def apply(self, result: StepResult) -> tuple[RequestOutput, ...]:
        """Take in a step's result; returns what its requests gained. RuntimeError for a result that does not belong to
        the oldest step in flight: scheduler and worker disagree, and nothing after it could be trusted. Unsound when
        the model gives no finite numbers for anybody."""
        if not self._flights:
            raise RuntimeError(f"result of step {result.step}, but no step is in flight")
        flight = self._flights[0]
        check(flight, result)
        self._flights.popleft()
        self._captures.step_ended()
        outputs, accepted_drafts = self._results.take(flight, result)
        plan = flight.plan
        chunks = [(row.start, len(row.tokens)) for row in plan.prefill]
        self._speculation.observe(plan.width, accepted_drafts, result.duration, alone=not plan.prefill)
        self._mixed.observe(len(flight.decode), plan.width, chunks, result.duration)
        prompt_tokens = sum(count for _, count in chunks)
        self._counters.count_step(len(flight.decode), prompt_tokens, result.duration)
        self._prompt_speed.observe(prompt_tokens, result.duration)
        return tuple(outputs)

    def stats(self) -> EngineStats:
        """Gauges of now, counters since start."""
        rows, tier, disk = self._rows, self._rows.tier, self._rows.disk
        loading = rows.loading
        gauges = EngineStats(
            running=len(rows.decoding) + len(rows.prefilling),
            waiting=len(rows.queue) + self._grammars.waiting + len(loading),
            prefill_backlog=rows.queue.tokens
            + sum(s.tokens.length for s in loading)
            + sum(s.goal - s.cursor for s in rows.prefilling),
            pages_total=rows.pool.total,
            cache_shards=self.config.cache_shards,
            pages_free=rows.cache.available,
            slots=self.config.slots,
            queue_limit=self.config.queue_limit,
            preemptions=rows.preemptions,
            width=self._speculation.best,
            acceptance=self._speculation.by_position(),
            acceptance_falls=self._speculation.falls,
            bad_rows=self._results.bad_rows,
            prefix_keys=pack_keys(rows.cache.report()),
            key_root=self.config.root,
        )
        if tier is not None:
            counted = tier.counters
            gauges = replace(
                gauges,
                host_pages_total=tier.usable,
                host_pages=tier.held,
                host_saved_pages=counted.saved,
                host_keys=pack_keys(tier.report()),
                host_loaded_pages=counted.loaded,
                host_load_seconds=counted.load_seconds,
                host_dropped_pages=counted.dropped,
                host_lost_pages=counted.lost,
            )
        if disk is not None:
            gauges = replace(
                gauges,
                disk_pages_total=0 if disk.failed else disk.index.slots,
                disk_pages=0 if disk.failed else disk.index.held,
                disk_keys=pack_keys(disk.report()),
                disk_saved_pages=disk.counters.saved,
                disk_loaded_pages=disk.counters.loaded,
                disk_load_seconds=disk.counters.load_seconds,
                disk_dropped_pages=disk.counters.dropped,
                disk_lost_pages=disk.counters.lost,
                disk_late_loads=disk.counters.late,
            )
        return self._counters.into(gauges)

    # Planning

    def _schedule_decode(self, width: int, grants: list[PageGrant]) -> tuple[list[Sequence], bool]:
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
        self, prompt_budget: PromptBudget, admissions: list[Admission], grants: list[PageGrant], admit: bool
    ) -> tuple[list[Sequence], list[PrefillRow]]:
        """Chunks of running and newly admitted prompts, by rank, until there is no room. When a row was just
        preempted nobody is admitted, lest the pages go round in circles. Nor when enough was admitted for one plan. Who
        would find room for a few tokens alone is left out, with all behind it, but not for many plans in a row."""
        self._rows.begin_plan()
        sequences: list[Sequence] = []
        rows: list[PrefillRow] = []
        left_out = False

        def suits(before: int, left: int) -> bool:
            nonlocal left_out
            if not rows or prompt_budget.suits(before, left):
                return True
            if self._left_out >= PATIENCE:
                prompt_budget.insist()
                return True
            left_out = True
            return False

        running = deque(sorted(self._rows.prefilling, key=turn))
        looked_up = 0
        while prompt_budget.open:
            head = self._rows.queue.head() if admit else None
            if head is not None and (not running or urgency(head) < turn(running[0])):
                newcomer = self._rows.admit(suits)
                looked_up += pages_for(head.tokens.length)
                admit = newcomer is not None and looked_up < PLAN_PAGES
                if newcomer is None or newcomer.phase is not Phase.PREFILL:
                    continue
                sequence = newcomer
                admissions.append(_admission(sequence, with_tokens=self.config.reads_tokens))
                grants.append(PageGrant(sequence.slot, 0, tuple(sequence.pages.pages)))
                self._count_prompt(sequence)
            elif running and suits(running[0].cursor, running[0].goal - running[0].cursor):
                sequence = running.popleft()
            else:
                break
            row = self._chunk(sequence, prompt_budget.tokens(sequence.cursor, sequence.goal - sequence.cursor))
            prompt_budget.take(row.start, len(row.tokens))
            sequences.append(sequence)
            rows.append(row)
        self._rows.planned(sequences)
        self._left_out = self._left_out + 1 if left_out else 0
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
        if sequence.saves:
            end = min(end, sequence.saves[0])
        final = end == sequence.goal
        sequence.cursor = end
        if sequence.share is not None:
            sequence.pay(start)
        self._rows.filled(sequence, start)
        restore, sequence.restore = sequence.restore, -1
        save = self._rows.save(sequence)
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
            restore=restore,
            save=save,
        )


def _refusal(request: Request, reason: str, *, overloaded: bool = False, unavailable: bool = False) -> RequestOutput:
    return RequestOutput(request.request_id, (), refused=reason, overloaded=overloaded, unavailable=unavailable)


def _admission(sequence: Sequence, *, with_tokens: bool) -> Admission:
    """Return the message that admits a request to a slot of the workers."""
    sampling = sequence.request.sampling
    history: tuple[int, ...] = ()
    if sampling.has_penalties:
        history = sequence.tokens.span(0, sequence.tokens.length)
    elif sequence.grammar:
        history = sequence.tokens.span(sequence.tokens.prompt.length, sequence.tokens.length)
    if sequence.grammar:
        sampling = replace(sampling, grammar=None)  # the grammar id says which
    tokens = sequence.tokens.packed() if with_tokens else b""
    return Admission(sequence.slot, sampling, sequence.generated, history, sequence.grammar, tokens)
