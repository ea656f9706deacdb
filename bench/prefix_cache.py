"""What the prefix cache costs the scheduler as it grows, in milliseconds of the processor.

    python bench/prefix_cache.py --pages 12500,400000

The cache is filled with prompts of 100,000 tokens. Then such prompts are admitted, registered and closed while others
are evicted for them; one ends with logits that are not finite, so that it and what continues it is forgotten; a report
is made; and the collector of cyclic garbage looks at young objects, as it does in the scheduler's process, and at all.

Then the same of a disk with so many pages: what was there at the start is taken in, such a prompt is looked up and
read, another is saved while others are evicted for it, and one is doubted.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.page import PAGE_TOKENS
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.protocol.request import Prompt
from workers.protocol.tiers import FOUND, DiskFound, DiskMoved, check_of
from workers.scheduler import SchedulerConfig
from workers.scheduler.disk_tier import FOUND_A_TURN, DiskTier
from workers.scheduler.host_tier import HostTier
from workers.scheduler.pages import PagePool, RowPages
from workers.scheduler.prefix import PrefixCache
from workers.scheduler.sequence import Sequence, Tokens
from workers.scheduler.write_budget import WriteBudget

TOKENS = 100_000
PAGES = TOKENS // PAGE_TOKENS
REPEAT = 5
NEW = 10**9
"""Number of the first prompt that is not cached."""


def prompt(number: int) -> Tokens:
    tokens = Tokens(Prompt.of(random.Random(number).choices(range(100_000), k=TOKENS)))
    tokens.keys()
    return tokens


def opened(cache: PrefixCache, tokens: Tokens) -> RowPages:
    row = cache.open(cache.match(tokens, tokens.keys(), PAGES), PAGES)
    cache.register(row, tokens, PAGES)
    return row


def took(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return (time.process_time() - begin) * 1e3


def measure(pages: int) -> None:
    gc.collect()
    gc.freeze()
    cache = PrefixCache(PagePool(pages + 1), reported=SchedulerConfig.prefix_sample)
    gc.disable()
    for number in range(pages // PAGES):
        cache.close(opened(cache, prompt(number)))
    print(f"{cache.cached:,} entries")
    new = [prompt(NEW + number) for number in range(REPEAT)]
    admitted = [took(lambda one=one: cache.close(opened(cache, one))) for one in new]
    rows = [opened(cache, one) for one in new[:3]]
    doubted = [took(lambda row=row: cache.mark_suspect(row)) for row in rows]
    for row in rows:
        cache.close(row)
    figures = {
        f"a prompt of {TOKENS:,} tokens, in and out": admitted,
        f"doubt of one of {PAGES:,} pages": doubted,
        "report": [took(cache.report) for _ in range(REPEAT)],
        "collection of young garbage": [took(lambda: gc.collect(1)) for _ in range(REPEAT)][1:],
        "collection of all garbage": [took(gc.collect) for _ in range(REPEAT)],
    }
    for what, times in figures.items():
        print(f"  {what}: {statistics.median(times):.2f} ms, most {max(times):.2f}", flush=True)
    gc.enable()


def row_of(tokens: Tokens) -> Sequence:
    """A request as it waits."""
    request = Request("request", tokens.prompt, SamplingParams(1))
    row = Sequence(request, (0, 0.0, 0), tokens.length + 1, tokens, frozenset(), 0, -1)
    row.keys = tokens.keys()
    return row


def measure_disk(pages: int) -> None:
    gc.collect()
    gc.freeze()
    host = HostTier(PrefixCache(PagePool(2)), 4 * PAGES, ranks=1)
    budget = WriteBudget(math.inf, math.inf, time.monotonic)
    disk = DiskTier(host, pages, 1, budget, time.monotonic, reported=SchedulerConfig.tier_sample, token_s=lambda: 1.0)
    gc.disable()
    packed, slot = bytearray(), 0
    for number in range(pages // PAGES):
        before, tokens = b"", prompt(number)
        for index, key in enumerate(tokens.keys()):
            packed += FOUND.pack(slot, index + 1, check_of(tokens.page(index)), slot, key, before)
            before, slot = key, slot + 1
    disk.found(DiskFound(bytes(packed), last=True))
    taken_in = []
    while disk.busy:
        taken_in.append(took(disk.turn))
    print(f"{disk.index.held:,} pages on disk")

    def answered() -> float:
        moves = disk.take_moves()
        return sum(took(lambda one=one: disk.moved(DiskMoved(0, one.ticket, seconds=0.1))) for one in moves)

    rows = [row_of(prompt(number)) for number in range(REPEAT)]
    loads, read = [], []
    for row in rows:
        loads.append(took(lambda row=row: disk.load(row, 0, PAGES)))
        read.append(answered())
    new = row_of(prompt(NEW))
    copies = host.receive(new, 0, PAGES)
    host.received(copies, [])
    disk.written(copies)
    saves = []
    while disk._saves._new:
        saves.append(took(disk.turn))
        answered()
    doubted = [took(lambda row=row: disk.doubt([row.keys[0]])) for row in rows[:3]]
    figures = {
        f"taking in what was there, {FOUND_A_TURN} pages a turn": taken_in,
        f"a prompt of {TOKENS:,} tokens, looked up": loads,
        "what is said of it when it is read": read,
        "a turn that saves pages, and evicts as many": saves,
        f"doubt of {PAGES:,} pages": doubted,
        "report": [took(disk.report) for _ in range(REPEAT)],
        "collection of young garbage": [took(lambda: gc.collect(1)) for _ in range(REPEAT)][1:],
    }
    for what, times in figures.items():
        print(f"  {what}: {statistics.median(times):.2f} ms, most {max(times):.2f}", flush=True)
    gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="12500,400000", help="of 64 tokens in the cache")
    for pages in parser.parse_args().pages.split(","):
        measure(int(pages))
        measure_disk(int(pages))


if __name__ == "__main__":
    main()
