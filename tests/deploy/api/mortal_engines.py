"""Real engines in the test's own process that die at a chosen moment of a request, and the front that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from tests.workers.harness import InlineEngine
from workers.processes.client import OutputMailbox
from workers.processes.failover import FailoverEngine
from workers.protocol.front import EngineFault, ModelInfo
from workers.protocol.grammar import CompileGrammar
from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.plan import StepPlan

STEPS = ("prefill", "mixed", "decode", "verify")
PHASES = ("queued", "compile", *STEPS, "between choices", "last token")
"""Moments at which an engine can die: a request waits for its first step; its grammar is compiled; a step feeds a part
of its prompt, alone or beside rows of others; a step decodes one token, or verifies drafts; some outputs of a step have
left and others have not; its last token was sampled and has not left."""
LOST = ("results", "outputs")
"""What dies with the engine where it dies in a step: what ranks computed, as when a rank is killed; or what the
scheduler made of it, as when that is."""


class MortalClient:
    """An engine that may die, in place of an `EngineClient`."""

    def __init__(self, engine: InlineEngine, dies: tuple[str, str] = ("", "")) -> None:
        """`dies`: one of `PHASES`, and one of `LOST`."""
        self.engine, (self._phase, self._lost) = engine, dies
        ready = engine.replica.ready
        self.info = ModelInfo(
            "tiny", ready.max_context, ready.vocab_size, ready.eos_ids, ready.width, created=0, root=b"the same"
        )
        self.stats, self.selftest = EngineStats(slots=8, queue_limit=64), None
        self.fault: str | None = None
        self.died_of_an_error = self.fault_is_lasting = False
        self.on_fault: list[Callable[[str], None]] = []
        self.on_charges: list[Any] = []
        self.armed = False
        """Whether the request has come that it is to die of."""
        self._mailboxes: dict[str, OutputMailbox] = {}
        self._companions: set[str] = set()
        self._given = 0
        self._work = asyncio.Event()
        self._running = asyncio.get_running_loop().create_task(self._run())

    def generate(self, request: Request, mailbox: OutputMailbox) -> None:
        refusal = self.engine.scheduler.add(request)
        assert refusal is None, refusal
        self._mailboxes[request.request_id] = mailbox
        if not self.armed:
            self._companions.add(request.request_id)
        elif self._phase == "queued":
            asyncio.get_running_loop().call_soon(self.die)
        self._work.set()

    def abandon(self, request_id: str) -> None:
        if self._mailboxes.pop(request_id, None) is not None and not self.fault:
            self.engine.scheduler.cancel(request_id)

    async def close(self) -> None:
        self._running.cancel()

    def die(self) -> None:
        """All that it has not said is lost."""
        if self.fault:
            return
        self.fault = f"it died: {self._phase}"
        self._running.cancel()
        for mailbox in self._mailboxes.values():
            mailbox.fail(EngineFault(self.fault))
        for callback in self.on_fault:
            callback(self.fault)

    async def _run(self) -> None:
        while not self.fault:
            if not self._turn():
                self._work.clear()
                await self._work.wait()
            for _ in range(10):  # whoever reads has the time to read every output by itself
                await asyncio.sleep(0)

    def _turn(self) -> bool:
        """Do one thing; False when nothing is left to do."""
        engine = self.engine
        for work in engine.scheduler.grammar_work():
            if not isinstance(work, CompileGrammar):
                assert engine.replica.grammars is not None
                engine.replica.grammars.heed(work)
            elif self.armed and self._phase == "compile":
                self.die()
                return False
            else:
                engine.compile(work)
        while engine.plan() is not None:
            pass
        if not engine._queue:
            return False
        plan = engine._queue.popleft()
        assert isinstance(plan, StepPlan)
        results = engine.runner.execute(plan)
        here = self.armed and self._is_now(plan)
        if here and self._lost == "results":
            self.die()
            return False
        outputs = engine.scheduler.apply(results)
        mine = [output for output in outputs if output.request_id not in self._companions]
        ends = self.armed and self._phase == "last token" and any(output.finish for output in mine)
        if (here and self._lost == "outputs") or ends:
            self.die()
            return False
        self._say(outputs)
        return True

    def _is_now(self, plan: StepPlan) -> bool:
        if plan.prefill:
            return self._phase == ("mixed" if plan.decode_slots else "prefill")
        return self._given > 3 and self._phase == ("verify" if plan.width > 1 else "decode")

    def _say(self, outputs: Iterable[RequestOutput]) -> None:
        told = 0
        for output in outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is None:
                continue
            if output.finish is not None:
                del self._mailboxes[output.request_id]
            mailbox.put(output)
            if self.armed and output.request_id not in self._companions:
                self._given += len(output.tokens)
                told += 1
                if self._phase == "between choices" and self._given > 5 and told == 2:
                    self.die()
                    return


class MortalEngines:
    """The first one dies, the next one does not."""

    def __init__(self, first: InlineEngine, then: InlineEngine, dies: tuple[str, str] = ("", "")) -> None:
        self._then = then
        self.clients = [MortalClient(first, dies)]
        self.failover = FailoverEngine(self.clients[0], self._start, 60.0)  # type: ignore[arg-type]

    async def _start(self) -> MortalClient:
        await asyncio.sleep(0)
        self.clients.append(MortalClient(self._then))
        return self.clients[-1]

    async def close(self) -> None:
        """End what is left."""
        await self.failover.close()
        for client in self.clients:
            await client.close()
