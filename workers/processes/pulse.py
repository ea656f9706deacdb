"""Signs of life of the scheduler, from a thread of its own."""

from __future__ import annotations

import logging
import threading

from workers.channel.awake_clock import AwakeClock
from workers.channel.sockets import Sender
from workers.protocol.messages import Heartbeat

logger = logging.getLogger(__name__)

PULSE_PERIOD_S = 0.1


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
