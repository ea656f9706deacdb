"""The front's end of the channel, with a scheduler that the test plays."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from workers.channel.heartbeats import AwakeClock
from workers.channel.sockets import Addresses, Binding, encode, remove_sockets
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.protocol.front import EngineFault, Refused
from workers.protocol.messages import (
    Cancel,
    EngineStats,
    Fault,
    FromWorker,
    Heartbeat,
    Outputs,
    Progress,
    Ready,
    Request,
    RequestOutput,
    Requests,
    Shutdown,
    ToScheduler,
)
from workers.protocol.plan import SamplingParams

START_S = {"weights": 2.5, "self-test": 1.0}
READY = Ready(-1, pages=9, max_context=200, vocab_size=50, width=3, eos_ids=(1,), start_s=START_S)


class Scheduler:
    """Says what the test has it say, hears what the front sends."""

    def __init__(self, binding: Binding) -> None:
        self.binding = binding

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.binding.outputs.send(message)

    def output(self, name: str, *tokens: int, **fields: Any) -> None:
        self.say(Outputs((RequestOutput(name, tokens, **fields),)))

    async def heard(self) -> Any:
        return await asyncio.to_thread(self.binding.requests.receive, 60_000)

    async def asked(self) -> list[str]:
        """The ids in the next message, which asks for sequences."""
        message = await self.heard()
        assert isinstance(message, Requests)
        return [name for name, _ in message.choices]


@asynccontextmanager
async def front(ready: bool = True, **settings: Any) -> AsyncIterator[tuple[EngineClient, Scheduler]]:
    binding = Binding(1, None, ToScheduler, FromWorker)
    # This scheduler has no pulse.
    client = EngineClient(
        EngineConfig(model="demo", **{"heartbeat_timeout_s": 600.0, **settings}), binding.addresses, "it"
    )
    scheduler = Scheduler(binding)
    try:
        if ready:
            scheduler.say(READY)
            await client.ready(60)
        yield client, scheduler
    finally:
        await client.close()
        binding.close()


def request(name: str) -> Request:
    return Request(name, tuple([1, 2]), SamplingParams(4))  # noqa: C409, a prompt of its own


async def test_what_is_served_is_known_once_it_is_ready() -> None:
    async with front(ready=False) as (client, scheduler):
        with pytest.raises(RuntimeError, match="not ready"):
            _ = client.info
        with pytest.raises(TimeoutError):
            await client.ready(0.01)
        scheduler.say(READY, EngineStats(running=7))
        info = await client.ready(60)
        assert (info.name, info.max_context, info.vocab_size, info.max_width, info.eos_ids) == ("it", 200, 50, 3, (1,))
        assert list(client.start_s.items()) == list(START_S.items())  # in the order in which they came


async def test_a_stream_gets_its_own_outputs_and_its_end() -> None:
    async with front() as (client, scheduler):
        one, two = client.generate(request("one")), client.generate(request("two"))
        assert [await scheduler.asked() for _ in range(2)] == [["one"], ["two"]]
        scheduler.output("two", 5)
        scheduler.output("one", 6)
        scheduler.output("unknown", 9)
        assert (await anext(one)).tokens == (6,)
        scheduler.output("one", 7, finish="length")
        assert [output.tokens async for output in one] == [(7,)]
        await one.aclose()  # no cancel: it has ended
        assert (await anext(two)).tokens == (5,)
        await two.aclose()
        assert await scheduler.heard() == Cancel("two")
        assert not client._streams, "a front lives for months"


async def test_a_refusal_says_whether_to_come_again() -> None:
    async with front() as (client, scheduler):
        for overloaded in (True, False):
            stream = client.generate(request("r"))
            scheduler.output("r", refused="because", overloaded=overloaded)
            with pytest.raises(Refused, match="because") as refusal:
                await anext(stream)
            assert refusal.value.overloaded is overloaded
            assert not client._streams


async def test_a_fault_ends_every_stream_and_all_that_follow_with_the_first_cause() -> None:
    async with front() as (client, scheduler):
        told: list[str] = []
        client.on_fault.append(told.append)
        streams = [client.generate(request(name)) for name in "ab"]
        scheduler.say(Fault("first"), Fault("second"))
        for stream in streams:
            with pytest.raises(EngineFault, match="first"):
                await anext(stream)
        with pytest.raises(EngineFault, match="first"):
            await client.health_check()
        await asyncio.sleep(0.05)
        assert (told, client.fault) == (["first"], "first")


async def test_a_fault_while_it_starts_says_whether_to_try_again() -> None:
    async with front(ready=False) as (client, scheduler):
        scheduler.say(Fault("no room", lasting=True))
        with pytest.raises(EngineFault, match="no room") as fault:
            await client.ready(60)
        assert fault.value.lasting


@pytest.mark.long
@pytest.mark.alone
async def test_a_scheduler_that_falls_silent_is_a_fault() -> None:
    async with front(heartbeat_timeout_s=1.2) as (client, scheduler):
        stream = client.generate(request("a"))
        for _ in range(8):
            scheduler.say(EngineStats())
            await asyncio.sleep(0.2)
        assert client.fault is None
        with pytest.raises(EngineFault, match=r"the scheduler has been silent for \d+\.\d s"):
            await asyncio.wait_for(anext(stream), 60)


async def test_a_message_that_nobody_understands_is_a_fault() -> None:
    async with front() as (client, scheduler):
        stream = client.generate(request("a"))
        scheduler.binding.outputs._socket.send(b"\xc1", zmq.NOBLOCK)
        with pytest.raises(EngineFault, match="unreadable message from the scheduler"):
            await asyncio.wait_for(anext(stream), 60)


async def test_who_cannot_be_told_keeps_nobody_from_what_follows() -> None:
    async with front(ready=False) as (client, scheduler):
        lines: list[str] = []

        def broken(news: object) -> None:
            raise OSError("the store is gone")

        client.on_progress += [broken, lines.append]
        client.on_fault.append(broken)
        scheduler.say(Progress(0, "loading"), READY)
        await client.ready(60)
        assert lines == ["rank 0: loading"]
        stream = client.generate(request("a"))
        scheduler.say(Fault("gone"))
        with pytest.raises(EngineFault, match="gone"):
            await asyncio.wait_for(anext(stream), 60)


async def test_a_health_check_is_one_real_token_before_all_others() -> None:
    async with front() as (client, scheduler):
        probing = asyncio.create_task(client.health_check())
        asked = await scheduler.heard()
        [(name, _)] = asked.choices
        assert (asked.sampling.max_tokens, asked.priority) == (1, -1)
        assert not probing.done()
        scheduler.output(name, 3, finish="length")
        await asyncio.wait_for(probing, 60)


async def test_a_health_check_that_nobody_waits_for_leaves_the_queue() -> None:
    async with front() as (client, scheduler):
        probing = asyncio.create_task(client.health_check())
        [name] = await scheduler.asked()
        probing.cancel()
        assert await scheduler.heard() == Cancel(name)
        assert not client._streams


async def test_the_choices_of_a_prompt_travel_together_and_the_prompt_once() -> None:
    async with front() as (client, scheduler):
        prompt, other = tuple(range(40)), tuple(range(40))
        for seed in range(128):
            client.generate(Request(f"a{seed}", prompt, SamplingParams(4, seed=seed)))
            client.generate(Request(f"b{seed}", other, SamplingParams(4, seed=seed)))
        client.generate(Request("urgent", prompt, SamplingParams(4), priority=-1))
        client.generate(Request("cold", prompt, SamplingParams(4, temperature=0.0)))
        for name in "ab":
            message = await scheduler.heard()
            assert [one.request_id for one in message.unpack()] == [f"{name}{seed}" for seed in range(128)]
            assert [one.sampling.seed for one in message.unpack()] == list(range(128))
            assert {tuple(one.prompt) for one in message.unpack()} == {prompt}
            assert len({id(one.prompt) for one in message.unpack()}) == 1
        assert (await scheduler.heard()).priority == -1
        assert (await scheduler.heard()).sampling.temperature == 0.0


async def test_what_is_taken_back_before_it_leaves_does_not_leave() -> None:
    async with front() as (client, scheduler):
        prompt = (1, 2)
        streams = [client.generate(Request(name, prompt, SamplingParams(4))) for name in "abc"]
        alone = client.generate(request("alone"))
        for stream in (streams[1], alone):
            await stream.aclose()
        await client.generate(request("last")).aclose()
        assert await scheduler.asked() == ["a", "c"]
        assert not client._outbox._groups
        await streams[0].aclose()
        assert await scheduler.heard() == Cancel("a")


async def test_ids_that_cannot_travel_are_refused_alone() -> None:
    async with front() as (client, scheduler):
        for wrong in (-1, 2**32):
            stream = client.generate(Request("wrong", (1, wrong), SamplingParams(4)))
            right = client.generate(request("right"))
            with pytest.raises(Refused, match="token id outside 0") as refusal:
                await anext(stream)
            assert not refusal.value.overloaded
            assert await scheduler.asked() == ["right"]
            await right.aclose()
            assert await scheduler.heard() == Cancel("right")
        assert not client._streams


@pytest.mark.long
@pytest.mark.alone
async def test_a_scheduler_with_a_pulse_is_alive_though_its_loop_says_nothing() -> None:
    async with front(heartbeat_timeout_s=1.2) as (client, scheduler):
        for _ in range(10):
            scheduler.binding.pulse.send(Heartbeat(-1))
            await asyncio.sleep(0.2)
        assert client.fault is None
        async with asyncio.timeout(60):
            while client.fault is None:
                await asyncio.sleep(0.01)
        assert re.fullmatch(r"the scheduler has been silent for \d+\.\d s", client.fault)


async def test_a_front_that_stood_still_gives_nobody_up() -> None:
    async with front(heartbeat_timeout_s=60.0) as (client, scheduler):
        lost_s = 0.0
        client._clock = AwakeClock(lambda: time.monotonic() + lost_s)
        scheduler.say(EngineStats(running=1))
        while not client.stats.running:
            await asyncio.sleep(0.01)
        lost_s = 7200.0
        before = client._clock.time
        while client._clock.time < before + 0.5:  # until it has looked for whether it hears anything
            await asyncio.sleep(0.05)
        assert client.fault is None


PEER = """
import sys
from workers.channel.sockets import Binding, encode
from workers.protocol.messages import FromWorker, Ready, ToScheduler
binding = Binding(1, sys.argv[1] or None, ToScheduler, FromWorker)
print(encode(binding.addresses).hex(), flush=True)
binding.requests.receive()
binding.outputs.send(Ready(-1, pages=9, max_context=200, vocab_size=50, width=3, eos_ids=(1,)))
binding.requests.receive()
"""
"""An engine in a process of its own, which is ready when it is asked for something."""


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
async def test_an_engine_whose_process_ends_is_given_up_without_waiting_for_its_silence(host: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PEER, host, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    addresses = msgspec.msgpack.decode(bytes.fromhex((await process.stdout.readline()).decode()), type=Addresses)
    client = EngineClient(EngineConfig(model="demo", heartbeat_timeout_s=600.0), addresses, "it", connected=True)
    try:
        stream = client.generate(request("a"))
        await client.ready(60)
        process.kill()
        with pytest.raises(EngineFault, match="the connection broke"):
            await asyncio.wait_for(anext(stream), 60)
    finally:
        await client.close()
        await process.wait()
        remove_sockets(addresses)


async def test_a_connection_that_breaks_before_anybody_serves_is_made_again() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    client = EngineClient(EngineConfig(model="demo"), binding.addresses, "it", connected=True)
    outputs = binding.outputs._socket
    await asyncio.to_thread(outputs.poll, 5000, zmq.POLLOUT)  # it is connected
    outputs.unbind(binding.addresses.outputs)
    outputs.close(linger=0)
    again = zmq.Context.instance().socket(zmq.PUSH)
    again.bind(binding.addresses.outputs)
    await asyncio.to_thread(again.send, encode(READY))
    assert (await client.ready(60)).max_context == 200
    assert client.fault is None
    await client.close()
    again.close(linger=0)
    binding.close()


async def test_closing_ends_the_scheduler_and_what_still_streams() -> None:
    binding = Binding(1, None, ToScheduler, FromWorker)
    client = EngineClient(EngineConfig(model="demo"), binding.addresses, "it")
    stream = client.generate(request("a"))
    await client.close()
    with pytest.raises(EngineFault, match="shutting down"):
        await anext(stream)
    # What had not left by then does not leave any more.
    assert binding.requests.receive(60_000) == Shutdown()
    binding.close()
