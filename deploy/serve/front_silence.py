"""Whether a front hangs that gives no sign of life.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import os

BEAT_S = 0.25
"""Seconds between two signs of life of a front."""
LEAST_SILENCE_S = 4 * BEAT_S
"""However short the patience: a sign may come a little late."""
STOPPED_S, BLOCKED_S, BUSY_S = 1.0, 2.0, 3.0
"""Seconds after which a silent front is given up where the kernel says why it is silent: it was stopped; its loop waits
for something, and was not given the processor once in this time; its loop computes, and has had the processor for so
long. A busy machine is none of these: whoever waits for the processor neither sleeps nor has had it. The longest turn
of a loop that was seen takes 0.05 s (`bench/front_stalls.py`)."""


class Silence:
    """How long a front has given no sign of life, and whether it hangs."""

    def __init__(self, front: int, silence_s: float) -> None:
        """`front`: its process. `silence_s`: the longest silence."""
        self._front, self._silence_s = front, max(silence_s, LEAST_SILENCE_S)
        self._thread = 0
        self._quiet = self._stopped = self._blocked = 0.0
        self._before: tuple[str, float, int] | None = None
        """State, seconds of the processor and context switches of its thread when it was looked at last."""
        self._had: float | None = None
        """Seconds of the processor at the first look that the kernel answered since the last sign; None before it."""
        self._counts = False
        """Whether this kernel counts context switches."""

    def sign(self) -> None:
        """It gave one."""
        self._quiet = self._stopped = self._blocked = 0.0
        self._had = None

    def beat(self, thread: int) -> None:
        """It gave the one that its loop gives, in this thread (`threading.get_native_id`); 0: its loop ends, and how
        long it is silent from here on says nothing."""
        self._thread = thread
        if self._before is None:
            self._before = self._look()

    def grows(self) -> str:
        """`BEAT_S` passed without a sign. Return what is wrong with the front, empty as long as nothing is.

        Time is counted in these, and not measured: on a machine that stood still for a while nobody gave a sign."""
        if not self._thread:
            return ""
        self._quiet += BEAT_S
        if (now := self._look()) is not None:
            state, had, switches = now
            before, self._before = self._before, now
            self._had = had if self._had is None else self._had
            self._counts |= before is not None and switches > before[2]
            self._stopped = self._stopped + BEAT_S if state == "T" else 0.0
            sleeps = self._counts and state == "S" and before == now
            self._blocked = self._blocked + BEAT_S if sleeps else 0.0
            if self._stopped >= STOPPED_S:
                return f"was stopped {self._stopped:g} s ago"
            if self._blocked >= BLOCKED_S:
                return f"has waited for {self._blocked:g} s in its loop"
            if had - self._had >= BUSY_S:
                return f"has computed for {had - self._had:.1f} s in its loop"
        return f"was silent for {self._quiet:g} s" if self._quiet >= self._silence_s else ""

    def _look(self) -> tuple[str, float, int] | None:
        """State, seconds of the processor and context switches of its loop's thread; None where they are not known."""
        task = f"/proc/{self._front}/task/{self._thread}"
        try:
            with open(f"{task}/stat") as stat, open(f"{task}/status") as status:
                fields = stat.read().rpartition(")")[2].split()
                switches = [int(line.split()[1]) for line in status if "ctxt_switches:" in line]
            return fields[0], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), sum(switches)
        except (OSError, ValueError, IndexError):
            return None
