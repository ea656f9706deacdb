"""Share of returning sessions' prompts that a fleet of replicas finds cached, by what routers are told of the caches.

    python bench/fleet.py
    python bench/fleet.py --sessions 24 --replicas 4 --drop 100000 --kinds newest,report
    python bench/fleet.py --sessions 160 --host-pages 78000 --kinds report --bound 0.88
    python bench/fleet.py --sessions 16 --replicas 2 --turns 20 --kinds report --first 500 4000 --arrive 60 \
        --think 1 5 --answer 100 400 --added 200 2000

A simulation without a model: prefix caches, host memory behind them, reports and the routers' policy are the project's
own, and the time that prompts take is that of DeepSeek-V3 in FP8 on eight H200, 21 us a token and 1 ns for each token
that it attends to, one prompt after another. Pages come back from host memory at 50 GB/s, beside what is computed, and
are saved as soon as their prompt is answered. Sessions share a system prompt of 6,000 tokens (`--system`; with
`--groups N` there are N different ones) and begin at 26,000 to 96,000 (`--first`, without the system prompt). Each of
their turns answers in 300 to 1,000 tokens (`--answer`), 50 a second, then the user thinks for 5 to 120 s (`--think`)
and adds 500 to 4,000 tokens (`--added`).
`--drop N`: what comes next leaves out the first N tokens of the answer before it, as chat templates leave out
reasoning.

Routers are told, every 0.2 s, of the 512 newest keys (`newest`), of the 1,024 newest ends and branch points of
chains (`ends`), what replicas report (`report`), or of every key (`all`); the first two say nothing of host memory.
Printed are the part of the prompts' tokens that was reused, of that what came from host memory, and what a single cache
without bounds would have given; of what was said before and computed again where it was in that moment: on the GPUs of
another replica, in the host memory of another one, in host memory of the same replica, of which too little was missing
for a load, or nowhere any more. Then the tokens that were computed, the time to the first token, how far the tokens
that a router credits a replica with are from those that it has, how many prompts each replica got, and how many rows a
decode step of each had in the mean while it decoded. With `--gather` the routers do not let a session begin where its
system prompt is not cached yet because fewer rows are there. `--pool` adds the same sessions on as many replicas
that share one cache and one host memory, as large as all of theirs: what is lost beside that is lost by the router.
Exit status 1 where less is reused than `--bound`.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.routing.policy import InFlightAccounting, Load, RequestFeatures, cached_tokens, choose
from kernels.page import PAGE_TOKENS
from workers.protocol.request import NO_ROOT, Prompt, pack_keys, unpack_keys
from workers.protocol.tiers import Moved
from workers.scheduler import SchedulerConfig
from workers.scheduler.host_tier import HostTier
from workers.scheduler.pages import PagePool, RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.prefix_summary import Entry
from workers.scheduler.sequence import Tokens

TOKEN_S, ATTENDED_S = 21e-6, 1e-9
REPORT_S, RETRY_S = 0.2, 0.5
TOKENS_PER_S = 50
ANSWER_PAGES = 20
"""Room for an answer."""
ROUTER, ROW_TOKENS = "router", 32.0
VOCABULARY = 100_000

LOAD_S, LOADED_TOKEN_S = 5e-3, 40_672 / 50e9
"""Seconds of a load from host memory, and of each of its tokens beside that."""
HOST_TOKEN_COST = LOADED_TOKEN_S / 40e-6
"""Of a token that comes from host memory, in tokens that are computed."""

REPORTS: dict[str, tuple[Callable[[PrefixCache], Iterable[bytes]], Callable[[HostTier], Iterable[bytes]]]] = {
    "newest": (lambda cache: islice(reversed(cache._entries), 512), lambda tier: ()),
    "ends": (lambda cache: islice(reversed(cache._summary._ends), SchedulerConfig.prefix_sample), lambda tier: ()),
    "report": (PrefixCache.report, HostTier.report),
    "all": (lambda cache: cache._entries.keys(), lambda tier: tier._copies.keys()),
}
"""What routers are told of the pages of the device, and of those in host memory."""


def prefill_s(begin: int, end: int) -> float:
    """Seconds for tokens `begin` ... `end` of a prompt."""
    return (end - begin) * (TOKEN_S + ATTENDED_S * (begin + end) / 2)


def draw(source: random.Random, length: int) -> list[int]:
    return source.choices(range(VOCABULARY), k=length)


@dataclass
class Session:
    """A client that comes back."""

    random: random.Random
    ids: list[int]
    """Ids of its next prompt."""
    turns: int
    """Turns that are left."""
    known: int
    """Tokens of its next prompt that are not new."""


@dataclass(eq=False)
class Asked:
    """A prompt, as `HostTier` reads one of a row."""

    tokens: Tokens
    keys: list[bytes]

    @property
    def most(self) -> int:
        """Pages that may be cached: the last token is computed in any case."""
        return (self.tokens.length - 1) // PAGE_TOKENS


class Replica:
    """A prefix cache, host memory behind it, and a queue in front of one prompt at a time."""

    def __init__(self, pages: int, host_pages: int, pool: Replica | None = None) -> None:
        """`pool`: whose cache and host memory it uses in place of its own."""
        self.cache = pool.cache if pool else PrefixCache(PagePool(pages + 1), reported=SchedulerConfig.prefix_sample)
        self.tier = (
            pool.tier
            if pool
            else HostTier(self.cache, host_pages, 1, reported=SchedulerConfig.tier_sample, batch=max(host_pages, 1))
        )
        self.free_at = 0.0
        self.rows = 0
        self.prompts = 0
        self.decoded: list[tuple[float, float]] = []
        """From when to when each answer was decoded."""
        self.waiting = 0
        """Tokens of prompts that wait for room, as far as the router counted on computing them."""

    def on_device(self, tokens: Tokens) -> int:
        """Tokens of a prompt that are cached on the GPUs."""
        return len(self._found(Asked(tokens, tokens.keys()))) * PAGE_TOKENS

    def cached(self, tokens: Tokens) -> int:
        """Tokens of a prompt that are cached, in host memory or before it."""
        asked = Asked(tokens, tokens.keys())
        return max(len(self._found(asked)), len(self.tier.chain(asked, asked.most))) * PAGE_TOKENS

    def begin(self, tokens: Tokens, now: float) -> tuple[RowPages, int, int, int] | None:
        """Admit a prompt: its pages, how many of its tokens were cached, how many of these came from host memory, and
        how many could have been reused; None where there is no room."""
        asked = Asked(tokens, tokens.keys())
        found, pages = self._found(asked), tokens.length // PAGE_TOKENS + ANSWER_PAGES
        if self.cache.needed(found, pages) > self.cache.available:
            return None
        loaded, ready_at, here = 0, now, self.cached(tokens)
        if copies := self.tier.loadable(asked, found, asked.most):
            loaded = len(copies) * PAGE_TOKENS
            self.tier.load(asked, found, copies)
            self._move()
            found = self._found(asked)
            ready_at += LOAD_S + loaded * LOADED_TOKEN_S
        row = self.cache.open(found, pages)
        self.tier.leave(asked)
        self.tier.used(found)
        self.cache.register(row, tokens, tokens.length // PAGE_TOKENS)
        hit = len(found) * PAGE_TOKENS
        self.free_at = max(ready_at, self.free_at) + prefill_s(hit, tokens.length)
        self.rows += 1
        self.prompts += 1
        return row, hit, loaded, here

    def end(self, row: RowPages, tokens: Tokens) -> None:
        """A prompt was answered; `tokens` has the answer."""
        self.cache.register(row, tokens, min(tokens.length // PAGE_TOKENS, len(row.pages)))
        if self.tier.slots:
            self.cache.vouch(row)
            self.tier.save()
            self._move()
        self.cache.close(row)
        self.rows -= 1

    @property
    def step_rows(self) -> float:
        """Rows of a decode step in the mean, over the time in which there were any."""
        busy = last = 0.0
        for begin, end in sorted(self.decoded):
            busy += max(end - max(begin, last), 0.0)
            last = max(end, last)
        return sum(end - begin for begin, end in self.decoded) / busy if busy else 0.0

    def _move(self) -> None:
        """Let what is to be copied be copied at once."""
        for moves in self.tier.take_moves():
            self.tier.moved(Moved(0, moves.ticket))

    def _found(self, asked: Asked) -> list[Entry]:
        return self.cache.match(asked.tokens, asked.keys, asked.most)


@dataclass
class Fleet:
    """Sessions, replicas and a router between them, in simulated time."""

    kind: str
    options: argparse.Namespace
    pooled: bool = False
    """Whether all replicas share one cache and one host memory, as large as all of theirs."""
    prompt_tokens: int = 0
    reused: int = 0
    loaded: int = 0
    """Of these, from host memory."""
    known: int = 0
    """Tokens in whole pages that their session has sent or got before, or that all sessions begin with."""
    missed: Counter[str] = field(default_factory=Counter)
    """Of these, tokens that were computed again, by where they were."""
    ttft_s: list[float] = field(default_factory=list)
    credit_errors: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Let every session have all its turns."""
        options = self.options
        if self.pooled:
            pool = Replica(options.pages * options.replicas, options.host_pages * options.replicas)
            self._replicas = [pool, *(Replica(0, 0, pool) for _ in range(options.replicas - 1))]
        else:
            self._replicas = [Replica(options.pages, options.host_pages) for _ in range(options.replicas)]
        self._book: InFlightAccounting[int] = InFlightAccounting(ROUTER, ROW_TOKENS)
        if options.gather:
            self._book._beginnings.is_common = lambda key, then: False  # type: ignore[method-assign]
        self._loads: dict[int, Load] = {}
        self._reported = -math.inf
        self._number, self._events = count(), []
        systems = [draw(random.Random(number), options.system) for number in range(options.groups)]
        for number in range(options.sessions):
            source = random.Random(options.seed * 1000 + number)
            ids = systems[number % options.groups] + draw(source, source.randint(*options.first))
            session = Session(source, ids, options.turns, options.system)
            self._at(source.uniform(0, options.arrive), partial(self._ask, session))
        while self._events:
            now, _, act = heapq.heappop(self._events)
            act(now)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), act))

    def _ask(self, session: Session, now: float) -> None:
        tokens = Tokens(Prompt.of(session.ids))
        features = RequestFeatures(tokens.length, tokens.prompt)
        self._listen(now)
        chosen = choose(self._book, self._loads, features, now)[0]
        _, computed = self._book.record(chosen, self._loads[chosen], features, now)
        credited = [
            max(cached_tokens(features, keys, NO_ROOT) for keys in (load.keys, load.host_keys))
            for _, load in sorted(self._loads.items())
        ]
        cached = [replica.cached(tokens) for replica in self._replicas]
        self.credit_errors += [abs(one - other) for one, other in zip(cached, credited, strict=True)]
        replica = self._replicas[chosen]
        replica.waiting += computed
        self._begin(session, replica, tokens, computed, now, now)

    def _begin(
        self, session: Session, replica: Replica, tokens: Tokens, computed: int, asked_at: float, now: float
    ) -> None:
        """Let a prompt begin where it was sent, as soon as there is room for it."""
        begun = replica.begin(tokens, now)
        if begun is None:
            self._at(now + RETRY_S, partial(self._begin, session, replica, tokens, computed, asked_at))
            return
        replica.waiting -= computed
        row, hit, loaded, here = begun
        self.prompt_tokens += tokens.length
        self.reused += hit
        self.loaded += loaded
        known = session.known // PAGE_TOKENS * PAGE_TOKENS
        self.known += known
        self._account(replica, tokens, hit, here, known)
        self.ttft_s.append(replica.free_at - asked_at)
        answer = draw(session.random, session.random.randint(*self.options.answer))
        done = partial(self._answered, session, replica, row, tokens, answer)
        done_at = replica.free_at + len(answer) / TOKENS_PER_S
        replica.decoded.append((replica.free_at, done_at))
        self._at(done_at, done)

    def _account(self, replica: Replica, tokens: Tokens, hit: int, here: int, known: int) -> None:
        """Find where the tokens were that were known and are computed again, because `hit` of them were reused and
        `here` could have been."""
        others = [] if self.pooled else [one for one in self._replicas if one is not replica]
        on_devices = max((one.on_device(tokens) for one in others), default=0)
        anywhere = max((one.cached(tokens) for one in others), default=0)
        places = ("here", here), ("on GPUs elsewhere", on_devices), ("in host memory elsewhere", anywhere)
        for place, there in (*places, ("nowhere", known)):
            missed = min(there, known) - hit
            if missed > 0:
                self.missed[place] += missed
                hit += missed

    def _answered(
        self, session: Session, replica: Replica, row: RowPages, tokens: Tokens, answer: list[int], now: float
    ) -> None:
        tokens.generated.extend(answer)
        tokens.length += len(answer)
        replica.end(row, tokens)
        source = session.random
        session.known = len(session.ids) + (0 if self.options.drop else len(answer))
        session.ids = session.ids + answer[self.options.drop :] + draw(source, source.randint(*self.options.added))
        session.turns -= 1
        if session.turns:
            shortest, longest = map(math.log, self.options.think)
            think_s = math.exp(source.uniform(shortest, longest))
            self._at(now + think_s, partial(self._ask, session))

    def _listen(self, now: float) -> None:
        if now - self._reported <= REPORT_S:
            return
        self._reported = now
        for name, replica in enumerate(self._replicas):
            backlog = int(max(replica.free_at - now, 0) / 40e-6) + replica.waiting
            of_device, of_host = REPORTS[self.kind]
            self._loads[name] = Load(
                backlog,
                replica.rows,
                pages_free=replica.cache.available,
                keys=told(of_device(replica.cache)),
                host_keys=told(of_host(replica.tier)),
                host_token_cost=HOST_TOKEN_COST,
                seen={ROUTER: self._book.sent},
                at=now,
            )

    @property
    def share(self) -> float:
        """Share of the prompts' tokens that was reused."""
        return self.reused / self.prompt_tokens

    def show(self) -> None:
        """Print its figures in a line."""
        ttft, error = sorted(self.ttft_s), sorted(self.credit_errors)
        missed = "".join(f", {count / self.prompt_tokens:.4f} was {place}" for place, count in self.missed.items())
        prompt, computed = self.prompt_tokens, (self.prompt_tokens - self.reused) / 1e6
        kind = "a pool" if self.pooled else self.kind
        print(
            f"{kind:7} reused {self.share:.3f} ({self.loaded / prompt:.3f} from host memory) of "
            f"{self.known / prompt:.3f}{missed}, computed {computed:.2f} M tokens, "
            f"first token p50 {at(ttft, 0.5):.2f} s, p99 {at(ttft, 0.99):.2f} s, "
            f"credit wrong by {sum(error) / len(error):.0f} tokens in the mean, p50 {at(error, 0.5)}, p99 "
            f"{at(error, 0.99)}, prompts {' / '.join(str(one.prompts) for one in self._replicas)}, "
            f"rows of a step {' / '.join(f'{one.step_rows:.1f}' for one in self._replicas)}",
            flush=True,
        )


def told(keys: Iterable[bytes]) -> frozenset[bytes]:
    """Keys as routers have them."""
    return frozenset(unpack_keys(pack_keys(keys)))


def at(ordered: list, part: float) -> float:
    """A quantile of ordered values."""
    return ordered[int(part * (len(ordered) - 1))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10, help="of each session")
    parser.add_argument("--pages", type=int, default=12_500, help="of 64 tokens in each replica's cache")
    parser.add_argument("--host-pages", type=int, default=0, help="the same in its host memory; 0: there is none")
    parser.add_argument("--drop", type=int, default=0, help="tokens of an answer that the next prompt leaves out")
    parser.add_argument("--system", type=int, default=6000, help="tokens with which all sessions begin")
    parser.add_argument("--groups", type=int, default=1, help="different beginnings; sessions take turns with them")
    ranges = {
        "--first": (int, (20_000, 90_000), "tokens of a session's first prompt behind those, from and to"),
        "--answer": (int, (300, 1000), "tokens of an answer, from and to"),
        "--added": (int, (500, 4000), "tokens that a further prompt adds, from and to"),
        "--think": (float, (5.0, 120.0), "seconds between an answer and the next prompt, from and to"),
    }
    for name, (kind, default, text) in ranges.items():
        parser.add_argument(name, type=kind, nargs=2, default=default, metavar=("LOW", "HIGH"), help=text)
    parser.add_argument("--gather", action="store_true", help="a common beginning holds sessions like their own past")
    parser.add_argument("--arrive", type=float, default=120.0, help="seconds in which all sessions begin")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(REPORTS), help="which reports to compare")
    parser.add_argument("--pool", action="store_true", help="also replicas that share all of their caches")
    parser.add_argument("--bound", type=float, help="least share of prompt tokens that is to be reused")
    options = parser.parse_args()
    if options.host_pages < 0:
        parser.error("--host-pages must not be negative")
    print(f"{options.sessions} sessions of {options.turns} turns, {options.replicas} replicas, drop {options.drop}")
    for kind in options.kinds.split(","):
        if kind not in REPORTS:
            parser.error(f"--kinds: {kind} is none of {', '.join(REPORTS)}")
        fleet = Fleet(kind, options)
        fleet.run()
        fleet.show()
        if options.pool:
            pool = Fleet(kind, options, pooled=True)
            pool.run()
            pool.show()
        if options.bound is not None and fleet.share < options.bound:
            print(f"less than {options.bound:g} is reused")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
