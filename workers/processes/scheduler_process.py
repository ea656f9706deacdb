"""The scheduler's process: requests in, step plans out to every rank, results back, outputs to the front.

No torch, no Ray: whoever starts it (a Ray actor, a plain process) only calls `run`.
"""

from __future__ import annotations

import gc
import logging
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import zmq
from msgspec import structs

from kernels.page import PAGE_TOKENS
from workers.channel.heartbeats import AwakeClock, Pulse
from workers.channel.sockets import Binding, PeerGone, encode
from workers.config import EngineConfig
from workers.processes.inbox import Inbox
from workers.protocol.captures import PortionCaptured
from workers.protocol.grammar import GrammarProgress, GrammarReady
from workers.protocol.messages import (
    Cancel,
    Charges,
    Fault,
    Figures,
    FromWorker,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    RequestOutput,
    Shutdown,
    TakeOver,
    ToScheduler,
)
from workers.protocol.plan import StepPlan, StepResult, token_buckets
from workers.protocol.report import SelfTestReport
from workers.protocol.tiers import DiskFound, DiskMoved, Moved, Moves, Pinned
from workers.recording.file import Recorder
from workers.scheduler import Scheduler, SchedulerConfig, Unsound, step_limit

logger = logging.getLogger(__name__)

STATS_PERIOD_S = 0.1
POLL_MS = 50
DAY_S, HOUR_S = 86400.0, 3600.0
SAVED_UP_BYTES = 1 << 30
"""May be written to a disk at once, however few of a day."""
DISK_BYTES_PER_S = 1e9
"""That a disk is taken to read where nothing was read yet, for how many pages are read at once: less than most can."""
_NEVER = 2**31 - 1
"""As the collector's third threshold: the largest that it takes."""
FIRST_CAUSE_WAIT_S = 0.2
ITERATION_TIMEOUTS = 3
"""An iteration of the loop may take so many times `heartbeat_timeout_s`. None comes near that by itself: what an
iteration takes in is bounded (`workers.processes.inbox`), and so is what it plans. But a machine may be busy with other
things."""


def collect_young_garbage_alone() -> None:
    """Let Python's collector of cyclic garbage pass over what was imported, and over objects that have grown old, for
    the rest of this process: no step waits while they are searched. Of 400,000 cached pages that would take 0.2 s
    (`bench/prefix_cache.py`); they leave no cyclic garbage, and what else does is young."""
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _NEVER)


class EngineFailed(RuntimeError):
    """The replica cannot go on; the message is the first cause."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.cause)
        self.fault = fault


class SchedulerProcess:
    """Owns the scheduler of one replica and the channel's bound end."""

    def __init__(
        self, config: EngineConfig, host: str | None = None, folder: Path | None = None, *, standby: bool = False
    ) -> None:
        """Binds at once, so that `addresses` can be handed out. `host`: ip of this node when workers are on others;
        otherwise sockets are files in `folder`, by default a fresh one. `standby`: its ranks stand by."""
        self._config, self._stands_by = config, standby
        self._longest_s = config.longest_step_s
        self._ranks = config.mesh().world.size
        self._binding = Binding(self._ranks, host, ToScheduler, FromWorker, folder)
        self.addresses = self._binding.addresses
        self._clock = AwakeClock()
        self._heard = [self._clock.time] * self._ranks
        self._launched: dict[int, float] = {}
        self._moving: dict[int, float] = {}
        """By ticket: since when pages are copied."""
        self._capturing_since: float | None = None
        self._figures: Figures = {}
        self._recorder: Recorder | None = None

    def run(self) -> None:
        """Serve until a Shutdown arrives. On a failure tells the front the first cause, then raises EngineFailed."""
        pulse = Pulse(self._binding.pulse, ITERATION_TIMEOUTS * self._config.heartbeat_timeout_s)
        try:
            scheduler = self._start(pulse, self._config.start_timeout_s)
            while scheduler is not None and self._serve(scheduler, pulse):
                # Nothing of what it did while it stood by is known to the scheduler that serves.
                self._stands_by = False
                self._launched.clear()
                scheduler = self._start(pulse, self._longest_s)
        except EngineFailed as failure:
            self._tell_front(failure.fault)
            raise
        except Unsound as unsound:
            fault = Fault(str(unsound), in_step=True)
            self._tell_front(fault)
            raise EngineFailed(fault) from None
        except PeerGone as gone:
            fault = self._first_cause(Fault(str(gone), secondary=True))  # it may have said why it leaves
            self._tell_front(fault)
            raise EngineFailed(fault) from None
        except Exception as error:
            self._tell_front(Fault(f"scheduler: {type(error).__name__}: {error}", in_step=True))
            raise
        finally:
            pulse.close()
            if self._recorder is not None:
                self._recorder.close()
            for plans in self._binding.plans:
                with suppress(PeerGone):
                    plans.send(Shutdown())
            self._binding.close()

    def _tell_front(self, fault: Fault) -> None:
        with suppress(PeerGone):
            self._binding.outputs.send(fault)

    def _start(self, pulse: Pulse, limit_s: float) -> Scheduler | None:
        """Wait until every rank is ready; None when told to shut down meanwhile. What else ranks say is of earlier
        steps, and is dropped."""
        config = self._config
        ready: dict[int, Ready] = {}
        early: list[DiskFound | Pinned] = []
        deadline = time.monotonic() + limit_s
        while len(ready) < self._ranks:
            pulse.begin_iteration()
            message = self._binding.results.receive(timeout_ms=POLL_MS)
            match message:
                case Ready():
                    ready[message.rank] = message
                    self._heard[message.rank] = self._clock.look()
                case DiskFound() | Pinned():
                    early.append(message)
                case Fault():
                    raise EngineFailed(self._first_cause(message))
                case Progress() | SelfTestReport():
                    self._binding.outputs.send(message)
            if isinstance(self._binding.requests.receive(timeout_ms=0), Shutdown):
                return None
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._ranks)) - set(ready))
                raise EngineFailed(Fault(f"ranks {missing} were not ready within {limit_s:.0f} s"))
        first = ready[0]
        if any(
            (r.pages, r.max_context, r.width) != (first.pages, first.max_context, first.width) for r in ready.values()
        ):
            held = sorted(ready.values(), key=lambda r: r.rank)
            raise EngineFailed(Fault(f"ranks disagree on what they hold: {held}"))
        if other := [rank for rank, told in sorted(ready.items()) if told.root != first.root]:
            raise EngineFailed(
                Fault(
                    f"ranks {other} have loaded another model than rank 0, or compute it otherwise: see that "
                    f"{self._config.folder} is the same on all nodes, and that their software and GPUs are",
                    lasting=True,
                )
            )
        self._record(first)
        self._heard = [self._clock.look()] * self._ranks
        self._binding.outputs.send(
            Ready(
                *(-1, first.pages, first.max_context, first.vocab_size, first.width, first.eos_ids),
                root=first.root,
                cache_shards=first.cache_shards,
                start_s=first.start_s,
            )
        )
        scheduler = Scheduler(scheduler_config(config, first))
        for message in early:
            self._from_worker(scheduler, message)
        return scheduler

    def _record(self, ready: Ready) -> None:
        """Record step plans from now on, if that is asked for."""
        if self._config.record_plans is None or self._stands_by:
            return
        try:
            self._recorder = Recorder(self._config, ready)
        except OSError as error:
            cause = f"record_plans: cannot write {self._config.record_plans}: {error.strerror}"
            raise EngineFailed(Fault(cause, lasting=True)) from None
        self._binding.outputs.send(Progress(-1, f"step plans are recorded in {self._recorder.path}"))

    def _serve(self, scheduler: Scheduler, pulse: Pulse) -> bool:
        """Serve until told to shut down, or to take the place of the engine that served: then ranks know, and this
        returns True."""
        requests, results = self._binding.requests, self._binding.results
        inbox = Inbox(requests)
        poller = zmq.Poller()
        poller.register(requests.socket, zmq.POLLIN)
        poller.register(results.socket, zmq.POLLIN)
        stats_due = 0.0
        while True:
            patience_ms = math.ceil(1e3 * scheduler.patience_s(POLL_MS / 1e3))
            poller.poll(0 if inbox.waiting else patience_ms)
            pulse.begin_iteration()
            items: list[RequestOutput] = []
            while (message := results.receive(timeout_ms=0)) is not None:
                items += self._from_worker(scheduler, message)
            # Here, where all that ranks have said is heard: an iteration may have taken longer than they may be silent.
            self._watch(scheduler, self._clock.look())
            for asked in inbox.take():
                match asked:
                    case Request():
                        if (refusal := scheduler.add(asked)) is not None:
                            items.append(refusal)
                    case Cancel():
                        items += scheduler.cancel(asked.request_id)
                    case Charges():
                        scheduler.charged_elsewhere(asked)
                    case TakeOver():
                        if not self._stands_by:
                            raise EngineFailed(Fault("an engine that serves was told to take the place of another"))
                        for sender in self._binding.plans:
                            sender.send(asked)
                        return True
                    case Shutdown():
                        return False
            items += scheduler.expire()
            for work in scheduler.grammar_work():
                self._binding.plans[0].send(work)
            # Plans first: workers start on them while the outputs are encoded.
            while (plan := self._planned(scheduler)) is not None:
                if self._recorder is not None:
                    self._recorder.plan(plan)
                payload = encode(plan)
                for sender in self._binding.plans:
                    sender.send_encoded(payload)
                self._launched[plan.step] = self._clock.look()
            if items:
                self._binding.outputs.send(Outputs(tuple(items)))
            scheduler.save_pages()
            self._send_moves(scheduler)
            now = time.monotonic()
            if now >= stats_due:
                self._binding.outputs.send(structs.replace(scheduler.stats(), worker=self._figures))
                if (charges := scheduler.charges()) is not None:
                    self._binding.outputs.send(charges)
                stats_due = now + STATS_PERIOD_S

    def _planned(self, scheduler: Scheduler) -> StepPlan | None:
        """The next plan. Ranks are told before it of pages to copy, which it may give to others."""
        if (capture := scheduler.capture()) is not None:
            payload = encode(capture)
            for sender in self._binding.plans:
                sender.send_encoded(payload)
            self._capturing_since = self._clock.look()
        plan = scheduler.plan()
        self._send_moves(scheduler)
        return plan

    def _send_moves(self, scheduler: Scheduler) -> None:
        for moves in scheduler.moves():
            payload = encode(moves)
            for sender in self._binding.plans:
                sender.send_encoded(payload)
            if isinstance(moves, Moves):  # nobody waits for a disk
                self._moving[moves.ticket] = self._clock.look()

    def _from_worker(self, scheduler: Scheduler, message: FromWorker) -> tuple[RequestOutput, ...]:
        match message:
            case StepResult():
                self._launched.pop(message.step, None)
                if self._launched:
                    # The next step only starts now: its time does not count while it waited.
                    oldest = min(self._launched)
                    self._launched[oldest] = self._clock.look()
                self._heard[0] = self._clock.look()
                if self._recorder is not None:
                    self._recorder.result(message)
                return scheduler.apply(message)
            case Moved():
                self._heard[message.rank] = self._clock.look()
                if scheduler.moved(message):
                    del self._moving[message.ticket]
            case Pinned():
                self._heard[message.rank] = self._clock.look()
                scheduler.pinned(message)
            case DiskMoved():
                self._heard[message.rank] = self._clock.look()
                scheduler.disk_moved(message)
            case DiskFound():
                scheduler.disk_found(message)
            case PortionCaptured():
                self._heard[message.rank] = self._clock.look()
                scheduler.captured(message)
                if not scheduler.capturing:
                    self._capturing_since = None
                    self._launched = dict.fromkeys(self._launched, self._clock.look())  # their time begins now
            case Progress() | SelfTestReport():
                self._binding.outputs.send(message)
            case GrammarReady():
                return scheduler.grammar_ready(message)
            case GrammarProgress():
                scheduler.grammar_progress(message)
            case Heartbeat():
                self._heard[message.rank] = self._clock.look()
                if message.rank == 0:
                    self._figures = message.figures
            case Fault():
                raise EngineFailed(self._first_cause(message))
        return ()

    def _first_cause(self, fault: Fault) -> Fault:
        """A failed collective is the echo of something else: give that a moment to be reported."""
        deadline = time.monotonic() + FIRST_CAUSE_WAIT_S
        while fault.secondary and (left := deadline - time.monotonic()) > 0:
            message = self._binding.results.receive(timeout_ms=int(left * 1000) + 1)
            if isinstance(message, Fault) and not message.secondary:
                return message
        return fault

    def _watch(self, scheduler: Scheduler, now: float) -> None:
        config, longest_s = self._config, self._longest_s
        for rank, heard in enumerate(self._heard):
            if now - heard > config.heartbeat_timeout_s:
                raise EngineFailed(Fault(f"rank {rank} has been silent for {now - heard:.1f} s", rank))
        if self._capturing_since is not None:
            waited = now - self._capturing_since
            if waited > longest_s:
                raise EngineFailed(Fault(f"a capture of graphs has not ended for {waited:.0f} s"))
        elif self._launched:
            waited = now - self._launched[min(self._launched)]
            limit_s = longest_s
            # While it stands by, the GPU is busy with the engine that serves, and nobody waits for it. Without graphs
            # nothing is compiled ahead: any step may have kernels to compile, one after the other.
            by_measure = config.step_timeout_s == "auto" and config.graphs and not self._stands_by
            if by_measure and waited > step_limit.LEAST_S:
                limit_s = min(longest_s, scheduler.step_limit_s or longest_s)
            if waited > limit_s:
                cause = f"step {min(self._launched)} made no progress for {waited:.0f} s"
                raise EngineFailed(Fault(cause, in_step=True))
        if self._moving:
            ticket = min(self._moving)
            waited = now - self._moving[ticket]
            if waited > longest_s:
                raise EngineFailed(Fault(f"a copy of cached pages (ticket {ticket}) has not ended for {waited:.0f} s"))


def scheduler_config(config: EngineConfig, ready: Ready) -> SchedulerConfig:
    """The scheduler's settings, from the replica's and from what its workers can hold."""
    return SchedulerConfig(
        slots=config.max_rows,
        pages=ready.pages,
        max_context=ready.max_context,
        token_budget=config.token_budget,
        width=ready.width,
        adaptive=config.width == "auto",
        step_times=ready.step_times,
        token_buckets=token_buckets(config.token_budget),
        queue_limit=config.queue_limit,
        prefix_cache=config.prefix_cache and ready.shares_prefixes,
        snapshots=ready.snapshots,
        snapshot_tokens=ready.snapshot_tokens or PAGE_TOKENS,
        vocab_size=ready.vocab_size,
        mixed_step_target_s=None if config.mixed_step_target_ms is None else config.mixed_step_target_ms / 1e3,
        grammar_timeout_s=config.grammar_compile_timeout_s,
        draft_cache=ready.draft_cache,
        reads_tokens=ready.reads_tokens,
        host_pages=ready.host_pages,
        pins_pages=ready.pins_pages,
        save_batch=ready.save_batch,
        savers=ready.savers,
        cache_shards=ready.cache_shards,
        in_pieces=config.invariant,
        ranks=config.mesh().world.size,
        root=ready.root,
        portions=ready.portions,
        **_disk(config, ready),
    )


def _disk(config: EngineConfig, ready: Ready) -> dict[str, Any]:
    """The scheduler's settings of the disk, in pages."""
    if not ready.disk_pages:
        return {}
    writes_per_s = config.disk_writes_per_day / DAY_S / ready.record_bytes
    return {
        "disk_pages": ready.disk_pages,
        "disk_serial": ready.disk_serial,
        "disk_writes_per_s": writes_per_s,
        "disk_writes_saved_up": max(writes_per_s * HOUR_S, SAVED_UP_BYTES / ready.record_bytes) if writes_per_s else 0,
        "disk_page_s": ready.record_bytes / DISK_BYTES_PER_S,
    }
