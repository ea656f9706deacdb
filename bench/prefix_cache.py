"""What the prefix cache costs the scheduler as it grows, in milliseconds of the processor.

    python bench/prefix_cache.py --pages 12500,400000

The cache is filled with prompts of 100,000 tokens. Then such prompts are admitted, registered and closed while others
are evicted for them; one ends with logits that are not finite, so that it and what continues it is forgotten; a report
is made; and the collector of cyclic garbage looks at young objects, as it does in the scheduler's process, and at all.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kernels.page import PAGE_TOKENS
from workers.protocol.prompt import Prompt
from workers.scheduler import SchedulerConfig
from workers.scheduler.pages import PagePool
from workers.scheduler.prefix import PrefixCache, RowPages
from workers.scheduler.tokens import Tokens

TOKENS = 100_000
PAGES = TOKENS // PAGE_TOKENS
REPEAT = 5


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
    new = [prompt(-1 - number) for number in range(REPEAT)]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pages", default="12500,400000", help="of 64 tokens in the cache")
    for pages in parser.parse_args().pages.split(","):
        measure(int(pages))


if __name__ == "__main__":
    main()
