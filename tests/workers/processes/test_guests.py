"""Streams that go on at the engine of another replica while their own is away, with schedulers that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace
from test_client import READY
from test_failover import PATIENT, World, asked, rest, world

from workers.processes.client import EngineClient
from workers.processes.guests import GuestChannel
from workers.protocol.front import EngineFault, Refused
from workers.protocol.messages import Cancel, EngineStats, Fault


@asynccontextmanager
async def neighbor(home: World) -> AsyncIterator[World]:
    """Run another replica, at which streams of `home` can go on."""
    async with world() as there:
        channel = GuestChannel(there.engine, None)
        client = EngineClient(PATIENT, channel.addresses, "it")
        await client.ready(60)
        known = home.engine._neighbors()
        home.engine._neighbors = lambda: [*known, client]
        there.channel = channel  # type: ignore[attr-defined]
        try:
            yield there
        finally:
            await client.close()
            channel.close()


@asynccontextmanager
async def two() -> AsyncIterator[tuple[World, World]]:
    async with world() as home, neighbor(home) as there:
        yield home, there


async def begun(home: World, name: str = "a") -> Any:
    """A stream of which one token came before its engine died; none is started until `may_start`."""
    stream = home.engine.generate(asked(name))
    await home.continued()
    home.scheduler.output(name, 5)
    assert (await anext(stream)).tokens == (5,)
    home.may_start.clear()
    home.now += 3.0
    home.kill()
    return stream


async def test_a_stream_goes_on_at_the_neighbor_and_to_its_end_there() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        assert await there.continued() == [("a", [5], 3.0)]
        there.scheduler.output("a.1", 6, at=1)
        assert (await anext(stream)).tokens == (6,)
        meanwhile = home.engine.generate(asked("meanwhile"))
        assert await there.continued() == [("meanwhile", [], 0.0)]
        home.may_start.set()
        await home.serving(2)
        later = home.engine.generate(asked("later"))
        assert await home.continued() == [("later", [], None)]
        there.scheduler.output("a.1", 7, at=2, finish="length")
        assert await rest(stream) == [7]
        for one, world_of_it, name in ((meanwhile, there, "meanwhile"), (later, home, "later")):
            await one.aclose()
            assert await world_of_it.scheduler.heard() == Cancel(name)
        assert there.channel.guests == set()  # type: ignore[attr-defined]
        assert (home.engine.streams, there.engine.streams) == (0, 0)


async def test_of_two_neighbors_that_with_less_to_do_is_chosen() -> None:
    async with world() as home, neighbor(home) as busy, neighbor(home) as idle:
        busy.scheduler.say(EngineStats(running=3, waiting=1))
        idle.scheduler.say(EngineStats(running=2))
        async with asyncio.timeout(60):
            while [client.stats.running for client in home.engine._neighbors()] != [3, 2]:
                await asyncio.sleep(0.01)
        streams = [home.engine.generate(asked(str(number), (number,))) for number in range(4)]
        for _ in streams:
            await home.continued()
        home.may_start.clear()
        home.kill()
        # Each counts as soon as it is placed: 2, 3, then both have 4, then the busy one has 5.
        at_idle = [(await idle.continued())[0][0] for _ in range(3)]
        at_busy = [(await busy.continued())[0][0] for _ in range(1)]
        assert (at_idle, at_busy) == (["0", "1", "3"], ["2"])


async def test_when_the_neighbor_dies_too_the_stream_waits_for_its_own_engine() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        there.scheduler.output("a.1", 6, at=1)
        assert (await anext(stream)).tokens == (6,)
        there.may_start.clear()
        there.kill("rank 0 of the neighbor was killed")
        await asyncio.sleep(0.1)
        home.may_start.set()
        await home.serving(2)
        assert await home.continued() == [("a", [5, 6], 3.0)]
        home.scheduler.output("a.2", 7, at=2, finish="length")
        assert await rest(stream) == [7]


async def test_when_the_neighbor_dies_later_the_stream_comes_home() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        home.may_start.set()
        await home.serving(2)
        there.kill("rank 0 of the neighbor was killed")
        assert await home.continued() == [("a", [5], 3.0)]
        home.scheduler.output("a.2", 6, at=1, finish="length")
        assert await rest(stream) == [6]


async def test_what_a_neighbor_goes_on_with_does_not_come_home_to_other_weights() -> None:
    """Files of the model have changed meanwhile; what has not begun may come."""
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        fresh = home.engine.generate(asked("fresh"))
        await there.continued()
        home.ready = replace(READY, root=b"of other weights")
        home.may_start.set()
        await home.serving(2)
        there.kill("rank 0 of the neighbor was killed")
        with pytest.raises(EngineFault, match="killed; the next engine has other weights"):
            await anext(stream)
        assert await home.continued() == [("fresh", [], 0.0)]
        await fresh.aclose()


async def test_what_engines_die_of_is_not_carried_from_one_replica_to_the_next() -> None:
    async with two() as (home, there):
        stream = home.engine.generate(asked("a"))
        await home.continued()
        home.may_start.clear()
        home.scheduler.say(Fault("rank 0: CUDA error", 0, in_step=True))
        await there.continued()
        there.scheduler.say(Fault("rank 0: CUDA error: here, too", 0, in_step=True))
        with pytest.raises(EngineFault, match="here, too"):
            await asyncio.wait_for(anext(stream), 60)
        assert home.engine.streams == 0


async def test_a_reader_that_leaves_frees_the_row_of_the_neighbor() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        await stream.aclose()
        assert await there.scheduler.heard() == Cancel("a.1")
        assert there.channel.guests == set()  # type: ignore[attr-defined]


async def test_a_refusal_of_the_neighbor_reaches_the_reader() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        there.scheduler.output("a.1", refused="the grammar takes too long", unavailable=True)
        with pytest.raises(Refused, match="grammar"):
            await anext(stream)


async def test_patience_is_for_those_that_wait() -> None:
    """Patience is not for streams that go on elsewhere."""
    async with world(patience_s=0.1) as home, neighbor(home) as there:
        stream = await begun(home)
        await there.continued()
        await asyncio.sleep(0.3)
        assert home.engine.fault is not None
        there.scheduler.output("a.1", 6, at=1, finish="length")
        assert await rest(stream) == [6]


async def test_a_neighbor_that_closes_its_channel_is_left() -> None:
    async with two() as (home, there):
        stream = await begun(home)
        await there.continued()
        there.channel.close()  # type: ignore[attr-defined]
        there.channel.close = lambda: None  # type: ignore[attr-defined]
        assert await there.scheduler.heard() == Cancel("a.1")
        home.may_start.set()
        await home.serving(2)
        assert (await home.continued())[0][:2] == ("a", [5])
        await stream.aclose()


async def test_streams_that_wait_go_on_at_a_neighbor_that_comes_later() -> None:
    async with world() as home:
        stream = await begun(home)
        home.engine.place_waiting()  # at nobody
        async with neighbor(home) as there:
            home.engine.place_waiting()
            assert await there.continued() == [("a", [5], 3.0)]
            home.engine.place_waiting()
            there.scheduler.output("a.1", 6, at=1, finish="length")
            assert await rest(stream) == [6]
