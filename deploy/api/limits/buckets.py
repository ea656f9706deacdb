"""Limits per minute, as token buckets: how much may still be taken, when there is room again, and what a request takes
while it generates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import NamedTuple

from deploy.api.limits.admission import ROUNDING, Counted

SPILT_S = 2.0
"""Seconds for which a full bucket holds what spills, for what is taken little by little."""
LATE_S = 2.0
"""Seconds by which what others took may be heard of late; for as long it holds more for them."""


class Flow(NamedTuple):
    """Tokens or requests that something running will still take, and how fast."""

    left: float
    """Most tokens that are still to be taken."""
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
        """Amount that this process has taken in all."""
        self._rate = per_minute / 60.0
        self._clock = clock
        self._at, self._held = clock(), float(per_minute)
        """When the bucket is full, what overflows is held for a while, and is not part of `room`: a step gives a
        sequence several tokens at once, and those of other processes become known later."""

    @property
    def room(self) -> float:
        """Amount that may be taken now."""
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
        """Take an amount that another process took."""
        self._change(-amount)

    def settle(self, held: float, age: float) -> None:
        """Lower the level to what another process knew of `age` seconds ago, if that is less."""
        self._held = min(self.held, held + age * self._rate)

    @property
    def full_in(self) -> float:
        """Seconds until all of it is there again."""
        return (self.capacity - self.room) / self._rate


def duration(seconds: float) -> str:
    """Format a duration as in OpenAI's x-ratelimit-reset headers: 6m0s, 1.5s, 20ms."""
    if seconds < 1:
        return f"{math.ceil(max(seconds, 0) * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds * 10) / 10, 60)
    text = f"{rest:.1f}".removesuffix(".0")
    return f"{minutes:.0f}m{text}s" if minutes else f"{text}s"


WINDOW_S = 5.0
"""Seconds over which it is found how fast a request generates at present."""
STEP_TOKENS = 8
"""Tokens that one step may give a sequence: by so many a count may be behind what is generated."""


class Meter:
    """One request while it runs: what it has generated is taken from its key's tokens before anybody looks at them, so
    that nothing is counted per token."""

    def __init__(self, choices: Sequence[Counted], clock: Callable[[], float], counted: int = 0) -> None:
        """`clock`: seconds. `counted`: tokens of it that are taken already."""
        self.choices = choices
        self.counted = counted
        self._clock = clock
        self._began: float | None = None
        self._window: tuple[float, Sequence[int]] = (0.0, ())
        """Start of the window, and how much each sequence had generated by then."""
        self._recent = 0.0

    def began(self) -> None:
        """A sequence of it has its first token."""
        if self._began is None:
            self._began = self._clock()
            self._window = (self._began, [0] * len(self.choices))

    def new(self) -> int:
        """Tokens generated since the last call."""
        generated = sum(choice.generated for choice in self.choices)
        before, self.counted = self.counted, max(self.counted, generated)
        since, then = self._window
        if self._began is not None and (seconds := self._clock() - since) >= WINDOW_S:
            self._recent = self._fastest(then, seconds)
            self._window = (since + seconds, [choice.generated for choice in self.choices])
        return self.counted - before

    @property
    def pace(self) -> float | None:
        """Tokens that the fastest of its sequences generates in a second: since the first began or lately, whichever
        is more. None before that."""
        if self._began is None:
            return None
        return max(self._fastest([0] * len(self.choices), self._clock() - self._began), self._recent)

    def _fastest(self, then: Sequence[int], seconds: float) -> float:
        most = max(choice.generated - before for choice, before in zip(self.choices, then, strict=True))
        return (most + STEP_TOKENS) / seconds if seconds > 0 else inf

    def flow(self, usual: float) -> Flow:
        """Return the tokens that it may still generate, at the `usual` pace of a sequence where it has not begun."""
        going = [choice for choice in self.choices if choice.finish is None]
        left = sum(max(choice.limit - choice.generated, 0) for choice in going)
        pace = self.pace
        return Flow(left, len(going) * (usual if pace is None else pace))


def flows(meters: Iterable[Meter], usual: float) -> list[Flow]:
    """Return the tokens that running requests may still generate. Requests that have not begun are assumed to become as
    fast as the fastest of the others, or as `usual`. Where that is 0, nothing is known, and all of their tokens may
    come at once."""
    known = [meter for meter in meters if any(choice.finish is None for choice in meter.choices)]
    fastest = max((pace for meter in known if (pace := meter.pace) is not None), default=0.0)
    found = [meter.flow(max(fastest, usual) or inf) for meter in known]
    return [flow for flow in found if flow.left]
