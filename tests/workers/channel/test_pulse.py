"""The scheduler's signs of life: they do not wait for its loop, and do not outlive it."""

from __future__ import annotations

import threading
import time

import pytest

from workers.channel.heartbeats import PULSE_PERIOD_S, AwakeClock, Pulse
from workers.protocol.messages import Heartbeat


class Sender:
    """Counts what is sent, and says when."""

    def __init__(self) -> None:
        self.sent: list[Heartbeat] = []
        self.more = threading.Event()

    def send(self, message: Heartbeat) -> None:
        self.sent.append(message)
        self.more.set()

    def sends_within(self, seconds: float) -> bool:
        self.more.clear()
        return self.more.wait(seconds)


def test_it_beats_while_an_iteration_takes_long_and_its_owner_computes() -> None:
    sender = Sender()
    pulse = Pulse(sender, iteration_s=3600)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while len(sender.sent) < 3:
        sum(range(1000))  # this thread is the loop, and does not wait for anything
        assert time.monotonic() < deadline
    pulse.close()
    assert all(message == Heartbeat(-1) for message in sender.sent)


def test_it_vouches_for_no_loop_that_stands_still_and_again_for_one_that_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    sender = Sender()
    pulse = Pulse(sender, iteration_s=0.3)  # type: ignore[arg-type]
    deadline = time.monotonic() + 60
    while "the scheduler's loop has not turned for 0.3 s" not in caplog.text:
        assert time.monotonic() < deadline, "the loop never turned"
        time.sleep(0.01)
    assert not sender.sends_within(3 * PULSE_PERIOD_S)
    deadline = time.monotonic() + 60
    while not sender.sends_within(0.05):
        pulse.begin_iteration()
        assert time.monotonic() < deadline
    pulse.close()


def test_it_vouches_for_a_loop_that_stood_still_with_everything_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A virtual machine that is moved, say: by the clock an iteration of the loop takes hours then."""
    now = 100.0
    monkeypatch.setattr("workers.channel.heartbeats.AwakeClock", lambda: AwakeClock(lambda: now))
    sender = Sender()
    pulse = Pulse(sender, iteration_s=9.0)  # type: ignore[arg-type]
    assert sender.sent or sender.sends_within(60)
    now += 7200.0
    for _ in range(3):  # it has looked at the clock since
        assert sender.sends_within(60)
    pulse.close()
    assert caplog.text == ""


def test_it_is_silent_once_it_is_closed() -> None:
    sender = Sender()
    pulse = Pulse(sender, iteration_s=3600)  # type: ignore[arg-type]
    assert sender.sent or sender.sends_within(60)
    pulse.close()
    assert not sender.sends_within(3 * PULSE_PERIOD_S)
