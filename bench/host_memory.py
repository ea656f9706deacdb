"""What host memory behind the cache costs streams, and what it brings sessions that return, without HTTP and Ray.

    python bench/host_memory.py --model DIR --device cuda --cache-pages 3400 --host-bytes 20000000000 \\
        --token-budget 8192 --streams 32 --prompt 2000 --tokens 256 --sessions 5 --session 62000 \\
        --stream-tokens 2500 --seconds 2
    python bench/host_memory.py                                    # the demo model, on a CPU

Two engines run on this machine side by side, one with host memory and one without, and are asked in turn.

- **Saves.** Streams with prompts that nobody has sent before: every page that they complete is copied to host memory,
  and none is ever found there. Printed are the tokens a second, of prompts and answers, with host memory and without.
- **Sessions.** The cache has room for some of them. Each is asked for one token as it comes back from host memory, and
  once more when its pages are on the device. Printed are the seconds until that token, and what may be added to those
  of the device: 1.2 times the time of the bytes over the link, which is measured by plain copies, and 5 ms.
- **Neighbors.** Streams decode alone, then beside a session that returns again and again from the device, then beside
  sessions that come from host memory. Printed are the gaps between tokens of the streams.

Exits with 1 where nothing was saved, anything was found that was not said before, or a session does not come back from
where it should. On machines that do other work, take ratios alone.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.loadtest.load_report import percentile
from kernels.page import PAGE_TOKENS
from workers.config import EngineConfig
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams

GB = 1e9
LEAST_ID = 10
"""Lower ids are most often special tokens."""
PINNED_S = 120.0
"""For all of host memory to be pinned."""
FIRST_MS, LINK_SHARE = 5.0, 1.2
"""What a session from host memory may take more than one from the device: milliseconds, and so many times its bytes'
time over the link."""


class Failed(Exception):
    """An engine did not do what is measured."""


@dataclass
class Answer:
    """What came of a request."""

    begun: float
    cached: int = 0
    arrivals: list[float] = field(default_factory=list)
    """When tokens came."""

    @property
    def first_s(self) -> float:
        """Seconds until the first token."""
        return self.arrivals[0] - self.begun

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens that came between two moments."""
        within = [moment for moment in self.arrivals if begin <= moment <= end]
        return [after - before for before, after in itertools.pairwise(within)]


class Engine:
    """An engine, and what is asked of it."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._numbers = itertools.count()

    async def ask(self, prompt: tuple[int, ...], tokens: int, answer: Answer | None = None) -> Answer:
        """Have `tokens` tokens generated; `answer` is filled as they come."""
        made = answer or Answer(0.0)
        request = Request(f"asked {next(self._numbers)}", prompt, SamplingParams(tokens, temperature=0.0))
        made.begun = time.perf_counter()
        count = 0
        async for output in self.client.generate(request):
            if output.tokens:
                if not made.arrivals:
                    made.cached = output.cached_tokens
                made.arrivals.append(time.perf_counter())
                count += len(output.tokens)
        if count != tokens:
            raise Failed(f"{count} tokens came of {tokens}")
        return made


def prompts(seed: int, tokens: int) -> Iterator[tuple[int, ...]]:
    """Prompts of so many random ids, without end."""
    draws = random.Random(seed)
    while True:
        yield tuple(draws.choices(range(LEAST_ID, 900), k=tokens))


async def saves(given: argparse.Namespace, with_memory: Engine, without: Engine) -> None:
    """Compare streams of which nothing is found, with saves and without."""
    fresh = prompts(1, given.prompt)
    seconds: dict[Engine, list[float]] = {with_memory: [], without: []}
    before = with_memory.client.stats.host_saved_pages
    for number in range(given.rounds + 1):
        # Whose turn is first changes, as what a machine does besides may change with time.
        for engine in (with_memory, without) if number % 2 else (without, with_memory):
            begin = time.perf_counter()
            found = await asyncio.gather(*(engine.ask(next(fresh), given.tokens) for _ in range(given.streams)))
            if number:  # the first one is for what happens once
                seconds[engine].append(time.perf_counter() - begin)
            if any(answer.cached for answer in found):
                raise Failed("prompts that nobody has sent before were found in a cache")
    await asyncio.sleep(0.3)  # for the newest figures
    saved = with_memory.client.stats.host_saved_pages - before
    if not saved:
        raise Failed("no page was saved")
    total = given.streams * (given.prompt + given.tokens)
    rates = {engine: total / statistics.median(taken) for engine, taken in seconds.items()}
    print(
        f"saves: {given.rounds} rounds of {given.streams} streams, {given.prompt:,} tokens of prompts and "
        f"{given.tokens} of answers each; {saved:,} pages were saved, and none was found\n"
        f"  tokens a second with host memory {rates[with_memory]:,.0f}, without {rates[without]:,.0f}: "
        f"{rates[with_memory] / rates[without]:.3f} times as many",
        flush=True,
    )


async def sessions(given: argparse.Namespace, engine: Engine, asked: list[tuple[int, ...]]) -> None:
    """Compare sessions that come back from host memory with those whose pages are on the device."""
    for prompt in asked:
        await engine.ask(prompt, 1)
    await asyncio.sleep(0.5)
    pages = (given.session - 1) // PAGE_TOKENS
    before = engine.client.stats
    host: list[float] = []
    device: list[float] = []
    for turn in range(given.turns):
        for number, prompt in enumerate(asked):
            longer = (*prompt, LEAST_ID + turn)  # a turn more than what was said
            for times in (host, device):
                answer = await engine.ask(longer, 1)
                if answer.cached < pages * PAGE_TOKENS:
                    raise Failed(f"session {number} found {answer.cached} of {given.session} tokens in turn {turn}")
                times.append(answer.first_s)
    await asyncio.sleep(0.3)
    after = engine.client.stats
    loaded = after.host_loaded_pages - before.host_loaded_pages
    if loaded < given.turns * len(asked) * pages // 2:
        raise Failed(f"only {loaded} pages came back from host memory: give less --cache-pages, or more --sessions")
    seconds = after.host_load_seconds - before.host_load_seconds
    first, slow = (1e3 * statistics.median(times) for times in (device, host))
    print(
        f"sessions: {len(asked)} of {given.session:,} tokens, {given.turns} turns; {loaded:,} pages came from host "
        f"memory in {1e6 * seconds / loaded:.1f} us each\n  first token: {first:.1f} ms from the device, {slow:.1f} ms "
        f"from host memory (p99 {1e3 * percentile(sorted(host), 99):.1f})",
        flush=True,
    )
    if given.device == "cuda":
        from tiers import models

        from workers.tiers.mover import record_layout

        size = record_layout(models()["V2-Lite, bf16"])[-1] if given.page_bytes is None else given.page_bytes
        rate, total = link(), size * loaded / (given.turns * len(asked))
        most = first + LINK_SHARE * 1e3 * total / rate / GB + FIRST_MS
        print(
            f"  {total / GB:.2f} GB a session, loaded at {size * loaded / seconds / GB:.1f} GB/s; plain copies "
            f"{rate:.1f} GB/s: at the most {most:.1f} ms are wanted",
            flush=True,
        )


def link() -> float:
    """GB/s of plain copies from pinned memory."""
    import torch
    from tiers import copies

    host = torch.empty(128, 8 << 20, dtype=torch.uint8, pin_memory=True)
    return copies(host, torch.empty_like(host, device="cuda"))


async def neighbors(given: argparse.Namespace, engine: Engine, asked: list[tuple[int, ...]]) -> None:
    """Print the gaps of streams alone, beside a session on the device, and beside sessions from host memory."""
    fresh = prompts(2, given.prompt)
    streams = [Answer(0.0) for _ in range(given.streams)]
    running = [asyncio.create_task(engine.ask(next(fresh), given.stream_tokens, one)) for one in streams]
    while any(len(one.arrivals) < 2 for one in streams):
        if any(task.done() for task in running):
            raise Failed("streams ended before all of them decoded: give more --stream-tokens")
        await asyncio.sleep(0.01)
    worst: dict[str, float] = {}
    for name, beside in (("alone", []), ("beside a session on the device", asked[:1]), ("from host memory", asked)):
        for prompt in beside:  # where each of them is, is so by then
            await engine.ask(prompt, 1)
        await asyncio.sleep(0.3)  # for the newest figures
        begin, before = time.perf_counter(), engine.client.stats.host_loaded_pages
        deadline, turn = begin + given.seconds, itertools.cycle(beside)
        asking: list[asyncio.Task[Answer]] = []
        while time.perf_counter() < deadline:
            if beside:
                asking.append(asyncio.create_task(engine.ask(next(turn), 1)))
            await asyncio.sleep(given.period)
        found = await asyncio.gather(*asking)
        end = time.perf_counter()
        if any(task.done() for task in running):
            raise Failed("streams ended while their gaps were taken: give more --stream-tokens")
        gaps = sorted(1e3 * gap for one in streams for gap in one.gaps(begin, end))
        worst[name] = percentile(gaps, 99)
        await asyncio.sleep(0.3)
        loaded = engine.client.stats.host_loaded_pages - before
        first = (
            f"; first token of {len(found)} {1e3 * statistics.median(a.first_s for a in found):.0f} ms" if found else ""
        )
        print(
            f"neighbors, {name}: gaps p50 {percentile(gaps, 50):.2f} ms, p99 {worst[name]:.2f}, longest {gaps[-1]:.1f}"
            f"{first}; {loaded:,} pages from host memory",
            flush=True,
        )
    alone, device, host = worst.values()
    print(
        f"  p99 beside sessions from host memory: {host / device:.3f} times that beside one on the device, "
        f"{host / alone:.3f} times that alone"
    )
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


async def pinned(engine: Engine) -> None:
    """Wait until all of host memory can be used."""
    begin, held = time.perf_counter(), -1
    while (now := engine.client.stats.host_pages_total) != held or not now:
        if time.perf_counter() - begin > PINNED_S:
            raise Failed(f"host memory was not pinned within {PINNED_S:g} s")
        held = now
        await asyncio.sleep(0.5)
    print(f"host memory of {held:,} pages", flush=True)


async def measure(given: argparse.Namespace) -> None:
    """Start both engines and print everything."""
    settings = {
        "model": given.model, "device": given.device, "tensor_parallel": given.tensor_parallel, "width": given.width,
        "max_rows": given.streams + 2, "token_budget": given.token_budget, "cache_pages": given.cache_pages,
        "max_context": max(given.session + 100, given.prompt + given.stream_tokens + 10), "drafter": given.drafter,
    }  # fmt: skip
    begin = time.perf_counter()
    async with AsyncExitStack() as stack:
        clients = await asyncio.gather(
            stack.enter_async_context(local_engine(EngineConfig(**settings, host_cache_bytes=given.host_bytes))),
            stack.enter_async_context(local_engine(EngineConfig(**settings))),
        )
        engine, without = map(Engine, clients)
        print(f"both engines serve after {time.perf_counter() - begin:.1f} s", flush=True)
        await pinned(engine)
        await saves(given, engine, without)
        asked = [*itertools.islice(prompts(3, given.session), given.sessions)]
        await sessions(given, engine, asked)
        await neighbors(given, engine, asked)


def arguments() -> argparse.ArgumentParser:
    """What the program may be told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--drafter", default="none")
    parser.add_argument("--cache-pages", type=int, default=120)
    parser.add_argument("--host-bytes", type=int, default=100_000_000)
    parser.add_argument("--page-bytes", type=int, help="of all caches of a rank; by default those of DeepSeek-V2-Lite")
    parser.add_argument("--token-budget", type=int, default=512)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=200, help="tokens of each stream's prompt")
    parser.add_argument("--tokens", type=int, default=32, help="that each stream of the first part asks for")
    parser.add_argument("--rounds", type=int, default=3, help="of the first part")
    parser.add_argument("--sessions", type=int, default=6)
    parser.add_argument("--session", type=int, default=1600, help="tokens of a session")
    parser.add_argument("--turns", type=int, default=2, help="of each session")
    parser.add_argument("--stream-tokens", type=int, default=1200, help="that each stream of the last part asks for")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each of the three turns of the last part")
    parser.add_argument("--period", type=float, default=0.5, help="seconds between two sessions that return")
    return parser


def main() -> int:
    """Measure, and say what went wrong."""
    try:
        asyncio.run(measure(arguments().parse_args()))
    except Failed as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
