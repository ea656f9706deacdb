"""A front whose engine dies, with schedulers that the test plays: what the next engine is asked for, and what readers
of streams see."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace
from test_client import READY, Scheduler

from workers.channel.sockets import Binding, PeerGone
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.processes.failover import MOST_DEATHS, FailoverEngine
from workers.protocol.front import EngineFault, Refused, RequestFailed
from workers.protocol.messages import Cancel, Fault, FromWorker, Request, Requests, ToScheduler
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt, pack_tokens, unpack_tokens

PATIENT = EngineConfig(model="demo", heartbeat_timeout_s=600.0)
"""Schedulers that a test plays have no pulse."""


class World:
    """The engines that came and went, the last one alive, and the front that goes on."""

    def __init__(self) -> None:
        self.schedulers: list[Scheduler] = []
        self.clients: list[EngineClient] = []
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.failure: Exception | None = None
        self.now = 1000.0
        self.ready = READY
        self.engine: FailoverEngine

    @property
    def scheduler(self) -> Scheduler:
        return self.schedulers[-1]

    async def start(self) -> EngineClient:
        await self.may_start.wait()
        if self.failure is not None:
            raise self.failure
        binding = Binding(1, None, ToScheduler, FromWorker)
        self.schedulers.append(Scheduler(binding))
        client = EngineClient(PATIENT, binding.addresses, "it")
        self.clients.append(client)
        self.scheduler.say(self.ready)
        await client.ready(60)
        return client

    def kill(self, cause: str = "rank 0 was ended by SIGKILL") -> None:
        """Let the engine die, as whoever watches the processes reports it."""
        self.clients[-1].fail(cause)

    async def serving(self, engines: int) -> None:
        """Wait until so many engines were started and the last one serves."""
        async with asyncio.timeout(60):
            while len(self.clients) < engines or self.engine.down:
                await asyncio.sleep(0.005)

    async def continued(self) -> list[tuple[str, list[int], float | None]]:
        """Return the ids, what is done and the ages that the next message to the engine that lives names."""
        message = await self.scheduler.heard()
        assert isinstance(message, Requests)
        # An engine that is asked once more is asked under another name.
        return [
            (one.request_id.partition(".")[0], list(unpack_tokens(one.done)), one.age_s) for one in message.unpack()
        ]


@asynccontextmanager
async def world(patience_s: float = 30.0) -> AsyncIterator[World]:
    made = World()
    made.engine = FailoverEngine(await made.start(), made.start, patience_s, lambda: made.now)
    try:
        yield made
    finally:
        await made.engine.close()
        for scheduler in made.schedulers:
            scheduler.binding.close()


def asked(name: str, prompt: Any = (1, 2), **fields: Any) -> Request:
    return Request(name, Prompt.of(tuple(prompt)), SamplingParams(9), **fields)


async def delivered(stream: Any, tokens: int) -> None:
    """Wait until so many tokens of the stream have come, those that were read included."""
    async with asyncio.timeout(60):
        while len(stream._done) != tokens:
            await asyncio.sleep(0.001)


async def left(scheduler: Scheduler) -> None:
    """Wait until it has noticed that its front has left. Its socket hears of that a moment later."""
    with suppress(PeerGone):
        while True:
            scheduler.output("a", 67, at=1)
            await asyncio.sleep(0.001)


async def rest(stream: Any) -> list[int]:
    return [token async for output in stream for token in output.tokens]


async def test_a_stream_goes_on_with_the_next_engine_and_its_reader_sees_nothing() -> None:
    async with world() as made:
        told: list[Any] = []
        made.engine.on_loss.append(told.append)
        made.engine.on_return.append(told.append)
        stream = made.engine.generate(asked("a", priority=2, key="k", weight=3.0))
        assert await made.continued() == [("a", [], None)]
        made.scheduler.output("a", 5, cached_tokens=1)
        made.scheduler.output("a", 6, 7, at=1)
        await delivered(stream, 3)  # and not read
        made.now += 4.0
        made.kill()
        await made.serving(2)
        message = await made.scheduler.heard()
        [again] = message.unpack()
        assert (again.request_id, list(unpack_tokens(again.done)), again.age_s) == ("a.1", [5, 6, 7], 4.0)
        assert (tuple(again.prompt), again.sampling) == ((1, 2), SamplingParams(9))
        assert (again.priority, again.key, again.weight) == (2, "k", 3.0)
        made.scheduler.output("a.1", 8, at=3)
        made.scheduler.output("a.1", 9, at=4, finish="length")
        assert await rest(stream) == [5, 6, 7, 8, 9]
        assert told == ["rank 0 was ended by SIGKILL", 0.0]
        assert made.engine.streams == 0
        assert (made.engine.fault, made.engine.down) == (None, "")


async def test_the_oldest_goes_first_and_who_comes_meanwhile_is_as_old_as_it_is() -> None:
    async with world() as made:
        one = made.engine.generate(asked("one", (1,)))
        made.now += 1.0
        two = made.engine.generate(asked("two", (2,)))
        made.may_start.clear()
        made.kill()
        made.now += 1.0
        three = made.engine.generate(asked("three", (3,)))
        made.now += 1.0
        made.may_start.set()
        await made.serving(2)
        found = [await made.continued() for _ in range(3)]
        assert found == [[("one", [], 3.0)], [("two", [], 2.0)], [("three", [], 1.0)]]
        four = made.engine.generate(asked("four", (4,)))
        assert await made.continued() == [("four", [], None)]
        for stream in (one, two, three, four):
            await stream.aclose()


async def test_choices_of_a_prompt_go_on_together_and_ended_ones_stay_ended() -> None:
    async with world() as made:
        prompt = Prompt.of(tuple(range(40)))
        streams = [
            made.engine.generate(Request(name, prompt, SamplingParams(9, seed=seed))) for seed, name in enumerate("abc")
        ]
        await made.continued()
        made.scheduler.output("a", 5)
        made.scheduler.output("b", 6, finish="stop")
        made.scheduler.output("c", 7)
        made.scheduler.output("c", 8, at=1)
        assert await rest(streams[1]) == [6]
        await delivered(streams[0], 1)
        await delivered(streams[2], 2)
        made.kill()
        await made.serving(2)
        message = await made.scheduler.heard()
        assert [(one.request_id, list(unpack_tokens(one.done)), one.sampling.seed) for one in message.unpack()] == [
            ("a.1", [5], 0),
            ("c.1", [7, 8], 2),
        ]


async def test_an_engine_that_is_given_up_says_nothing_any_more() -> None:
    """One that only seemed dead may say more, as may messages that were under way."""
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        await made.continued()
        made.scheduler.output("a", 5)
        assert (await anext(stream)).tokens == (5,)
        made.may_start.clear()
        made.kill()
        made.scheduler.output("a", 66, at=1)
        await asyncio.sleep(0.05)
        made.may_start.set()
        await made.serving(2)
        async with asyncio.timeout(60):
            await left(made.schedulers[0])
        assert await made.continued() == [("a", [5], 0.0)]
        made.scheduler.output("a", 68, at=1)  # under the name that the last engine knew
        made.scheduler.output("a.1", 6, at=1, finish="length")
        assert await rest(stream) == [6]


@pytest.mark.parametrize("at", [0, 2])
async def test_tokens_that_do_not_follow_reach_nobody(at: int) -> None:
    """Twice, or with a gap: as if an old engine's words were taken for the new one's, or places were one off."""
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        await made.continued()
        made.scheduler.output("a", 5)
        assert (await anext(stream)).tokens == (5,)
        made.scheduler.output("a", 6, at=at)
        with pytest.raises(RequestFailed, match=f"from number {at} on where number 1 was due"):
            await anext(stream)
        assert await made.scheduler.heard() == Cancel("a")
        assert made.engine.streams == 0
        made.scheduler.output("a", 6, at=1, finish="length")
        await asyncio.sleep(0.05)


async def test_what_another_model_has_begun_is_not_continued() -> None:
    """The files of the model may have changed before the engine was started again."""
    async with world() as made:
        begun, waiting = [made.engine.generate(asked(name, (number,))) for number, name in enumerate("ab")]
        for _ in range(2):
            await made.continued()
        made.scheduler.output("a", 5)
        assert (await anext(begun)).tokens == (5,)
        made.ready = replace(READY, root=b"of other weights")
        made.kill()
        await made.serving(2)
        assert made.engine.info.root == b"of other weights"
        with pytest.raises(EngineFault, match="SIGKILL; the next engine has other weights"):
            await anext(begun)
        assert await made.continued() == [("b", [], 0.0)]
        made.kill()
        await made.serving(3)
        assert await made.continued() == [("b", [], 0.0)], "the same once more"
        await waiting.aclose()


async def test_what_another_front_has_delivered_is_not_asked_for_again() -> None:
    async with world() as made:
        stream = made.engine.generate(asked("a", done=pack_tokens([5, 6]), age_s=3.0))
        assert await made.continued() == [("a", [5, 6], 3.0)]
        made.scheduler.output("a", 7, at=2)
        await delivered(stream, 3)
        made.now += 1.0
        made.kill()
        await made.serving(2)
        assert await made.continued() == [("a", [5, 6, 7], 4.0)]
        made.scheduler.output("a.1", 8, at=3, finish="length")
        assert await rest(stream) == [7, 8]


async def test_who_leaves_meanwhile_is_not_asked_for() -> None:
    async with world() as made:
        streams = [made.engine.generate(asked(name, (number,))) for number, name in enumerate("ab")]
        for _ in streams:
            await made.continued()
        made.may_start.clear()
        made.kill()
        await streams[0].aclose()
        made.may_start.set()
        await made.serving(2)
        assert await made.continued() == [("b", [], 0.0)]
        await streams[1].aclose()
        assert await made.scheduler.heard() == Cancel("b.1")
        assert made.engine.streams == 0


async def test_what_the_next_engine_refuses_ends() -> None:
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        made.kill()
        await made.serving(2)
        await made.continued()
        made.scheduler.output("a.1", refused="the grammar takes too long", unavailable=True)
        with pytest.raises(Refused, match="grammar"):
            await anext(stream)
        assert made.engine.streams == 0


async def test_without_patience_the_first_death_is_the_end() -> None:
    async with world(patience_s=0.0) as made:
        told: list[str] = []
        made.engine.on_fault.append(told.append)
        stream = made.engine.generate(asked("a"))
        made.kill("rank 1 was killed")
        for late in (stream, made.engine.generate(asked("b"))):
            with pytest.raises(EngineFault, match=r"^rank 1 was killed$"):
                await anext(late)
        assert (told, made.engine.over, len(made.clients)) == (["rank 1 was killed"], True, 1)
        assert made.engine.fault == "rank 1 was killed"


async def test_streams_that_wait_too_long_end_and_the_engine_that_comes_later_serves() -> None:
    async with world(patience_s=0.1) as made:
        given_up: list[str] = []
        made.engine.on_fault.append(given_up.append)
        stream = made.engine.generate(asked("a"))
        made.may_start.clear()
        made.kill("rank 1 was killed")
        why = "rank 1 was killed; no engine took its place within 0.1 s"
        with pytest.raises(EngineFault, match=why):
            await anext(stream)
        with pytest.raises(EngineFault, match=why):
            await anext(made.engine.generate(asked("b")))
        assert made.engine.fault == why
        made.may_start.set()
        await made.serving(2)
        assert made.engine.fault is None
        stream = made.engine.generate(asked("c"))
        assert await made.continued() == [("c", [], None)]
        made.scheduler.output("c", 5, finish="length")
        assert await rest(stream) == [5]
        assert not given_up


async def test_a_death_that_another_start_would_end_in_as_well_is_the_end() -> None:
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        made.scheduler.say(Fault("rank 0: self-test failed for 1 of 9 graphs", 0, lasting=True))
        with pytest.raises(EngineFault, match="self-test failed"):
            await anext(stream)
        assert (made.engine.over, len(made.clients)) == (True, 1)


async def test_an_engine_that_cannot_be_started_again_is_the_end() -> None:
    async with world() as made:
        told: list[str] = []
        made.engine.on_fault.append(told.append)
        stream = made.engine.generate(asked("a"))
        made.failure = EngineFault("no room")
        made.kill("rank 1 was killed")
        why = "rank 1 was killed; it could not be started again: no room"
        with pytest.raises(EngineFault, match=why):
            await anext(stream)
        assert (told, made.engine.over) == ([why], True)


def killed(made: World) -> None:
    made.kill("killed")


def failed(made: World) -> None:
    made.scheduler.say(Fault("rank 0: CUDA error: an illegal memory access was encountered", 0, in_step=True))


@pytest.mark.parametrize(("die", "deaths"), [(killed, MOST_DEATHS), (failed, 2)])
async def test_a_request_that_engines_die_of_is_given_to_no_further_one(
    die: Callable[[World], None], deaths: int
) -> None:
    """While others, which came later, go on."""
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        for death in range(1, deaths):
            assert [name for name, _, _ in await made.continued()] == ["a"]
            die(made)
            made.now += 100.0
            await made.serving(death + 1)
        await made.continued()
        late = made.engine.generate(asked("late"))
        await made.continued()
        die(made)
        with pytest.raises(EngineFault, match=r"killed|CUDA error"):
            await asyncio.wait_for(anext(stream), 60)
        await made.serving(deaths + 1)
        assert [name for name, _, _ in await made.continued()] == ["late"]
        await late.aclose()


async def test_a_replica_whose_engines_die_one_after_the_other_is_given_up() -> None:
    async with world() as made:
        stream = made.engine.generate(asked("a"))
        for death in (1, 2):
            made.kill()
            await made.serving(death + 1)
            made.now += 1.0
        made.kill()
        with pytest.raises(EngineFault, match="third engine of this replica to die within 60 s"):
            await asyncio.wait_for(anext(stream), 60)
        assert made.engine.over


async def test_a_health_check_waits_for_no_engine() -> None:
    async with world() as made:
        made.may_start.clear()
        made.kill("rank 1 was killed")
        with pytest.raises(EngineFault, match="rank 1 was killed; it is being started again"):
            await made.engine.health_check()
        made.may_start.set()
        await made.serving(2)


async def test_closing_ends_what_waits() -> None:
    async with world() as made:
        made.may_start.clear()
        stream = made.engine.generate(asked("a"))
        made.kill()
        await asyncio.sleep(0)
        await made.engine.close()
        with pytest.raises(EngineFault, match="shutting down"):
            await anext(stream)
