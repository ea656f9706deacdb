"""API keys of clients: what each of them has taken of its limits, and its place among the others.

Everything here is of one front. What the fronts of other replicas have taken comes in by `KeyRing.hear`
(`deploy.serve.key_status_store` carries it), so limits hold for all of them together, but for what they take between
two reports.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf, isfinite

import msgspec

from deploy.api.limits.admission import Counted, Pace, whole_seconds
from deploy.api.limits.buckets import STEP_TOKENS, Bucket, Flow, Meter, duration, flows
from deploy.config.keys import UNNAMED, ApiKey
from workers.protocol.messages import Charge, Charges

Headers = list[tuple[bytes, bytes]]
FORGETTING = 0.95
"""Factor by which the pace of the fastest request decays with each request that ends."""


class Spent(msgspec.Struct, frozen=True):
    """Use of one key that a front reports to the others."""

    requests: float = 0.0
    """Requests since the front's start, as `tokens`."""
    tokens: float = 0.0
    sequences: int = 0
    """Sequences that run or wait now."""
    held: tuple[float, float] = (inf, inf)
    """Requests and tokens that are left, as far as this front knows."""
    left: float = 0.0
    """Tokens that its running requests may still generate."""
    pace: float = 0.0
    """Tokens that they generate in a second; infinite where nothing is known of it."""
    charged: int = 0
    """Tokens that its scheduler has computed for the key since it started."""
    heard: dict[str, tuple[float, float]] = {}
    """Requests and tokens that other fronts had taken, by the names of fronts, as far as it knew. They are taken
    off `held`."""

    @property
    def taken(self) -> tuple[float, float]:
        """Requests and tokens, since it started."""
        return self.requests, self.tokens


class OverLimit(Exception):
    """A limit of the key does not allow the request now."""

    def __init__(self, limit: str, reason: str, wait_s: float, certain: bool) -> None:
        super().__init__(reason)
        self.limit, self.reason = limit, reason
        self.wait_s, self.certain = wait_s, certain
        """Seconds until there is room again; not `certain` where that is when others are likely to end."""


class Key:
    """State of one API key, or of all keys without a name."""

    def __init__(self, settings: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self.settings, self.name = settings, settings.name
        self.sequences = 0
        """Sequences of this front, running or waiting."""
        self.charged = 0
        """Tokens that this front's scheduler has computed for it."""
        self._elsewhere = 0
        self._flows_elsewhere: list[Flow] = []
        self._heard_at = 0.0
        self._clock = clock
        rpm, tpm = settings.requests_per_minute, settings.tokens_per_minute
        self._requests = Bucket(rpm, clock) if rpm else None
        self._tokens = Bucket(tpm, clock) if tpm else None
        self._meters: set[Meter] = set()
        self._usual = 0.0
        """Tokens a second of a sequence of those that have ended, 0 before the first."""
        self._pace = Pace(clock)

    def enter(self) -> None:
        """A request comes, of which nothing is known yet; OverLimit, and not counted, where a limit is used up."""
        # Tokens wait for `start`: nobody can say when there is room for a prompt of unknown length.
        self._check(1, 0, 1)
        if self._requests is not None:
            self._requests.take(1)

    def start(self, prompt_tokens: int, choices: Sequence[Counted]) -> Meter:
        """A request that entered begins to run. OverLimit where there is no room for it; then it counts as if it had
        never entered."""
        try:
            self._check(0, prompt_tokens, len(choices))
        except OverLimit:
            if self._requests is not None:
                self._requests.take(-1)
            raise
        if self._tokens is not None:
            self._tokens.take(prompt_tokens)
        return self.go_on(0, choices)

    def go_on(self, done: int, choices: Sequence[Counted]) -> Meter:
        """A request runs that has entered, at another front perhaps, where it was given and charged for `done`
        tokens."""
        self.sequences += len(choices)
        meter = Meter(choices, self._clock, done)
        self._meters.add(meter)
        return meter

    def end(self, meter: Meter) -> None:
        """Count the end of a request, however it ended."""
        self._read()
        self._meters.discard(meter)
        if meter.counted > STEP_TOKENS * len(meter.choices) and (pace := meter.pace):  # else it is hardly known
            self._usual = max(pace if isfinite(pace) else 0.0, FORGETTING * self._usual)
        self.sequences -= len(meter.choices)
        self._pace.ended(len(meter.choices))

    def _read(self) -> None:
        if self._tokens is not None:
            self._tokens.take_evenly(sum(meter.new() for meter in self._meters))

    @property
    def _taken(self) -> tuple[float, float]:
        """Requests and tokens that this front has taken."""
        requests, tokens = self._requests, self._tokens
        return requests.taken if requests else 0.0, tokens.taken if tokens else 0.0

    def _flows(self) -> list[Flow]:
        """Return the tokens still to come from all running requests, here and elsewhere."""
        found = flows(self._meters, self._usual)
        since = self._clock() - self._heard_at
        for left, pace in self._flows_elsewhere:
            # What came there since the last report may be heard of at any time.
            late = min(left, pace * since) if since else 0.0
            found += [Flow(late, inf), Flow(left - late, pace)]
        return [flow for flow in found if flow.left > 0]

    def _check(self, requests: int, tokens: int, sequences: int) -> None:
        self._read()
        waits = {}
        if self._requests is not None and requests:
            waits["requests"] = (self._requests.wait(requests), self._requests.capacity)
        if self._tokens is not None and tokens:
            waits["tokens"] = (self._tokens.wait(tokens, self._flows()), self._tokens.capacity)
        if any(wait for wait, _ in waits.values()):
            name, (wait, capacity) = max(waits.items(), key=lambda item: item[1][0])
            left = whole_seconds(wait)
            reason = f"the API key {self.name} may take {capacity:.0f} {name} a minute: try again in {left} s"
            raise OverLimit(name, reason, wait, certain=True)
        most, there = self.settings.max_sequences, self.sequences + self._elsewhere
        if most is not None and there + sequences > most:
            reason = (
                f"the API key {self.name} may have {most} sequences at a time, and {there} of them run or wait, which "
                f"leaves no room for {sequences} more: try again once some have ended"
            )
            too_many = there + sequences - most
            raise OverLimit("sequences", reason, self._pace.wait(too_many), certain=False)

    def headers(self) -> Headers:
        """The x-ratelimit headers of an answer."""
        self._read()
        found: Headers = []
        for name, bucket in ((b"requests", self._requests), (b"tokens", self._tokens)):
            if bucket is not None:
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % bucket.capacity),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(bucket.room + 1e-6, 0)),
                    (b"x-ratelimit-reset-" + name, duration(bucket.full_in).encode()),
                ]
        return found

    def spent(self, heard: Mapping[str, Spent]) -> Spent:
        """Return the report to other fronts; `heard` is what they reported last."""
        self._read()
        requests, tokens = self._requests, self._tokens
        running = flows(self._meters, self._usual) if tokens else []
        return Spent(
            *self._taken,
            self.sequences,
            (requests.held if requests else inf, tokens.held if tokens else inf),
            sum(flow.left for flow in running),
            sum(flow.pace for flow in running),
            self.charged,
            {front: told.taken for front, told in heard.items()},
        )

    def hear(self, own: str, news: Mapping[str, tuple[Spent | None, Spent, float]]) -> int:
        """Take in the reports of all fronts but this one, by their names. Each is the one before, None the first time,
        the newest one, and its age in seconds. `own` is this front's name. Return the number of tokens that their
        schedulers have computed for the key between the two."""
        charged = 0
        self._elsewhere, self._flows_elsewhere, self._heard_at = 0, [], self._clock()
        for before, now, _ in news.values():
            self._elsewhere += now.sequences
            charged += now.charged - before.charged if before is not None else 0
            if now.left and now.pace:
                self._flows_elsewhere.append(Flow(now.left, now.pace))
            if before is not None and self._requests is not None:
                self._requests.taken_elsewhere(now.requests - before.requests)
            if before is not None and self._tokens is not None:
                self._tokens.taken_elsewhere(now.tokens - before.tokens)
        # Who hears late of what was taken from a full bucket cannot know how much of it would have spilt meanwhile, and
        # assumes the most. The one where it was taken knows: all believe the one that knows of the least room, so that
        # a client that waits as long as one of them says is let in by any other. While clients go on taking, no front
        # has heard of everything; so that two of them can compare, what one has heard of beyond the other counts.
        taken = {own: self._taken, **{front: now.taken for front, (_, now, _) in news.items()}}
        for _, now, age in news.values():
            beyond = [
                sum(taken[front][of] - heard[of] for front, heard in now.heard.items() if front in taken)
                for of in range(2)
            ]
            for bucket, held, more in zip((self._requests, self._tokens), now.held, beyond, strict=True):
                if bucket is not None:
                    bucket.settle(held - more, age)
        return max(charged, 0)


class KeyRing:
    """State of all keys of a front."""

    def __init__(self, keys: Sequence[str | ApiKey], clock: Callable[[], float] = time.monotonic) -> None:
        self.named = any(isinstance(key, ApiKey) for key in keys)
        """Whether any key has a name; otherwise all are alike."""
        self._known: list[tuple[bytes, Key]] = []
        unnamed: Key | None = None
        for key in keys:
            if isinstance(key, ApiKey):
                self._known.append((key.key.encode(), Key(key, clock)))
            else:
                unnamed = unnamed or Key(ApiKey(key="-", name=UNNAMED), clock)
                self._known.append((key.encode(), unnamed))
        self._named = {key.name: key for _, key in self._known}
        self._heard: dict[str, Mapping[str, Spent]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    def find(self, offered: Iterable[str]) -> Key | None:
        """The key that is among `offered` header values. Every key is compared, in constant time each, with how the
        server decoded the headers."""
        values = [value.strip().encode("latin-1") for value in offered]
        found = [key for secret, key in self._known for value in values if hmac.compare_digest(value, secret)]
        return found[0] if found else None

    def place(self, key: Key | None, priority: int) -> tuple[int, str, float]:
        """Priority, name and weight under which a request is queued that asks for a `priority` itself."""
        if key is None or not self.named:
            return priority, "", 1.0
        return key.settings.priority + max(priority, 0), key.name, key.settings.weight

    def has_less(self, key: Key, more: int) -> bool:
        """Whether another key would have to make room, were there no more, for so many sequences of this one."""
        own = (key.settings.priority, (key.sequences + more) / key.settings.weight)
        return self.named and any(
            (other.settings.priority, other.sequences / other.settings.weight) > own
            for _, other in self._known
            if other is not key and other.sequences
        )

    def charged(self, charges: Charges) -> None:
        """Add the tokens that this front's scheduler has computed for keys since its last report."""
        for charge in charges.items:
            if (key := self._named.get(charge.key)) is not None:
                key.charged += charge.tokens

    def spent(self) -> dict[str, Spent]:
        """Return this front's report to the others, by names of keys."""
        return {
            name: key.spent({front: told[name] for front, told in self._heard.items() if name in told})
            for name, key in self._named.items()
            if key.settings.limited or key.charged
        }

    def hear(self, own: str, fronts: Mapping[str, Mapping[str, Spent]], ages: Mapping[str, float]) -> Charges:
        """Take in the newest reports of the other fronts, by front, and their ages in seconds; a front that is no
        longer among them has ended. `own` is this front's name among them. Return what their schedulers have computed
        for keys since their previous reports."""
        found = []
        for name, key in self._named.items():
            # A front that is known, and told nothing of a key so far, had given it nothing.
            before = {front: told.get(name, Spent()) for front, told in self._heard.items()}
            news = {
                front: (before.get(front), now, ages[front])
                for front, told in fronts.items()
                if (now := told.get(name)) is not None
            }
            if (news or key.settings.limited) and (tokens := key.hear(own, news)):
                found.append(Charge(name, key.settings.weight, tokens))
        self._heard = dict(fronts)
        return Charges(tuple(found))
