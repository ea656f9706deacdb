"""Runs a schedule on an engine and holds every answer against the reference."""

from __future__ import annotations

import math
import random
import shutil
from collections import Counter, deque
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from kernels.page import PAGE_TOKENS
from tests.tiny_draft_models import write_draft
from tests.tiny_models import write_tiny
from tests.workers.harness import Finished, InlineEngine
from tests.workers.model_based.followers import Ranks, strike
from tests.workers.model_based.grammars import write_tokenizer
from tests.workers.model_based.reference_engine import NO_CAUSE, Reference
from tests.workers.model_based.schedules import MAX_CONTEXT, POISON, VOCAB, Add, Apply, Cancel, Mishap, Plan, Schedule
from workers.config import EngineConfig
from workers.protocol.grammar import CompileGrammar, ForgetGrammar
from workers.protocol.messages import Request
from workers.protocol.plan import StepPlan
from workers.protocol.tiers import DiskMoved, DiskMoves, Moved, Moves
from workers.scheduler import SchedulerConfig
from workers.scheduler.speculation import Speculation
from workers.tiers.disk_files import HEADER_BYTES
from workers.tiers.mover import record_layout

DRAFT_MODELS: dict[str, dict[str, Any]] = {
    "gqa": {"draft_vocab": 40, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 0, 0]}},
    "mla": {"eagle_aux_hidden_state_layer_ids": [1, 0, 1]},
}
"""EAGLE-3 in both layouts."""
Begun = tuple[Request, Finished]
"""A request, and what an engine gave of it before it died."""
MOST_STEPS = 5000
"""A schedule that takes more does not end."""


class RandomWidths(Speculation):
    """Draws width and drafts of every plan. A plan's width is at most one more than the drafts that the one before
    makes."""

    def __init__(self, config: SchedulerConfig, seed: int) -> None:
        super().__init__(config)
        self._rng = random.Random(seed)

    def choose(self, rows: int) -> tuple[int, int]:
        return 1 + self._rng.randint(0, self._made), self._rng.randint(0, self._most - 1)


@dataclass
class Outcome:
    """Findings of a run."""

    problem: str = ""
    """The first thing that is wrong; empty when nothing is."""
    steps: int = 0
    seen: Counter[str] = field(default_factory=Counter)


class Bench:
    """A tiny model on the disk, its reference, and schedules run on engines of it."""

    def __init__(self, folder: Path, kind: str = "v3", ranks: Ranks | None = None, **overrides: Any) -> None:
        """`kind`, `overrides`: see `write_tiny`. `ranks`: on which engines run; None: they have one."""
        self.ranks = ranks
        self.folder, self.drafts = self._written(folder, kind, overrides)
        self.reference = Reference(self.folder, MAX_CONTEXT)
        write_tokenizer(self.folder)
        self._grammars: Any = None
        self._records: dict[str, int] = {}
        """Bytes of a page of all caches, by what drafts."""
        self._disks = count()

    def _written(self, folder: Path, kind: str, overrides: dict[str, Any]) -> tuple[Path, dict[str, Path]]:
        """The folder of the model, in which token `POISON` is not finite, and those of its draft models by kind."""
        model = write_tiny(folder, kind, seed=3, num_hidden_layers=2, vocab_size=VOCAB, **overrides)
        tensors = load_file(model / "model.safetensors")
        tensors["model.embed_tokens.weight"][POISON] = torch.nan
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
        drafts = {
            kind: write_draft(folder / kind, kind, hidden_size=48, vocab_size=VOCAB, **values)
            for kind, values in DRAFT_MODELS.items()
        }
        return model, drafts

    @property
    def size(self) -> int:
        """Ranks of its engines."""
        return 1 if self.ranks is None else self.ranks.size

    def engine(self, schedule: Schedule) -> InlineEngine:
        """A fresh replica."""
        settings = dict(schedule.engine)
        if "draft_model" in settings:
            settings["draft_model"] = str(self.drafts[settings["draft_model"]])
        host, disk, shards = (settings.pop(name, 0) for name in ("host_pages", "disk_pages", "shards"))
        if self.size > 1 and schedule.engine.get("draft_model") == "gqa":
            host = 0  # a start is refused
        if host and settings["prefix_cache"]:
            record = self._record(settings)
            settings["host_cache_bytes"] = host * record
            if disk:
                settings["disk_cache_bytes"] = disk * (record + HEADER_BYTES)
                settings["disk_cache_dir"] = str(self.folder.parent / f"disk {next(self._disks)}")
        run = self._started(settings, shards)
        make_tiers_predictable(run)
        if run.scheduler.config.width > 1 and hasattr(run.runner.parts.drafter, "logits"):
            self._never_draft_poison(run)
        # The vocabulary is that of all engines, and read once.
        grammars = run.replica.grammars
        assert grammars is not None
        self._grammars = self._grammars or grammars._compilers
        grammars._compilers = self._grammars
        if schedule.widths:
            run.scheduler._speculation = RandomWidths(run.scheduler.config, schedule.seed)
        return run

    def _started(self, settings: dict[str, Any], shards: int) -> InlineEngine:
        """An engine of these settings, which name the pages of the whole cache."""
        common = {"model": str(self.folder), "device": "cpu", "selftest": False, **settings}
        if self.ranks is None:
            return InlineEngine(EngineConfig(**common))
        shards = max(1, shards)
        common |= {"tensor_parallel": self.ranks.size, "cache_shards": shards}
        common |= {"cache_pages": -(-(settings["cache_pages"] - 1) // shards) + 1}
        return self.ranks.engine(EngineConfig(**common))

    def _record(self, settings: dict[str, Any]) -> int:
        """Bytes of a page of all caches of an engine with these settings."""
        drafter = f"{settings.get('draft_model')} {settings.get('drafter')} {settings['width'] > 1}"
        if drafter not in self._records:
            engine = InlineEngine(EngineConfig(model=str(self.folder), device="cpu", selftest=False, **settings))
            self._records[drafter] = record_layout(engine.replica.model.caches)[-1]
            assert engine.replica.grammars is not None
            engine.replica.grammars.close()
        return self._records[drafter]

    def _never_draft_poison(self, run: InlineEngine) -> None:
        """Attention of a row reads the entries of all its tokens and weighs later ones by zero, which does not help
        against NaN. So a draft that is no number costs the whole row; of no other model does the target know a token
        that its drafter must not say."""
        drafter = run.runner.parts.drafter
        honest = drafter.logits

        def logits(*args: Any) -> torch.Tensor:
            return honest(*args).index_fill_(1, torch.tensor([POISON]), -1e9)

        drafter.logits = logits  # type: ignore[method-assign]

    def run(self, schedule: Schedule, before: dict[str, Begun] | None = None) -> Outcome:
        """Drive an engine through a schedule and judge it. An error that the engine raises is a problem, too. `before`:
        the
        requests that the schedule continues, and what an engine before this one gave of them."""
        outcome = Outcome()
        driven = self.driven(schedule, before)
        try:
            driven.through(schedule)
        except Exception as error:
            outcome.problem = f"{type(error).__name__}: {error}"
        finally:
            driven.close()
        outcome.steps = len(driven.engine.plans)
        outcome.problem = outcome.problem or self._judge(driven)
        outcome.seen = driven.seen
        return outcome

    def driven(self, schedule: Schedule, before: dict[str, Begun] | None = None) -> Driven:
        """A fresh engine for a schedule; see `run`."""
        settings = schedule.engine
        drafter = settings.get("draft_model") or settings.get("drafter") or "the model"
        return Driven(self.engine(schedule), random.Random(schedule.seed), drafter, before or {}, self.ranks)

    def _judge(self, driven: Driven) -> str:
        failed = 0
        for name, request in driven.requests.items():
            record = driven.engine.finished[name]
            logprobs = [entry for output in record.outputs for entry in output.logprobs]
            problem = self.reference.judge(request.prompt, request.sampling, record.tokens, record.finish, logprobs)
            problem = problem or misplaced(record)
            prompt = next((output.prompt for output in record.outputs if output.prompt), None)
            if record.tokens and not problem:
                problem = self.reference.judge_scores(request.prompt, request.sampling, prompt)
            if record.finish == "failed" and problem == NO_CAUSE:
                failed, problem = failed + 1, ""
            if record.finish is None:
                problem = problem or "it never ended"
            if problem:
                return f"request {name}: {problem}"
            driven.count(request, record)
        if failed > driven.mishaps:
            return f"{failed} requests failed without a cause of their own, of {driven.mishaps} mishaps"
        stats = driven.engine.scheduler.stats()
        if stats.pages_free != stats.pages_total:
            return f"{stats.pages_total - stats.pages_free} pages were not given back"
        return ""


def make_tiers_predictable(run: InlineEngine) -> None:
    """What is worth a load does not depend on how fast this machine is, and single pages are."""
    rows = run.scheduler._rows
    if rows.tier is not None:
        rows.tier._most_least = 1
    if rows.disk is not None:
        rows.disk._loads._least = 1
        for part in (rows.disk, rows.disk._loads, rows.disk._tickets):
            part._clock = lambda: 0.0
        rows.disk._pace.computing_s = lambda pages: math.inf  # type: ignore[method-assign]


def misplaced(record: Finished) -> str:
    """Return which output of a request does not say where its tokens stand; empty if none."""
    at = 0
    for output in record.outputs:
        if output.tokens and output.at != at:
            return f"tokens from number {at} on are said to be those from {output.at} on"
        at += len(output.tokens)
    return ""


class Driven:
    """An engine on its way through a schedule."""

    def __init__(
        self,
        engine: InlineEngine,
        rng: random.Random,
        drafter: str,
        before: dict[str, Begun] | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.engine, self.rng, self.drafter, self.ranks = engine, rng, drafter, ranks
        self.before = before or {}
        self.requests: dict[str, Request] = {}
        self.planned: list[StepPlan] = []
        self.told: deque[StepPlan | Moves | DiskMoves] = deque()
        """What the rank was told and has not come to."""
        self.answers: list[Moved | DiskMoved] = []
        """Of the rank that are on their way."""
        self.forgotten: deque[tuple[int, ForgetGrammar]] = deque()
        """Grammars that were forgotten, and behind which plan that was said."""
        self.mishaps = 0
        self.seen: Counter[str] = Counter()

    def close(self) -> None:
        """The threads that compile grammars, or copy pages, would keep the whole engine."""
        if self.ranks is not None:
            self.ranks.tell("close")
        disk = self.engine.replica.disk
        if disk is not None:
            disk.close()
            shutil.rmtree(disk.files.folder.parent)
        grammars = self.engine.replica.grammars
        assert grammars is not None
        grammars.close()

    def through(self, schedule: Schedule) -> None:
        """All events, then whatever is left to do."""
        for event in schedule.events:
            match event:
                case Add():
                    self._add(event)
                case Cancel():
                    self.engine.deliver(self.engine.scheduler.cancel(event.name))
                case Plan():
                    self._plan()
                case Apply():
                    self._apply()
                case Mishap():
                    self._strike(self._apply())
        while self._plan() or self.planned or self.answers or self.told:
            while self._plan():
                pass
            if self.answers and (not self.planned or self.rng.random() < 0.5):
                self._answer()
            elif self.planned:
                self._apply()
            else:
                self._move()
            if len(self.engine.plans) > MOST_STEPS:
                raise RuntimeError(f"not done after {MOST_STEPS} steps")
        if not self.engine.scheduler.idle:
            raise RuntimeError("nothing can be planned, and requests are left")
        self._count_steps()

    def _add(self, event: Add) -> None:
        request = Request(event.name, event.prompt, event.sampling, event.priority, done=event.done, age_s=event.age_s)
        if refusal := self.engine.scheduler.add(request):
            if "pages of cache" not in refusal.refused and "no room for output" not in refusal.refused:
                raise RuntimeError(f"refused without need: {refusal.refused}")
            self.seen["refused"] += 1
            return
        # A continued one is held against what was asked for at first.
        begun = self.before.get(event.name) or (request, Finished())
        self.requests[event.name], self.engine.finished[event.name] = begun
        self.seen["with a grammar"] += event.sampling.grammar is not None

    def _plan(self) -> bool:
        self._compile_grammars()
        if self.answers and self.rng.random() < 0.6:
            self._answer()
        plan = self.engine.scheduler.plan()
        self.told += self.engine.scheduler.moves()
        if plan is not None:
            self.planned.append(plan)
            self.told.append(plan)
            self.engine.plans.append(plan)
        self.engine.scheduler.save_pages()
        self.told += self.engine.scheduler.moves()
        return plan is not None

    def _move(self) -> None:
        """Let the rank copy what it is told before the next plan. Answers come in the order of the messages, and are
        taken in later, so that a schedule is the same in every run."""
        replica = self.engine.replica
        while self.told and not isinstance(moves := self.told[0], StepPlan):
            self.told.popleft()
            mover = replica.mover if isinstance(moves, Moves) else replica.disk
            assert mover is not None
            if self.ranks is not None:
                self.ranks.tell("moves", moves)
            mover.move(moves)  # type: ignore[arg-type]
            own = self.engine._moved.get(timeout=60)
            self.answers += [own] if self.ranks is None else self.ranks.answers(own)

    def _answer(self) -> None:
        """Let the scheduler hear one of the rank's answers."""
        answer = self.answers.pop(self.rng.randrange(len(self.answers)))
        if isinstance(answer, Moved):
            self.engine.scheduler.moved(answer)
        else:
            self.engine.scheduler.disk_moved(answer)

    def _apply(self) -> StepPlan | None:
        if not self.planned:
            return None
        plan = self.planned.pop(0)
        self._move()
        assert self.told.popleft() is plan
        self._forget_grammars(plan)
        self.engine.deliver(self.engine.scheduler.apply(self.engine.runner.execute(plan)))
        return plan

    def _compile_grammars(self) -> None:
        """Compiling takes no time. What is said of a grammar behind a plan is heeded behind it."""
        while work := self.engine.scheduler.grammar_work():
            for one in work:
                if isinstance(one, CompileGrammar):
                    self.engine.compile(one)
                else:
                    self.forgotten.append((len(self.engine.plans), one))

    def _forget_grammars(self, plan: StepPlan) -> None:
        """Forget the grammars of which that was said before this plan."""
        assert self.engine.replica.grammars is not None
        while self.forgotten and self.forgotten[0][0] < plan.step:
            self.engine.replica.grammars.heed(self.forgotten.popleft()[1])

    def _strike(self, plan: StepPlan | None) -> None:
        """Strike rows whose prompt goes on behind the step: nobody has sampled from what they wrote."""
        rows = [row for row in (plan.prefill if plan else ()) if not row.final]
        rows = [row for row in rows if row.start + len(row.tokens) > row.write_from]
        if not rows:
            return
        row = self.rng.choice(rows)
        entry = self.rng.randrange(max(row.start, row.write_from), row.start + len(row.tokens))
        parts = self.engine.runner.parts
        page = int(parts.state.tensors.page_SP[row.slot, entry // PAGE_TOKENS])
        if self.ranks is not None:
            self.ranks.tell("strike", page, entry % PAGE_TOKENS)
        strike(parts.cache, page, entry % PAGE_TOKENS)
        self.mishaps += 1
        self.seen["mishaps"] += 1

    def count(self, request: Request, record: Finished) -> None:
        """A request that was served rightly: what it was."""
        self.seen[f"ended: {record.finish}"] += 1
        self.seen["requests"] += 1
        sampling = request.sampling
        self.seen["prompts scored"] += bool(record.tokens) and sampling.prompt_logprobs >= 0
        self.seen["stopped behind min_tokens"] += record.finish == "stop" and sampling.min_tokens > 0

    def _count_steps(self) -> None:
        stats, plans = self.engine.scheduler.stats(), self.engine.plans
        self.seen["preemptions"] += stats.preemptions
        self.seen["cached tokens"] += stats.cached_tokens
        self.seen["drafts offered"] += stats.drafts_offered
        self.seen[f"drafts of {self.drafter}"] += stats.drafts_offered
        self.seen["drafts accepted"] += stats.drafts_accepted
        self.seen["bad rows"] += stats.bad_rows
        self.seen["pages from host memory"] += stats.host_loaded_pages
        self.seen["pages from disk"] += stats.disk_loaded_pages
        self.seen[f"steps of {stats.cache_shards} shards"] += len(plans)
        self.seen["steps of pieces that go round"] += len(plans) * self.engine.scheduler._rows.pool.in_pieces
        for plan in plans:
            kind = "mixed" if plan.decode_slots and plan.prefill else "prefill" if plan.prefill else "decode"
            self.seen[f"{kind} steps of width {plan.width}"] += 1
            self.seen["steps with masks"] += bool(plan.constrained)
