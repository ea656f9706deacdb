"""Which replica a request costs least on: pure arithmetic on reported load, what was sent since, and prompt prefixes.

The unit of cost is a prompt token that is computed: cost = tokens of the request's own prompt that the replica has not
cached + a small part of those that it has in host memory or on disk alone + half of the tokens that are queued for
prefill before the request + `row_tokens` for every request that decodes or waits. Queued tokens keep this request
waiting; its own ones also keep those waiting that come next, and take pages from what is cached. A shared prefix
therefore draws a request to where its pages are until the queue there is longer by twice the prefill that it saves. A
replica that lacks pages for a request comes last, but for one that has most of its prompt: there it waits for others to
end, and elsewhere all of it would be computed. Where a replica takes several times as long as another for equal steps
(`deploy.routing.pace`), all of that and the request's own `row_tokens` count so many times.

A session stays where its first prompt was sent, and all that is cached of that one is what others begin with, too, such
as a system prompt. Where only the cost above decided, all sessions would gather on the replica that computed it first,
and others would be idle. So a replica that lacks it costs less while the one that has it decodes more than twice as
many rows (`SESSION_ROW_TOKENS`): it is computed once more, and all sessions that begin later find it in both places.
What is common is seen from prompts (`CommonBeginnings`): several that go on differently had the same page as the last
one that was cached. Turns of a session do not: each finds what the one before it added.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from deploy.routing.common_beginnings import CommonBeginnings
from deploy.routing.pace import StepTimes, paces
from kernels.page import PAGE_TOKENS, pages_for
from workers.protocol.request import NO_ROOT, PAGE_BYTES, REPORTED_BYTES, Prompt, salted_root

REMEMBER_S = 10.0
"""Seconds a sent prefix counts as cached before the replica itself reports it."""
FORGET_S = 5.0
"""Seconds after which something sent counts as known to the replica, whatever it reports."""
STALE_S = 30.0
"""Seconds for which a replica's last report of its prefix cache is believed while no other comes: what it names may
have been evicted since."""
TRANSIT_S = 0.05
"""Seconds within which a sent request reaches its replica, where sequence numbers cannot tell."""

OUT_OF_SERVICE_TOKENS = 10**9
"""Prompt tokens that a replica without an engine adds to its backlog: more than any other has."""
QUEUED_TOKEN_COST = 0.5
"""What a token costs that is queued before a request, beside one that is computed for it."""
HOST_TOKEN_COST = 0.02
"""What a token in host memory costs where nothing was copied yet, in prompt tokens."""
DISK_TOKEN_COST = 0.2
"""What a token on disk costs where nothing was read yet."""

SESSION_ROW_TOKENS = 4096
"""What a session that begins costs for each row too many beside it, in prompt tokens: about what two answers of 600
tokens take longer in a batch of one row more."""

R = TypeVar("R", bound=Hashable)


NOTHING = Prompt(b"")


@dataclass(frozen=True)
class RequestFeatures:
    """Features of a request that the router knows."""

    tokens: int
    """Tokens of its prompt."""
    prompt: Prompt = NOTHING
    """The prompt, or as much of its beginning as is known for certain; of several the first."""
    rows: int = 1
    """Sequences it generates."""
    salt: bytes = b""
    """As in `workers.protocol.messages.Request`."""
    _keys: dict[bytes, list[bytes]] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.tokens < 0 or self.rows < 1 or self.prompt.length > self.tokens:
            raise ValueError(f"{self.rows} rows, a prompt of {self.prompt.length} in {self.tokens} tokens")

    def keys(self, root: bytes) -> list[bytes]:
        """Keys of the prompt's full pages, first page first, as a replica reports them whose keys are rooted in
        `root`: replicas of another model, as during an update, have others. Hashed once for each root."""
        known = self._keys.get(root)
        if known is None:
            keys = self.prompt.keys(salted_root(root, self.salt))
            known = self._keys[root] = [key[:REPORTED_BYTES] for key in keys]
        return known


@dataclass(frozen=True)
class Load:
    """Load that a replica reports."""

    backlog: int = 0
    """Prompt tokens queued or partly prefilled that are still to be computed."""
    rows: int = 0
    """Requests decoding or waiting."""
    pages_free: int | None = None
    """Pages that are free; None: not reported yet."""
    keys: frozenset[bytes] = frozenset()
    """Keys of pages in its prefix cache, 8 bytes of each: a choice of them, of which each vouches for all pages before
    it."""
    seen: Mapping[str, int] = field(default_factory=dict)
    """Highest sequence number received, by router: what these figures already include."""
    at: float = 0.0
    """Time at which the figures were taken, in seconds. In a replica's report it is Unix time; in a router's arithmetic
    it is the time of the router's own clock."""
    host_keys: frozenset[bytes] = frozenset()
    """Like `keys`, of pages in host memory, which are copied back to be read."""
    host_token_cost: float = HOST_TOKEN_COST
    """What a token costs whose page is copied back, in prompt tokens."""
    disk_keys: frozenset[bytes] = frozenset()
    """Like `keys`, of pages on disk, which are read into host memory and then copied back."""
    disk_token_cost: float = DISK_TOKEN_COST
    """What a token costs whose page is read from disk, in prompt tokens."""
    root: bytes = NO_ROOT
    """What its keys are rooted in."""
    step_times: StepTimes = field(default_factory=dict)
    """Seconds that its newest steps took, by kind and size."""


@dataclass(frozen=True)
class Sent:
    """Request that this router sent."""

    sequence_number: int
    at: float
    tokens: int
    """Prompt tokens it makes the replica compute."""
    pages: int
    rows: int


@dataclass
class _Account:
    sent: list[Sent] = field(default_factory=list)
    recent: OrderedDict[bytes, float] = field(default_factory=OrderedDict)
    report_at: float | None = None
    """Time at which the newest report was taken."""
    report_known: float = 0.0
    """Time at which it became known here, by this router's clock."""


def cached_tokens(features: RequestFeatures, keys: frozenset[bytes] | Mapping[bytes, float], root: bytes) -> int:
    """Tokens of the prompt that are cached where `keys`, rooted in `root`, are. The keys are chained: the deepest that
    is there vouches for the pages before it, of which few need be among `keys`.

    The last prompt token is computed in any case.
    """
    asked = features.keys(root) if keys else []
    for index in range(len(asked) - 1, -1, -1):
        if asked[index] in keys:
            return min((index + 1) * PAGE_TOKENS, features.tokens - 1)
    return 0


@dataclass(frozen=True, order=True)
class Cost:
    """Compared field by field."""

    crowded: bool
    """The replica lacks the pages for the request, which would wait for others to finish or preempt them, and would
    have to compute most of its prompt."""
    tokens: float


@dataclass(frozen=True)
class _Seen:
    """What a replica has of a prompt and has to do, by its report and by what was sent since."""

    cached: int
    """Tokens on the device."""
    copied: int
    """Tokens behind those that are in host memory."""
    read: int
    """Tokens behind those that are on disk."""
    queued: int
    rows: int
    pages_sent: int

    @property
    def there(self) -> int:
        """Tokens of the prompt that it has anywhere."""
        return self.cached + self.copied + self.read


class InFlightAccounting(Generic[R]):
    """Keeps account of what this router sent to each replica that the replica's report cannot include yet."""

    def __init__(self, router: str, row_tokens: float) -> None:
        """`router`: the name under which replicas report this router's sequence numbers."""
        self.router, self.row_tokens = router, row_tokens
        self._accounts: dict[R, _Account] = {}
        self._beginnings = CommonBeginnings()
        self._sequence_number = 0

    @property
    def sent(self) -> int:
        """Requests recorded so far."""
        return self._sequence_number

    def keep(self, replicas: Sequence[R]) -> None:
        """Forget every other replica."""
        wanted = set(replicas)
        for gone in set(self._accounts) - wanted:
            del self._accounts[gone]

    def costs(
        self, loads: Mapping[R, Load], features: RequestFeatures, now: float, pace: Mapping[R, float]
    ) -> dict[R, Cost]:
        """Cost of `features` on each replica, in the order of `loads`. `pace`: how many times as long as others each
        takes."""
        seen = {replica: self._seen(replica, load, features, now) for replica, load in loads.items()}
        spared = self._spared(seen, loads, features)
        return {
            replica: self._cost(seen[replica], load, features, pace[replica], spared[replica])
            for replica, load in loads.items()
        }

    def cost(self, replica: R, load: Load, features: RequestFeatures, now: float, pace: float = 1.0) -> Cost:
        """Cost of `features` on `replica`, in prompt tokens, without a look at others. `pace`: how many times as long
        as others it takes."""
        return self._cost(self._seen(replica, load, features, now), load, features, pace, 0.0)

    def _seen(self, replica: R, load: Load, features: RequestFeatures, now: float) -> _Seen:
        account = self._accounts.setdefault(replica, _Account())
        self._settle(account, load, now)
        return _Seen(
            *self._cached(account, load, features, now),
            load.backlog + sum(sent.tokens for sent in account.sent),
            load.rows + sum(sent.rows for sent in account.sent),
            sum(sent.pages for sent in account.sent),
        )

    def _spared(self, seen: Mapping[R, _Seen], loads: Mapping[R, Load], features: RequestFeatures) -> Mapping[R, float]:
        """What each replica costs less, in prompt tokens, where nothing of a prompt is cached anywhere but what others
        begin with, too: a part of the tokens that it lacks and another replica has, the more rows that one has beyond
        twice its own."""
        most = max((one.there for one in seen.values()), default=0)
        having = [replica for replica, one in seen.items() if one.there == most]
        nothing = dict.fromkeys(loads, 0.0)
        if not most:
            return nothing
        pages = pages_for(most)
        key = features.keys(loads[having[0]].root)[pages - 1]
        if not self._beginnings.is_common(key, features.prompt.packed[pages * PAGE_BYTES : (pages + 1) * PAGE_BYTES]):
            return nothing
        fewest = min(seen[replica].rows for replica in having)
        return {
            replica: min(most - one.there, SESSION_ROW_TOKENS * max(fewest - 2 * one.rows, 0))
            for replica, one in seen.items()
        }

    def _cost(self, seen: _Seen, load: Load, features: RequestFeatures, pace: float, spared: float) -> Cost:
        computed = features.tokens - seen.there
        crowded = False
        if load.pages_free is not None and computed > features.tokens / 2:
            crowded = pages_for(features.tokens - seen.cached) > load.pages_free - seen.pages_sent
        moved = seen.copied * load.host_token_cost + seen.read * load.disk_token_cost
        tokens = computed - spared + moved + QUEUED_TOKEN_COST * seen.queued + self.row_tokens * seen.rows
        return Cost(crowded, pace * tokens + (pace - 1) * self.row_tokens * features.rows)

    def record(self, replica: R, load: Load, features: RequestFeatures, now: float) -> tuple[int, int]:
        """Note that `features` goes to `replica`; returns its sequence number, and the tokens it will compute there."""
        account = self._accounts.setdefault(replica, _Account())
        cached, copied, read = self._cached(account, load, features, now)
        self._sequence_number += 1
        computed = features.tokens - cached - copied - read
        pages = pages_for(features.tokens - cached)
        account.sent.append(Sent(self._sequence_number, now, computed, pages, features.rows))
        for key in features.keys(load.root):
            account.recent[key] = now
            account.recent.move_to_end(key)
        return self._sequence_number, computed

    def _cached(self, account: _Account, load: Load, features: RequestFeatures, now: float) -> tuple[int, int, int]:
        """Tokens of the prompt that the replica has cached, as far as is known, those behind them that it has in host
        memory, and those behind these that it has on disk."""
        if load.at != account.report_at:
            account.report_at, account.report_known = load.at, now
        # By this router's own clock, as those of two nodes may differ.
        known = now - account.report_known <= STALE_S
        reported = cached_tokens(features, load.keys, load.root) if known else 0
        cached = max(reported, cached_tokens(features, account.recent, load.root))
        in_host = cached_tokens(features, load.host_keys, load.root) if known else 0
        on_disk = cached_tokens(features, load.disk_keys, load.root) if known else 0
        return cached, max(in_host - cached, 0), max(on_disk - max(in_host, cached), 0)

    def _settle(self, account: _Account, load: Load, now: float) -> None:
        seen = load.seen.get(self.router)
        account.sent = [
            sent
            for sent in account.sent
            if now - sent.at < FORGET_S
            and (sent.sequence_number > seen if seen is not None else sent.at + TRANSIT_S > load.at)
        ]
        if load.backlog >= OUT_OF_SERVICE_TOKENS:  # its caches are gone with its engine
            account.recent.clear()
        while account.recent and now - next(iter(account.recent.values())) > REMEMBER_S:
            account.recent.popitem(last=False)


def choose(
    accounting: InFlightAccounting[R], loads: Mapping[R, Load], features: RequestFeatures, now: float
) -> list[R]:
    """Replicas from the cheapest to the dearest; equal ones take turns."""
    names = list(loads)
    turn = accounting.sent % max(len(names), 1)
    pace = paces({replica: load.step_times for replica, load in loads.items()})
    costs = accounting.costs({replica: loads[replica] for replica in names[turn:] + names[:turn]}, features, now, pace)
    return sorted(costs, key=lambda replica: costs[replica])
