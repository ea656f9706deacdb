"""What keeps an engine standing by, with engines that the test plays: never two, never one that is not as it should be,
and nothing that harms the engine that serves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from test_client import READY, Scheduler
from test_failover import PATIENT

from workers.channel.sockets import Binding
from workers.processes import hot_standby
from workers.processes.client import EngineClient
from workers.processes.hot_standby import HotStandby
from workers.protocol.front import EngineFault
from workers.protocol.messages import (
    EngineStats,
    FromWorker,
    Outputs,
    Request,
    RequestOutput,
    Requests,
    TakeOver,
    ToScheduler,
)
from workers.protocol.plan import SamplingParams


class Engine:
    """Processes whose scheduler the test plays. It answers every rehearsal, and takes over when it is told to."""

    def __init__(self, world: World) -> None:
        self.world, self.killed, self.ended = world, False, False
        self.rehearsals = self.taken_over = 0
        self.answers = True
        self.still: set[str] = set()
        """Names of requests that are answered all the same."""
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.client: EngineClient
        self._binding: Binding | None = None
        self._playing: asyncio.Task[None] | None = None
        world.made.append(self)

    async def connect(self) -> EngineClient:
        world = self.world
        if world.failure is not None:
            raise world.failure
        if sum(not one.ended for one in world.made) > 2:  # this one, and the one that serves
            raise RuntimeError("two stand by")
        binding = self._binding = Binding(1, None, ToScheduler, FromWorker)
        self.client = EngineClient(PATIENT, binding.addresses, "it")
        Scheduler(binding).say(world.ready)
        self._playing = asyncio.create_task(self._play(binding))
        return self.client

    async def _play(self, binding: Binding) -> None:
        while True:
            await asyncio.sleep(0.002)
            while (message := binding.requests.receive(timeout_ms=0)) is not None:
                if isinstance(message, TakeOver) and self.world.takes_over:
                    self.taken_over += 1
                    binding.outputs.send(replace(READY, pages=90, max_context=300))
                if isinstance(message, Requests) and (self.answers or message.choices[0][0] in self.still):
                    self.rehearsals += 1
                    for name, _ in message.choices:
                        binding.outputs.send(Outputs((RequestOutput(name, (1,), "length"),)))

    def kill(self) -> None:
        self.killed = True
        if self._playing is not None:
            self._playing.cancel()

    async def gone(self, limit_s: float) -> bool:
        assert self.killed
        try:
            await asyncio.wait_for(self.may_end.wait(), limit_s)
        except TimeoutError:
            return False
        if self._binding is not None and not self.ended:
            self._binding.close()
        self.ended = True
        return True


class World:
    """The engines that came and went."""

    def __init__(self, **times: float) -> None:
        self.made: list[Engine] = []
        self.ready, self.failure, self.takes_over = READY, None, True
        self.unshared: str | OSError = ""
        """Why nothing could be shared with the engine that serves, or what keeps that from being found out."""
        self.serving: EngineClient | None = None
        self.told: list[str] = []
        self.standby = HotStandby(
            lambda: Engine(self),
            lambda: self.serving,
            self._look,
            60.0,
            **{"backoff_s": 0.01, "calm_s": 0.0, **times},
        )
        self.standby.on_change.append(self.told.append)

    async def _look(self) -> str:
        if isinstance(self.unshared, OSError):
            raise self.unshared
        return self.unshared


@asynccontextmanager
async def world(monkeypatch: pytest.MonkeyPatch, **times: float) -> AsyncIterator[tuple[World, Engine]]:
    """An engine that serves, and what keeps another one standing by, which was not told to begin."""
    monkeypatch.setattr(hot_standby, "_LOOK_S", 0.002)
    made = World(**times)
    serving = Engine(made)
    made.serving = await serving.connect()
    await made.serving.ready(60)
    try:
        yield made, serving
    finally:
        made.standby.kill()
        for engine in made.made:
            engine.may_end.set()
            engine.kill()
            if hasattr(engine, "client"):
                await engine.client.close()
            await engine.gone(1)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)


async def test_one_stands_by_once_it_was_rehearsed_and_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, rehearsal_s=0.02) as (made, serving):
        assert not made.standby.ready
        made.standby.begin()
        await until(lambda: made.standby.ready)
        second = made.made[1]
        assert second.rehearsals >= 1
        await until(lambda: second.rehearsals >= 4)  # on its clock
        found = await made.standby.take_over(serving)
        assert found is not None
        assert (found[0], found[1]) == (second, second.client)
        assert (found[1].info.max_context, found[1].serves) == (300, True)
        assert (serving.ended, second.killed, second.taken_over) == (True, False, 1)
        assert not made.standby.ready
        rehearsals = second.rehearsals
        await asyncio.sleep(0.1)
        assert (second.rehearsals, len(made.made)) == (rehearsals, 2)  # it is left alone, and none is started
        made.serving = found[1]
        made.standby.begin()
        await until(lambda: made.standby.ready)
        assert len(made.made) == 3


async def test_a_rehearsal_that_ends_when_it_takes_over_is_its_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps it is told to stop in the moment in which it hears of the rehearsal, and must not miss the former."""
    taking: list[asyncio.Task[Any]] = []
    check = EngineClient.health_check

    async with world(monkeypatch, rehearsal_s=0.01) as (made, serving):

        async def checked(client: EngineClient) -> None:
            await check(client)
            if made.standby.ready and not taking:
                taking.append(asyncio.create_task(made.standby.take_over(serving)))

        monkeypatch.setattr(EngineClient, "health_check", checked)
        made.standby.begin()
        await until(lambda: taking)
        found = await taking[0]
        assert found is not None
        made.serving = found[1]
        made.standby.begin()
        await until(lambda: made.standby.ready)
        assert len(made.made) == 3


@pytest.mark.parametrize("planted", [False, True])
async def test_there_are_never_two(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """However often it is told to begin, and however long the one before takes to end. Planted: it does not wait."""
    async with world(monkeypatch) as (made, _):
        for _ in range(3):
            made.standby.begin()
        await until(lambda: made.standby.ready)
        made.made[1].may_end.clear()
        if planted:

            async def end(processes: Any, client: Any) -> None:
                processes.kill()

            monkeypatch.setattr(HotStandby, "_end", staticmethod(end))
        made.standby.kill()
        assert not made.standby.ready
        for _ in range(3):
            made.standby.begin()
        if planted:
            await until(lambda: len(made.made) > 2 and len(made.told) > 1)
        else:
            await asyncio.sleep(0.1)
            assert len(made.made) == 2
        if planted:
            assert any("no engine stands by: two stand by" in line for line in made.told)
        made.made[1].may_end.set()
        if not planted:
            await until(lambda: made.standby.ready)
            assert [one.ended for one in made.made] == [False, True, False]


async def test_one_that_dies_or_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, rehearsal_s=0.02) as (made, serving):
        made.standby.begin()
        await until(lambda: made.standby.ready)
        made.made[1].client.fail("rank 0 was ended by SIGKILL")
        assert not made.standby.ready
        await until(lambda: len(made.made) == 3 and made.standby.ready)
        with monkeypatch.context() as patch:
            patch.setattr(hot_standby, "REHEARSAL_LIMIT_S", 0.3)
            made.made[2].still = {*made.made[2].client._streams}  # with the limit before
            made.made[2].answers = False
            await until(lambda: len(made.made) == 4)
        await until(lambda: made.standby.ready)
        assert [one.ended for one in made.made] == [False, True, True, False]
        assert made.told[1].startswith("no engine stands by: rank 0 was ended by SIGKILL; another one is started in ")
        assert made.told[3].startswith("no engine stands by: TimeoutError; ")
        assert serving.client.fault is None


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds before each start, which pass at once."""
    found: list[float] = []

    async def calm(self: Any, pause: float) -> None:
        found.append(pause)
        await asyncio.sleep(0.002)

    monkeypatch.setattr(HotStandby, "_calm", calm)
    return found


async def test_starts_that_fail_are_repeated_ever_more_slowly(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    async with world(monkeypatch, backoff_s=5.0) as (made, _):
        made.failure = EngineFault("no room")  # type: ignore[assignment]
        made.standby.begin()
        await until(lambda: len(pauses) == 10)
        assert pauses == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 600.0, 600.0]
        assert made.told[1] == "no engine stands by: no room; another one is started in 10 s"
        assert all(one.ended for one in made.made[1:])


@pytest.mark.parametrize("late", ["in its start", "while it stands by"])
async def test_what_fails_late_in_its_start_is_a_start_that_fails(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float], late: str
) -> None:
    """However long it took. What has stood by for so long begins anew."""
    monkeypatch.setattr(hot_standby, "LASTED_S", 0.02)
    async with world(monkeypatch, backoff_s=5.0) as (made, _):

        async def rehearse(self: Any, client: EngineClient) -> None:
            await asyncio.sleep(0.05)
            raise EngineFault("late")

        async def ready(self: EngineClient, timeout_s: float) -> None:
            await asyncio.sleep(0.05)
            raise EngineFault("late")

        if late == "in its start":
            monkeypatch.setattr(EngineClient, "ready", ready)
        else:
            monkeypatch.setattr(HotStandby, "_rehearse", rehearse)
        made.standby.begin()
        await until(lambda: len(pauses) == 4)
        assert pauses == ([0.0, 5.0, 10.0, 20.0] if late == "in its start" else [0.0, 5.0, 5.0, 5.0])


async def test_what_another_start_would_repeat_is_given_up_until_the_next_engine(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    async with world(monkeypatch) as (made, _):
        made.failure = EngineFault("no such kernel", lasting=True)  # type: ignore[assignment]
        for times in (1, 2):  # the second time for another engine that serves
            made.standby.begin()
            await until(lambda: made.standby._keeping is None)
            assert len(pauses) == 3 * times
            assert made.told[-1] == "no engine stands by: no such kernel; none will before the next engine serves"
        assert len(made.told) == 6
        made.failure = None
        made.standby.begin()
        await until(lambda: made.standby.ready)


async def test_where_nothing_is_shared_none_is_started_or_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ready is what can take over, and a keeper's memory may go while an engine stands by."""
    async with world(monkeypatch, rehearsal_s=0.01) as (made, serving):
        made.unshared = "the weight keeper has nothing of rank 0, cache"
        made.standby.begin()
        await until(lambda: made.standby._keeping is None)
        assert len(made.made) == 1
        assert made.told == [f"no engine stands by: {made.unshared}; none will before the next engine serves"]
        made.unshared = ""
        made.standby.begin()
        await until(lambda: made.standby.ready)
        made.unshared = OSError("timed out")  # it is replaced, and the next one waits for an answer
        await until(lambda: any("timed out; another one is started" in line for line in made.told))
        made.unshared = ""
        await until(lambda: made.standby.ready)
        made.unshared = "the weight keeper has ended"
        await until(lambda: made.standby._keeping is None)
        assert not made.standby.ready
        assert all(one.ended for one in made.made[1:])
        assert serving.client.fault is None


@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_one_that_takes_over_when_its_replica_ends_ends_too(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    async with world(monkeypatch) as (made, serving):
        made.standby.begin()
        await until(lambda: made.standby.ready)
        second = made.made[1]
        made.takes_over = False  # it is told to, and does not answer yet
        taking = asyncio.create_task(made.standby.take_over(serving))
        await until(lambda: serving.ended)
        if how == "killed":
            made.standby.kill()
            assert second.killed
            assert await taking is None
        else:
            taking.cancel()
            await asyncio.wait([taking])
            assert second.killed
        await until(lambda: second.ended)
        assert not made.standby.ready


async def test_the_next_one_waits_for_one_that_could_not_take_over_and_does_not_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hot_standby, "TAKE_OVER_S", 0.1)
    monkeypatch.setattr(hot_standby, "GONE_S", 0.1)
    async with world(monkeypatch) as (made, serving):
        made.standby.begin()
        await until(lambda: made.standby.ready)
        second = made.made[1]
        made.takes_over = False
        second.may_end.clear()
        assert await made.standby.take_over(serving) is None
        assert (second.killed, second.ended) == (True, False)
        made.standby.begin()
        await asyncio.sleep(0.1)
        assert len(made.made) == 2  # never two: that one still has its memory
        second.may_end.set()
        await until(lambda: made.standby.ready)
        assert second.ended


async def test_what_has_other_weights_does_not_stand_by(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as (made, _):
        made.ready = replace(READY, root=b"another")
        made.standby.begin()
        await until(lambda: made.told)
        assert "it has other weights than the engine that serves" in made.told[0]
        assert made.made[1].ended


async def test_none_is_started_while_requests_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch, calm_s=0.05) as (made, serving):
        serving.client.stats = EngineStats(waiting=3)
        made.standby.begin()
        await asyncio.sleep(0.2)
        assert len(made.made) == 1
        serving.client.stats = EngineStats()
        await until(lambda: made.standby.ready)
        monkeypatch.setattr(hot_standby, "CALM_LIMIT_S", 0.1)
        made.standby.kill()
        serving.client.stats = EngineStats(waiting=3)
        made.standby.begin()
        await until(lambda: made.standby.ready)  # after that long all the same


@pytest.mark.parametrize("why", ["starts", "dead", "silent", "dead ones live"])
async def test_where_it_cannot_take_over_nothing_is_left_of_it(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    """Above all not while a process of the dead engine may still write to the cache."""
    if why == "silent":
        monkeypatch.setattr(hot_standby, "TAKE_OVER_S", 0.2)
    elif why == "dead ones live":
        monkeypatch.setattr(hot_standby, "GONE_S", 0.2)
    async with world(monkeypatch) as (made, serving):
        if why == "starts":
            made.ready = None  # type: ignore[assignment]
            monkeypatch.setattr(Scheduler, "say", lambda *_: None)
        made.standby.begin()
        await until(lambda: len(made.made) == 2 if why == "starts" else made.standby.ready)
        second = made.made[1]
        if why == "dead":
            second.client.fail("rank 1 was ended by SIGKILL")
        elif why == "silent":
            made.takes_over = False
        elif why == "dead ones live":
            serving.may_end.clear()
        assert await made.standby.take_over(serving) is None
        await until(lambda: second.ended)
        assert serving.killed
        assert second.taken_over == 0
        assert not made.standby.ready
        if why == "dead ones live":
            assert any("have not ended for 0 s" in line for line in made.told)


async def test_what_was_asked_before_it_took_over_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async with world(monkeypatch) as (made, serving):
        made.standby.begin()
        await until(lambda: made.standby.ready)
        second = made.made[1]
        second.answers = False
        rehearsal = second.client.generate(Request("rehearsal", (1,), SamplingParams(5)))
        await asyncio.sleep(0.05)
        taking = asyncio.create_task(made.standby.take_over(serving))
        await until(lambda: second.taken_over)
        second.answers = True
        with pytest.raises(EngineFault, match="takes the place of another engine"):
            await anext(rehearsal)
        assert second._binding is not None
        second._binding.outputs.send(Outputs((RequestOutput("rehearsal", (7,)),)))  # late: it reaches nobody
        assert await taking is not None
        with pytest.raises(StopAsyncIteration):
            await anext(rehearsal)
