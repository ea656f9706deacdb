"""Signs of life of ranks and of the scheduler, from threads of their own, and the clock of those who listen for them,
which stands still while the listener itself cannot look."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Final

from workers.channel.sockets import Addresses, Sender, connect_sender, connect_subscriber
from workers.protocol.messages import Figures, Heartbeat

logger = logging.getLogger(__name__)

HEARTBEAT_PERIOD_S = 0.25
PULSE_PERIOD_S = 0.1
MOST_BETWEEN_LOOKS_S: Final = 0.5
"""Seconds that count between two looks at the most. Listeners look more often where nothing holds them up."""


class AwakeClock:
    """Seconds in which this process ran, as far as it looked at the clock.

    A virtual machine that is moved to another host, or a machine that has no processor to spare for seconds, holds up
    the watcher and whom it watches alike. What was not heard in that time says nothing: those who were silent because
    everything stood still would be given up at the first look behind it, although they live.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds that never go backwards."""
        self._clock = clock
        self._looked = clock()
        self.time = 0.0
        """As of the last look."""

    def look(self) -> float:
        """Count what has passed since the last look, MOST_BETWEEN_LOOKS_S at the most. Return `time`."""
        now = self._clock()
        self.time += min(now - self._looked, MOST_BETWEEN_LOOKS_S)
        self._looked = now
        return self.time


class HeartbeatThread:
    """Tells the scheduler a few times a second that this process lives, and ends the process when the scheduler no
    longer does. A thread of its own, so that a busy main thread, or one stuck in a collective, changes neither."""

    def __init__(self, addresses: Addresses, rank: int, silence_s: float) -> None:
        """`silence_s`: seconds without a sign of the scheduler after which this process exits (code 1), counted from
        the first sign."""
        self._addresses, self._rank, self._silence_s = addresses, rank, silence_s
        self.figures: Callable[[], Figures] = dict
        """Returns the figures that heartbeats carry. It is called in this thread."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        sender = connect_sender(self._addresses.results, self._addresses.keys)
        pulse = connect_subscriber(self._addresses.pulse, Heartbeat, self._addresses.keys)
        heard: float | None = None
        clock = AwakeClock()
        while not self._stop.is_set():
            sender.send(Heartbeat(self._rank, self.figures()))
            now = clock.look()
            if pulse.receive(timeout_ms=int(HEARTBEAT_PERIOD_S * 1000)) is not None:
                heard = clock.look()
                self._stop.wait(HEARTBEAT_PERIOD_S)
                while pulse.receive(timeout_ms=0) is not None:
                    pass
            elif heard is not None and now - heard > self._silence_s:
                logger.error("rank %d: the scheduler has been silent for %.1f s; exiting", self._rank, self._silence_s)
                os._exit(1)
        sender.close(linger_ms=0)
        pulse.close()

    def close(self) -> None:
        """Stop beating."""
        self._stop.set()
        self._thread.join(timeout=1.0)


class Pulse:
    """Tells ranks and front a few times a second that the scheduler lives, also while an iteration of its loop takes
    long. It vouches for a loop that turns: once one iteration takes longer than any may, it falls silent, and what is
    silent is given up as if it were dead."""

    def __init__(self, sender: Sender, iteration_s: float) -> None:
        """Begins at once. `sender` is the thread's alone until `close`. `iteration_s`: seconds that an iteration may
        take, of those in which the thread runs: while a machine stands still, so does the loop, which is not stuck."""
        self._sender, self._iteration_s = sender, iteration_s
        self._iterations = 0
        """Written by the loop alone. The thread sees in it that the loop turns; the clock is the thread's."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="pulse", daemon=True)
        self._thread.start()

    def begin_iteration(self) -> None:
        """The loop begins another iteration."""
        self._iterations += 1

    def close(self) -> None:
        """Fall silent, and leave the sender to whoever closes it."""
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        told = False
        clock = AwakeClock()
        begun, iterations = clock.time, self._iterations
        while not self._stop.is_set():
            now = clock.look()
            if iterations != self._iterations:
                begun, iterations = now, self._iterations
            if now - begun < self._iteration_s:
                self._sender.send(Heartbeat(-1))
                told = False
            elif not told:
                logger.error("the scheduler's loop has not turned for %.1f s; it is given up", self._iteration_s)
                told = True
            self._stop.wait(PULSE_PERIOD_S)
