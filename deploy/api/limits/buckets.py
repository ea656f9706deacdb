"""Limits per minute: how much may still be taken, and when there is room again."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

ROUNDING = 1e-6
"""Smaller lacks are those of floating-point numbers."""
PACE_OF = 64
"""Ends of sequences by which the next ones are foretold."""
SPILT_S = 2.0
"""Seconds for which a full bucket holds what spills, for what is taken little by little."""
LATE_S = 2.0
"""Seconds by which what others took may be heard of late; for as long it holds more for them."""
LONGEST_WAIT_S = 60.0
"""Nobody knows more of what will be then."""


class Flow(NamedTuple):
    """What is still to be taken by something that runs."""

    left: float
    """At the most."""
    pace: float
    """A second; infinite where nothing is known of it."""


class Bucket:
    """Holds what a minute allows and refills evenly, so that a minute's worth may come at once and the rest at the
    limit's pace. What is known only later, such as generated tokens, may take it below zero: then it first has to
    refill."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self.capacity = per_minute
        self.taken = 0.0
        """In all, by this process."""
        self._rate = per_minute / 60.0
        self._clock = clock
        self._at, self._held = clock(), float(per_minute)
        """Of a full bucket what spills is held for a while, and is in no `room`: steps give a sequence several tokens
        at once, and those of other processes are heard of later."""

    @property
    def room(self) -> float:
        """What may be taken now."""
        self._change(0.0)
        return min(self._held, self.capacity)

    @property
    def held(self) -> float:
        """Room, and what a full bucket holds beyond."""
        self._change(0.0)
        return self._held

    def _change(self, amount: float, spilt_s: float = SPILT_S + LATE_S) -> None:
        now = self._clock()
        held = self._held + (now - self._at) * self._rate + amount
        self._at, self._held = now, min(held, self.capacity + spilt_s * self._rate)

    def wait(self, amount: float, flows: Sequence[Flow] = ()) -> float:
        """Seconds until there is room for `amount`, 0 where there is, though `flows` take theirs meanwhile. What is
        more than a minute's worth has room once the bucket is full."""
        lack = min(amount, self.capacity) - self.room
        if lack <= ROUNDING:
            return 0.0
        pace = sum(flow.pace for flow in flows)
        wait = 0.0
        # One after the other ends. The more have ended, the faster it refills, so once it does it goes on to.
        for left, own in sorted(flows, key=lambda flow: flow.left / flow.pace):
            if math.isinf(own):
                lack += left
                pace = sum(flow.pace for flow in flows if not math.isinf(flow.pace))
                continue
            ends, gain = left / own, self._rate - pace
            if lack <= gain * (ends - wait):
                return wait + lack / gain
            lack, wait, pace = lack - gain * (ends - wait), ends, pace - own
        return wait + lack / self._rate

    def take(self, amount: float) -> None:
        """Take it, whether there is room or not; a negative amount gives back."""
        self.taken += amount
        self._held = self.room - amount

    def take_evenly(self, amount: float) -> None:
        """Take what was used little by little since anybody last looked."""
        if amount > 0:
            self.taken += amount
            self._change(-amount, SPILT_S)

    def taken_elsewhere(self, amount: float) -> None:
        """Another process took it."""
        self._change(-amount)

    def settle(self, held: float, age: float) -> None:
        """Another process knew of no more than this `age` seconds ago."""
        self._held = min(self.held, held + age * self._rate)

    @property
    def full_in(self) -> float:
        """Seconds until all of it is there again."""
        return (self.capacity - self.room) / self._rate


class Pace:
    """How fast sequences have ended lately: what is known of when others will."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=PACE_OF)

    def ended(self, sequences: int) -> None:
        """So many have just ended."""
        self._ends.extend([self._clock()] * min(sequences, PACE_OF))

    def wait(self, sequences: int) -> float:
        """Seconds in which so many more will end at that pace, `LONGEST_WAIT_S` at the most; 0 if none is known."""
        if not self._ends:
            return 0.0
        seconds = self._clock() - self._ends[0]
        return min(sequences * seconds / len(self._ends), LONGEST_WAIT_S)


def whole_seconds(seconds: float) -> int:
    """As a Retry-After header says it: never too early."""
    return max(math.ceil(seconds - ROUNDING), 1)


def duration(seconds: float) -> str:
    """As OpenAI's x-ratelimit-reset headers say it: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(max(seconds, 0) * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    text = f"{rest:.1f}".removesuffix(".0")
    return f"{minutes:.0f}m{text}s" if minutes else f"{text}s"
