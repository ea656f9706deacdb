"""Share of returning sessions' prompts that a fleet of replicas finds cached, by what routers are told of the caches.

    python bench/fleet.py
    python bench/fleet.py --sessions 24 --replicas 4 --drop 100000 --kinds newest,report

A simulation without a model: prefix caches, reports and the routers' policy are the project's own, and the time that
prompts take is that of DeepSeek-V3 in FP8 on eight H200, 21 us a token and 1 ns for each token that it attends to, one
prompt after another. Sessions share a system prompt of 6,000 tokens and begin at 26,000 to 96,000. Each of their turns
answers in 300 to 1,000 tokens, 50 a second, then the user thinks for 5 to 120 s and adds 500 to 4,000 tokens.
`--drop N`: what comes next leaves out the first N tokens of the answer before it, as chat templates leave out
reasoning.

Routers are told, every 0.2 s, of the 512 newest keys (`newest`), of the 1,024 newest ends and branch points of
chains (`ends`), what replicas report (`report`), or of every key (`all`). Printed are the part of the prompts' tokens
that was reused, those that were computed, the time to the first token, and how far the tokens that a router credits a
replica with are from those that it has cached.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.routing.policy import InFlightAccounting, Load, RequestFeatures, cached_tokens, choose
from kernels.page import PAGE_TOKENS
from workers.protocol.prompt import NO_ROOT, Prompt
from workers.scheduler import SchedulerConfig
from workers.scheduler.page_supply import RowPages
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.tokens import Tokens

TOKEN_S, ATTENDED_S = 21e-6, 1e-9
REPORT_S, RETRY_S = 0.2, 0.5
TOKENS_PER_S = 50
ANSWER_PAGES = 20
"""Room for an answer."""
ROUTER, ROW_TOKENS = "router", 32.0
VOCABULARY = 100_000

REPORTS: dict[str, Callable[[PrefixCache], Iterable[int]]] = {
    "newest": lambda cache: islice(reversed(cache._entries), 512),
    "ends": lambda cache: islice(reversed(cache._summary._ends), SchedulerConfig.prefix_sample),
    "report": PrefixCache.report,
    "all": lambda cache: cache._entries.keys(),
}


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


class Replica:
    """A prefix cache, and a queue in front of one prompt at a time."""

    def __init__(self, pages: int) -> None:
        self.cache = PrefixCache(PagePool(pages + 1), reported=SchedulerConfig.prefix_sample)
        self.free_at = 0.0
        self.rows = 0

    def cached(self, tokens: Tokens) -> int:
        """Tokens of a prompt that are cached."""
        return len(self._found(tokens)) * PAGE_TOKENS

    def begin(self, tokens: Tokens, now: float) -> tuple[RowPages, int] | None:
        """Admit a prompt: its pages and how many of its tokens were cached; None where there is no room."""
        found, pages = self._found(tokens), tokens.length // PAGE_TOKENS + ANSWER_PAGES
        if self.cache.needed(found, pages) > self.cache.available:
            return None
        row = self.cache.open(found, pages)
        self.cache.register(row, tokens, tokens.length // PAGE_TOKENS)
        hit = len(found) * PAGE_TOKENS
        self.free_at = max(now, self.free_at) + prefill_s(hit, tokens.length)
        self.rows += 1
        return row, hit

    def end(self, row: RowPages, tokens: Tokens) -> None:
        """A prompt was answered; `tokens` has the answer."""
        self.cache.register(row, tokens, min(tokens.length // PAGE_TOKENS, len(row.pages)))
        self.cache.close(row)
        self.rows -= 1

    def _found(self, tokens: Tokens) -> list:
        return self.cache.match(tokens, tokens.keys(), (tokens.length - 1) // PAGE_TOKENS)


@dataclass
class Fleet:
    """Sessions, replicas and a router between them, in simulated time."""

    kind: str
    options: argparse.Namespace
    prompt_tokens: int = 0
    reused: int = 0
    ttft_s: list[float] = field(default_factory=list)
    credit_errors: list[int] = field(default_factory=list)

    def run(self) -> None:
        """Let every session have all its turns."""
        options = self.options
        self._replicas = [Replica(options.pages) for _ in range(options.replicas)]
        self._book: InFlightAccounting[int] = InFlightAccounting(ROUTER, ROW_TOKENS)
        self._loads: dict[int, Load] = {}
        self._reported = -math.inf
        self._number, self._events = count(), []
        system = draw(random.Random(0), 6000)
        for number in range(options.sessions):
            source = random.Random(options.seed * 1000 + number)
            session = Session(source, system + draw(source, source.randint(20_000, 90_000)), options.turns)
            self._at(source.uniform(0, 120), partial(self._ask, session))
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
        self._book.record(chosen, self._loads[chosen], features, now)
        replica, cached = self._replicas[chosen], [one.cached(tokens) for one in self._replicas]
        if (begun := replica.begin(tokens, now)) is None:
            self._at(now + RETRY_S, partial(self._ask, session))
            return
        credited = [cached_tokens(features, self._loads[name].keys, NO_ROOT) for name in range(len(cached))]
        self.credit_errors += [abs(one - other) for one, other in zip(cached, credited, strict=True)]
        row, hit = begun
        self.prompt_tokens += tokens.length
        self.reused += hit
        self.ttft_s.append(replica.free_at - now)
        answer = draw(session.random, session.random.randint(300, 1000))
        done = partial(self._answered, session, replica, row, tokens, answer)
        self._at(replica.free_at + len(answer) / TOKENS_PER_S, done)

    def _answered(
        self, session: Session, replica: Replica, row: RowPages, tokens: Tokens, answer: list[int], now: float
    ) -> None:
        tokens.generated.extend(answer)
        tokens.length += len(answer)
        replica.end(row, tokens)
        source = session.random
        session.ids = session.ids + answer[self.options.drop :] + draw(source, source.randint(500, 4000))
        session.turns -= 1
        if session.turns:
            think_s = math.exp(source.uniform(math.log(5), math.log(120)))
            self._at(now + think_s, partial(self._ask, session))

    def _listen(self, now: float) -> None:
        if now - self._reported <= REPORT_S:
            return
        self._reported = now
        for name, replica in enumerate(self._replicas):
            backlog = int(max(replica.free_at - now, 0) / 40e-6)
            keys = frozenset(REPORTS[self.kind](replica.cache))
            self._loads[name] = Load(backlog, replica.rows, keys=keys, seen={ROUTER: self._book.sent}, at=now)

    def show(self) -> None:
        """Print its figures in a line."""
        ttft, error = sorted(self.ttft_s), sorted(self.credit_errors)
        computed = (self.prompt_tokens - self.reused) / 1e6
        print(
            f"{self.kind:7} reused {self.reused / self.prompt_tokens:.3f}, computed {computed:.2f} M tokens, first "
            f"token p50 {at(ttft, 0.5):.2f} s, p99 {at(ttft, 0.99):.2f} s, credit wrong by "
            f"{sum(error) / len(error):.0f} tokens in the mean, p50 {at(error, 0.5)}, p99 {at(error, 0.99)}",
            flush=True,
        )


def at(ordered: list, part: float) -> float:
    """A quantile of ordered values."""
    return ordered[int(part * (len(ordered) - 1))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10, help="of each session")
    parser.add_argument("--pages", type=int, default=12_500, help="of 64 tokens in each replica's cache")
    parser.add_argument("--drop", type=int, default=0, help="tokens of an answer that the next prompt leaves out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(REPORTS), help="which reports to compare")
    options = parser.parse_args()
    print(f"{options.sessions} sessions of {options.turns} turns, {options.replicas} replicas, drop {options.drop}")
    for kind in options.kinds.split(","):
        if kind not in REPORTS:
            parser.error(f"--kinds: {kind} is none of {', '.join(REPORTS)}")
        fleet = Fleet(kind, options)
        fleet.run()
        fleet.show()


if __name__ == "__main__":
    main()
