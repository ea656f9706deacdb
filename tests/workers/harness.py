"""A replica inside the test's own process: scheduler and runner of one rank, stepped by hand."""

from __future__ import annotations

import queue
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.processes.scheduler_process import scheduler_config
from workers.protocol.captures import CapturePortion
from workers.protocol.grammar import CompileGrammar, GrammarReady
from workers.protocol.messages import Fault, Request, RequestOutput
from workers.protocol.plan import SamplingParams, StepPlan
from workers.protocol.report import SelfTestReport
from workers.protocol.tiers import DiskMoved, DiskMoves, Moved, Moves, Pinned
from workers.rank.rank import Rank
from workers.rank.role import Role
from workers.scheduler import Scheduler


@dataclass
class Finished:
    tokens: list[int] = field(default_factory=list)
    outputs: list[RequestOutput] = field(default_factory=list)
    finish: str | None = None


class InlineEngine:
    """Runs requests to their end; plans are made ahead of results, as in the real processes."""

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device | None = None,
        group: Group | None = None,
        waiting: int | None = None,
        keeper: Path | None = None,
        role: Role = "alone",
    ) -> None:
        """`group`: of one of several ranks, each of which has a scheduler that makes the same plans. `waiting`,
        `keeper` and `role`: see `Rank`."""
        self._compiled: queue.Queue[tuple[int, str]] = queue.Queue()
        self._moved: queue.Queue[Moved | DiskMoved] = queue.Queue()
        self._news: queue.Queue[Pinned | Fault] = queue.Queue()
        self._moving = 0
        self.reports: list[SelfTestReport] = []
        self.replica = Rank(
            config,
            group or Group(),
            device or torch.device("cpu"),
            on_grammar=lambda *news: self._compiled.put(news),
            on_selftest=self.reports.append,
            on_moved=self._moved.put,
            on_tier_news=self._news.put,
            keeper=keeper,
            waiting=waiting,
            role=role,
        )
        self.runner = self.replica.runner
        self.scheduler = Scheduler(scheduler_config(config, self.replica.ready))
        if self.replica.disk is not None:
            for found in self.replica.disk.found():
                self.scheduler.disk_found(found)
        self.finished: dict[str, Finished] = {}
        self.plans: list[StepPlan] = []
        self._queue: deque[StepPlan | Moves | DiskMoves | CapturePortion] = deque()

    def add(self, request_id: str, prompt: list[int], sampling: SamplingParams, priority: int = 0) -> None:
        refusal = self.scheduler.add(Request(request_id, tuple(prompt), sampling, priority))
        assert refusal is None, refusal
        self.finished[request_id] = Finished()

    def step(self) -> bool:
        """Plan as far ahead as the scheduler allows, execute the oldest plan; False when nothing is left to do."""
        self.compile_grammars()
        while (plan := self.plan()) is not None:
            self.plans.append(plan)
        if self._moving and (not self._queue or not self._moved.empty()):
            moved = self._moved.get(timeout=60)
            if isinstance(moved, Moved):
                self.scheduler.moved(moved)
            else:
                self.scheduler.disk_moved(moved)
            self._moving -= 1
            return True
        if not self._queue:
            return False
        item = self._queue.popleft()
        if isinstance(item, StepPlan):
            self.deliver(self.scheduler.apply(self.runner.execute(item)))
        elif isinstance(item, CapturePortion):
            assert self.replica.captures is not None
            captured = self.replica.captures.capture(item)
            for _ in range(self.scheduler.config.ranks):  # the others do the same, and what they say is not heard here
                self.scheduler.captured(captured)
        else:
            self._moving += 1
            mover = self.replica.mover if isinstance(item, Moves) else self.replica.disk
            assert mover is not None
            mover.move(item)  # type: ignore[arg-type]
        return True

    def plan(self) -> StepPlan | None:
        """The next plan, behind what is to be copied before it; both are queued."""
        while not self._news.empty():
            news = self._news.get()
            assert isinstance(news, Pinned), news
            for rank in range(self.scheduler.config.ranks):
                self.scheduler.pinned(Pinned(rank, news.slots))
        if (capture := self.scheduler.capture()) is not None:
            self._queue.append(capture)
        plan = self.scheduler.plan()
        self._queue += self.scheduler.moves()
        if plan is not None:
            self._queue.append(plan)
        self.scheduler.save_pages()
        self._queue += self.scheduler.moves()
        return plan

    def compile_grammars(self) -> None:
        """Do what the scheduler says of grammars, and wait for it."""
        for work in self.scheduler.grammar_work():
            if isinstance(work, CompileGrammar):
                self.compile(work)
            else:
                assert self.replica.grammars is not None  # of rank 0
                self.replica.grammars.heed(work)

    def compile(self, work: CompileGrammar) -> None:
        """Have a grammar compiled, wait for it, and tell the scheduler."""
        assert self.replica.grammars is not None
        self.replica.grammars.heed(work)
        grammar_id, error = self._compiled.get(timeout=60)
        self.deliver(self.scheduler.grammar_ready(GrammarReady(grammar_id, error)))

    def deliver(self, outputs: tuple[RequestOutput, ...]) -> None:
        for output in outputs:
            record = self.finished[output.request_id]
            record.tokens += output.tokens
            record.outputs.append(output)
            ended = "failed" if output.failed else "refused" if output.refused else output.finish
            record.finish = ended or record.finish

    def run(self) -> dict[str, Finished]:
        while self.step():
            pass
        return self.finished

    def generate(self, prompts: list[list[int]], sampling: SamplingParams | list[SamplingParams]) -> list[list[int]]:
        params = sampling if isinstance(sampling, list) else [sampling] * len(prompts)
        names = [f"r{len(self.finished)}-{i}" for i in range(len(prompts))]
        for name, prompt, param in zip(names, prompts, params, strict=True):
            self.add(name, prompt, param)
        self.run()
        return [self.finished[name].tokens for name in names]
