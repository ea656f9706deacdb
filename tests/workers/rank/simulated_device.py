"""A clock, a processor and a device that are none: what waiting for steps costs, and how late it finds their ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

LOOK_S = 2e-6
"""Seconds that a look at the device takes."""
WAKE_S = 25e-6
"""Processor seconds for a sleep and the way back."""


@dataclass
class Host:
    """A process, and the time."""

    oversleep: Callable[[], float] = lambda: 85e-6
    """Returns how much longer than asked the next sleep takes."""
    now: float = 0.0
    busy: float = 0.0
    sleeps: int = 0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> None:
        self.now += seconds
        self.busy += seconds

    def sleep(self, seconds: float) -> None:
        assert seconds > 0.0
        self.sleeps += 1
        self.now += seconds + self.oversleep()
        self.busy += WAKE_S


@dataclass
class Device:
    """Computes one step after the other."""

    host: Host
    free_at: float = 0.0
    idle: float = 0.0
    """Seconds for which it had nothing to do since the first step."""
    events: list[End] = field(default_factory=list)

    def launch(self, seconds: float) -> End:
        if self.events:
            self.idle += max(self.host.now - self.free_at, 0.0)
        self.free_at = max(self.free_at, self.host.now) + seconds
        self.events.append(End(self.host, self.free_at))
        return self.events[-1]


@dataclass
class End:
    """An event. `torch.cuda.Event` as far as a rank knows it."""

    host: Host
    at: float

    def query(self) -> bool:
        self.host.work(LOOK_S)
        return self.host.now >= self.at

    def synchronize(self) -> None:
        self.host.work(max(self.at - self.host.now, 0.0) + LOOK_S)
