"""A rank's end of the channel: nothing that it says before it is connected is lost, and who promises to connect it
keeps that."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from workers.channel.sockets import Binding
from workers.config import EngineConfig
from workers.protocol.grammar import GrammarReady
from workers.protocol.messages import FromWorker, Heartbeat, Progress, ToScheduler
from workers.rank.link import Link

CONFIG = EngineConfig(model="demo", device="cpu")


@pytest.fixture
def binding() -> Iterator[Binding]:
    made = Binding(1, None, ToScheduler, FromWorker)
    yield made
    made.close()


def heard(binding: Binding, count: int) -> list[Any]:
    """The next messages that are no heartbeats."""
    found: list[Any] = []
    while len(found) < count:
        message = binding.results.receive(timeout_ms=60_000)
        assert message is not None
        found += [] if isinstance(message, Heartbeat) else [message]
    return found


def test_what_was_said_before_it_is_connected_arrives_first(binding: Binding) -> None:
    link = Link(CONFIG, 0)
    for number in range(3):
        link.send(Progress(0, f"early {number}"))
    link.news(7, "of another thread")
    assert not link.connected
    link.connect(binding.addresses)
    link.wait()
    assert link.connected
    link.results.send(Progress(0, "late"))
    said = [*(Progress(0, f"early {number}") for number in range(3)), GrammarReady(7, "of another thread")]
    assert heard(binding, 5) == [*said, Progress(0, "late")]
    link.news(8, "")  # by a socket of its own
    assert heard(binding, 1) == [GrammarReady(8, "")]
    link.hang_up()


def test_a_rank_that_fails_waits_for_who_promised_to_connect_it(binding: Binding) -> None:
    link = Link(CONFIG, 0)
    assert link.promise()
    assert not link.give_up()
    failed: list[bool] = []
    link.send(Progress(0, "why"))
    failing = threading.Thread(target=lambda: failed.append(link.fail()))
    failing.start()
    failing.join(0.1)
    assert failing.is_alive()
    link.connect(binding.addresses)
    failing.join(60)
    assert failed == [True]
    assert heard(binding, 1) == [Progress(0, "why")]
    link.hang_up()


@pytest.mark.parametrize("end", ["fail", "give_up"])
def test_nobody_can_promise_to_connect_a_rank_that_is_over(end: str) -> None:
    link = Link(CONFIG, 0)
    link.fail() if end == "fail" else link.give_up()
    assert not link.promise()
    assert not link.fail()  # at once, as nobody comes
    link.hang_up()
