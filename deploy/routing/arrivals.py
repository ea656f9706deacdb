"""The requests that are present at a replica, one by one, and the load it reports to routers.

The scheduler's figures come a few times a second and lag behind what the front has taken in: reading, parsing and
tokenizing a burst takes longer than routing it. So the front counts every request itself, from its arrival to the end
of its answer; of the scheduler's figures only its progress with long prompts is used. Every routed request carries a
routing record (router, sequence number, tokens, sequences), and a report says which sequence numbers it includes, so
that a router counts what it sent either as sent or as reported, never twice.
"""

from __future__ import annotations

import re
import struct
import time
from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Final

from deploy.routing.pace import StepClock
from deploy.routing.policy import DISK_TOKEN_COST, HOST_TOKEN_COST, OUT_OF_SERVICE_TOKENS, Load
from kernels.page import PAGE_TOKENS
from workers.protocol.messages import EngineStats
from workers.protocol.request import KEY_BYTES, NO_ROOT, pack_keys, unpack_keys

ROUTING_HEADER = "x-serve-router-ticket"
"""HAProxy drops client-supplied headers of this prefix."""
_ROUTING_RECORD = re.compile(r"([0-9A-Za-z]{1,32})/([0-9]{1,15})/([0-9]{1,12})/([0-9]{1,4})")
"""Anybody may write one where no HAProxy stands in front: digits of other scripts, or a thousand of them, make none."""
RECENT_S = 0.5
"""Seconds after which a request's tokens are in the scheduler's figures."""
ROUTERS_KEPT = 64


@dataclass(frozen=True)
class RoutingRecord:
    """Record that a router attaches to a request it sends."""

    router: str
    number: int
    tokens: int
    rows: int

    @property
    def ticket(self) -> str:
        """Names the request."""
        return f"{self.router}/{self.number}"

    def header(self) -> str:
        """Write the record as a header value."""
        return f"{self.router}/{self.number}/{self.tokens}/{self.rows}"

    @staticmethod
    def parse(value: str) -> RoutingRecord | None:
        """Parse a header value; None when it is not a routing record."""
        found = _ROUTING_RECORD.fullmatch(value)
        return None if found is None else RoutingRecord(found[1], *map(int, found.groups()[1:]))


@dataclass(eq=False)
class Arrival:
    """Arrival of an HTTP request, while it is answered."""

    at: float
    """Seconds, of the front's clock."""
    routed: bool
    """A router said what to expect; otherwise its sequences count once they are handed to the engine."""
    rows: int
    """Sequences that are not finished."""
    unstarted: int
    """Its sequences that have no first token yet."""
    tokens: int
    """Prompt tokens to be computed for those."""


class Arrivals:
    """Every request between its arrival and its end, and the sequence numbers seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._present: set[Arrival] = set()
        self._current: ContextVar[Arrival | None] = ContextVar("arrival", default=None)
        self._steps = StepClock(clock)

    def arrive(self, routing_record: RoutingRecord | None) -> Arrival:
        """A request came in. What its task and its children tell next is about it, until `leave`."""
        if routing_record is None:
            arrival = Arrival(self._clock(), False, 0, 0, 0)
        else:
            arrival = Arrival(self._clock(), True, routing_record.rows, routing_record.rows, routing_record.tokens)
            self._seen[routing_record.router] = max(routing_record.number, self._seen.get(routing_record.router, 0))
            self._seen.move_to_end(routing_record.router)
            if len(self._seen) > ROUTERS_KEPT:
                self._seen.popitem(last=False)
        self._present.add(arrival)
        self._current.set(arrival)
        return arrival

    def leave(self, arrival: Arrival) -> None:
        """Remove a request that was answered, or whose client left."""
        self._present.discard(arrival)

    def sequence_started(self, prompt_tokens: int) -> None:
        """A sequence of the current request was handed to the engine."""
        arrival = self._current.get()
        if arrival is not None and not arrival.routed:
            arrival.rows += 1
            arrival.unstarted += 1
            arrival.tokens += prompt_tokens

    def first_token(self) -> None:
        """A sequence of the current request got its first token."""
        arrival = self._current.get()
        if arrival is not None and arrival.unstarted > 0:
            arrival.tokens -= arrival.tokens // arrival.unstarted
            arrival.unstarted -= 1

    def sequence_finished(self) -> None:
        """A sequence of the current request ended."""
        arrival = self._current.get()
        if arrival is not None:
            arrival.rows = max(arrival.rows - 1, 0)

    def load(self, stats: EngineStats) -> Load:
        """Return the load to report now. `stats`: the scheduler's newest figures."""
        self._steps.add(stats)
        recent = self._clock() - RECENT_S
        counted = sum(arrival.tokens for arrival in self._present)
        young = sum(arrival.tokens for arrival in self._present if arrival.at > recent)
        return Load(
            backlog=min(counted, stats.prefill_backlog + young),
            rows=sum(arrival.rows for arrival in self._present),
            pages_free=stats.pages_free if stats.pages_total else None,
            keys=frozenset(unpack_keys(stats.prefix_keys)),
            host_keys=frozenset(unpack_keys(stats.host_keys)),
            host_token_cost=host_token_cost(stats),
            disk_keys=frozenset(unpack_keys(stats.disk_keys)),
            disk_token_cost=disk_token_cost(stats),
            root=stats.key_root or NO_ROOT,
            seen=dict(self._seen),
            at=time.time(),
            step_times=self._steps.times(),
        )


def host_token_cost(stats: EngineStats) -> float:
    """What a token whose page is copied back from host memory costs, in prompt tokens: the time that such copies took,
    over the time that steps with prompts took, token by token."""
    return _token_cost(stats, stats.host_loaded_pages, stats.host_load_seconds, HOST_TOKEN_COST)


def disk_token_cost(stats: EngineStats) -> float:
    """What a token costs whose page is read from disk, and then copied back from host memory."""
    read = _token_cost(stats, stats.disk_loaded_pages, stats.disk_load_seconds, DISK_TOKEN_COST)
    return min(read + host_token_cost(stats), 1.0)


def _token_cost(stats: EngineStats, pages: int, seconds: float, unknown: float) -> float:
    loaded, computed = pages * PAGE_TOKENS, stats.prompt_tokens - stats.cached_tokens
    computing = sum(part.total for kind, part in stats.step_seconds.items() if kind != "decode")
    if loaded <= 0 or computed <= 0 or computing <= 0:
        return unknown
    return min(seconds / loaded * computed / computing, 1.0)


def out_of_service(load: Load) -> Load:
    """The load to report while requests would wait for an engine that is being started: whoever has another replica to
    choose chooses that, and no prefix is cached."""
    nothing: frozenset[bytes] = frozenset()
    backlog = load.backlog + OUT_OF_SERVICE_TOKENS
    return replace(load, backlog=backlog, pages_free=0, keys=nothing, host_keys=nothing, disk_keys=nothing)


_ROOT_MARK: Final = b"rootkeys"
"""Begins a report's keys, and the root follows: to an earlier router, which may still be there during an update, all
three are keys like others, and a field of its own would be an error. As long as such a key."""
_STEP_MARK: Final = "step "
"""Begins the names under which times of steps stand beside sequence numbers, in nanoseconds: no router has such a name,
so an earlier one does not look at them, while a field of its own would be an error."""


_DISK_MARK: Final = b"diskkeys"
"""Behind it, among the keys of pages in host memory, are the cost of a token on disk, as 64 bits, and the keys of pages
on disk: to an earlier router these are in host memory."""


def load_to_report(load: Load) -> dict[str, Any]:
    """Convert a load to the form in which Serve carries it to routers."""
    host = pack_keys(sorted(load.host_keys))
    if load.disk_keys:
        host += _DISK_MARK + struct.pack("<d", load.disk_token_cost) + pack_keys(sorted(load.disk_keys))
    return {
        "backlog": load.backlog,
        "rows": load.rows,
        "pages_free": load.pages_free,
        "keys": _ROOT_MARK + load.root + pack_keys(sorted(load.keys)),
        "host_keys": host,
        "host_token_cost": load.host_token_cost,
        "seen": {**load.seen, **{_STEP_MARK + size: round(s * 1e9) for size, s in load.step_times.items()}},
        "at": load.at,
    }


def load_from_report(report: dict[str, Any]) -> Load:
    """The inverse; an empty report (a replica that has not answered yet) is an idle replica."""
    if not report:
        return Load()
    # During an update a router may be newer than a replica. Those of earlier versions name no root: their keys are made
    # in another way, and say nothing here.
    packed, root, host = report["keys"], NO_ROOT, b""
    if isinstance(packed, bytes) and packed.startswith(_ROOT_MARK):
        begin = len(_ROOT_MARK)
        root, packed, host = packed[begin : begin + KEY_BYTES], packed[begin + KEY_BYTES :], report["host_keys"]
    else:
        packed = b""
    seen, times = {}, {}
    for name, number in report["seen"].items():
        if name.startswith(_STEP_MARK):
            times[name.removeprefix(_STEP_MARK)] = number / 1e9
        else:
            seen[name] = number
    keys = {"keys": frozenset(unpack_keys(packed)), "root": root}
    known: dict[str, Any] = {**keys, "seen": seen, "step_times": times}
    in_host = unpack_keys(host)
    if _DISK_MARK in in_host:
        mark = in_host.index(_DISK_MARK)
        known["disk_token_cost"] = struct.unpack("<d", in_host[mark + 1])[0]
        known["disk_keys"] = frozenset(in_host[mark + 2 :])
        in_host = in_host[:mark]
    return Load(**{**report, **known, "host_keys": frozenset(in_host)})
