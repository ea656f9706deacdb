"""Stutter of a running endpoint's streams while long prompts arrive beside them.

    latentserve serve --model DIR
    python bench/mixed_load.py                                       # 32 streams, prompts of 8,000 tokens every 0.5 s
    python bench/mixed_load.py --url http://host:8000 --bound 3 --json mixed.json
    python bench/mixed_load.py --vocab 4000 --input 1500             # the demo model, whose context is 2,048 tokens
    python bench/mixed_load.py --input 62000 --period 1 --repeat 6   # six prompts again and again: caches are read

All prompts are random token ids, all tokens are chosen greedily, and no text ends by itself. The streams run once with
a few tokens, so that nothing is done for the first time later. Then they begin again, and once every one has decoded
for `--settle` seconds, long prompts follow one another for `--seconds`, whether those before them were answered or not.
When the last one has been answered, the streams are stopped.

With `--repeat N` the long prompts are N, sent in turn, and each is sent once before the streams begin. So they come
from the cache, or from the host memory behind it where the cache has no room for all of them.

An event is stamped when it arrives. A gap is the time between two events of one stream, and an event may carry several
tokens where drafts are accepted. The streams ask for `return_token_ids`: then each event says how many tokens it has,
and one comes for every step, also where the text is not certain yet. An endpoint that does not know the field is
believed to send one token per event, and the table says so.

Printed are the gaps of decode alone, in the last seconds before the first long prompt, and of those beside the long
prompts; the tokens a second that the streams got; how long the long prompts waited for their first token; and the 99th
percentile of gaps beside long prompts over the median of those alone. Exit status 1 where that is more than `--bound`,
where a stream ended before the last long prompt was answered, and where the endpoint fails.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.loadtest.load_report import Distribution, percentile
from deploy.loadtest.served_model import served_model
from deploy.loadtest.sse_client import ConnectionLost, SseClient, Target
from deploy.mistakes import CommandFailure, UsageMistake

PATH = "/v1/completions"
ALONE_S = 2.5
"""Seconds before the first long prompt whose gaps are taken for those of decode alone."""
WARM_TOKENS = 20
LONG_TOKENS = 4
LOOK_S = 0.01
"""Seconds between two checks whether all streams decode."""


class Failed(Exception):
    """The endpoint did not do what it was asked for; the text says what came instead."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass
class Answer:
    """Answer to one request. Times are seconds of perf_counter."""

    name: str
    sent: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Time and number of tokens of each event. Events without tokens are left out."""
    told: bool = True
    """Whether all events said which tokens they have. One that does not is counted as one token."""
    wrong: str = ""
    finished: bool = False

    def on_event(self, data: bytes, now: float) -> None:
        """Note an event of the stream."""
        if data == b"[DONE]":
            self.finished = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError:
            self.wrong = f"an event that cannot be read: {data[:200].decode(errors='replace')}"
            return
        if event.error is not None:
            self.wrong = _message(event.error)
        elif event.choices:
            ids = event.choices[0].token_ids
            self.told &= ids is not None
            if (tokens := 1 if ids is None else len(ids)) > 0:
                self.arrivals.append((now, tokens))

    def gaps(self, begin: float, end: float) -> Iterator[float]:
        """Seconds between an event and the one before it, of the events from `begin` to before `end`."""
        for (before, _), (at, _) in pairwise(self.arrivals):
            if begin <= at < end:
                yield at - before

    def tokens(self, begin: float, end: float) -> int:
        """Return the number of tokens that came from `begin` to before `end`."""
        return sum(tokens for at, tokens in self.arrivals if begin <= at < end)

    def waited(self) -> float:
        """Seconds for the first token."""
        return self.arrivals[0][0] - self.sent


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _refusal(answer: bytes) -> str:
    try:
        return _message(json.loads(answer)["error"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")


class Load:
    """Sends what the mixed load is made of. Prompts are a function of the seed."""

    def __init__(self, client: SseClient, model: str, given: argparse.Namespace) -> None:
        self._client, self._model, self._vocab = client, model, given.vocab
        self._random = random.Random(given.seed)

    def body(self, prompt: int, output: int) -> bytes:
        """The JSON of a request with so many random prompt ids, for so many tokens."""
        return self.request(self.prompt(prompt), output)

    def prompt(self, length: int) -> list[int]:
        """Draw `length` random ids."""
        least = min(10, self._vocab - 1)  # the lowest ids are most often special tokens
        return [self._random.randrange(least, self._vocab) for _ in range(length)]

    def request(self, prompt: list[int], output: int) -> bytes:
        """The JSON of a request with this prompt, for so many tokens."""
        return json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": output,
                "temperature": 0.0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()

    async def ask(self, answer: Answer, body: bytes) -> None:
        """Send a request and note its events in `answer` until it ends. Failed when it is not answered in full."""
        answer.sent = time.perf_counter()
        try:
            status, text = await self._client.send(PATH, body, {}, answer.on_event)
        except (OSError, ConnectionLost) as error:
            raise Failed(f"{answer.name}: {str(error) or type(error).__name__}") from None
        if status != 200:
            raise Failed(f"{answer.name}: HTTP {status}: {_refusal(text)}")
        if answer.wrong:
            raise Failed(f"{answer.name}: {answer.wrong}")
        if not answer.finished or not answer.arrivals:
            what = text[:200].decode(errors="replace") or "its stream ended early"
            raise Failed(f"{answer.name} was not answered: {what}")


@dataclass(frozen=True)
class Run:
    """Answers of a run. Times are seconds of perf_counter."""

    streams: Sequence[Answer]
    longs: Sequence[Answer]
    alone: float
    """Time at which the interval began that is taken for decode alone."""
    begin: float
    """Time at which the first long prompt was sent."""
    end: float
    """Time at which the last long prompt was answered."""


async def run(load: Load, given: argparse.Namespace) -> Run:
    """The warm-up, the streams, and the long prompts beside them. Failed as soon as one request fails."""
    try:
        async with asyncio.timeout(given.limit):
            async with asyncio.TaskGroup() as group:
                for number in range(given.streams):
                    body = load.body(given.stream_input, WARM_TOKENS)
                    group.create_task(load.ask(Answer(f"warm-up {number}"), body))
            return await _beside(load, given)
    except TimeoutError:
        raise Failed(f"it did not end within {given.limit:g} s") from None
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


async def _beside(load: Load, given: argparse.Namespace) -> Run:
    # Bodies are made before the clock starts: a long one takes as long as a step.
    bodies = [load.body(given.stream_input, given.output) for _ in range(given.streams)]
    due = [number * given.period for number in range(max(1, round(given.seconds / given.period)))]
    prompts = [load.prompt(given.input) for _ in due[: given.repeat]]
    others = [load.request(prompts[number % len(prompts)], LONG_TOKENS) for number in range(len(due))]
    streams = [Answer(f"stream {number}") for number in range(given.streams)]
    longs = [Answer(f"long prompt {number}") for number in range(len(due))]
    if given.repeat is not None:
        for number, body in enumerate(others[: len(prompts)]):
            await load.ask(Answer(f"long prompt {number}, to be repeated"), body)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.ask(*one)) for one in zip(streams, bodies, strict=True)]
        while not all(stream.arrivals for stream in streams):
            await asyncio.sleep(LOOK_S)
        await asyncio.sleep(given.settle)
        begin, waiting = time.perf_counter(), []
        for seconds, long, body in zip(due, longs, others, strict=True):
            await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
            waiting.append(group.create_task(load.ask(long, body)))
        await asyncio.wait(waiting)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
    return Run(streams, longs, begin - min(ALONE_S, given.settle), begin, end)


@dataclass(frozen=True)
class Figures:
    """Figures of a run. Gaps are in milliseconds."""

    streams: int
    longs: int
    seconds: float
    """Seconds from the first long prompt to the answer of the last one."""
    alone: Distribution
    beside: Distribution
    alone_tokens_per_s: float
    """Tokens a second of all streams together."""
    beside_tokens_per_s: float
    tokens_per_event: float
    """Tokens per event of the streams, beside the long prompts."""
    first_token_median_ms: float
    """Median time to the first token of the long prompts, in milliseconds; the next field has the same prompts."""
    first_token_max_ms: float
    ended: int
    """Streams that had all their tokens before the last long prompt was answered."""
    told: bool
    """Whether the endpoint said which tokens an event has."""

    @staticmethod
    def of(run: Run) -> Figures:
        """Failed where nothing came that could be measured."""
        gaps = [
            [gap for stream in run.streams for gap in stream.gaps(*window)]
            for window in ((run.alone, run.begin), (run.begin, run.end))
        ]
        alone, beside = map(Distribution.of, gaps)
        if alone is None or beside is None:
            raise Failed("the streams gave no events to measure: give more --output, or less --settle")
        tokens = sum(stream.tokens(run.begin, run.end) for stream in run.streams)
        before = sum(stream.tokens(run.alone, run.begin) for stream in run.streams)
        first = sorted(long.waited() for long in run.longs)
        return Figures(
            streams=len(run.streams),
            longs=len(run.longs),
            seconds=run.end - run.begin,
            alone=alone,
            beside=beside,
            alone_tokens_per_s=before / (run.begin - run.alone),
            beside_tokens_per_s=tokens / (run.end - run.begin),
            tokens_per_event=tokens / len(gaps[1]),
            first_token_median_ms=1e3 * percentile(first, 50),
            first_token_max_ms=1e3 * first[-1],
            ended=sum(stream.finished for stream in run.streams),
            told=all(stream.told for stream in run.streams),
        )

    @property
    def ratio(self) -> float:
        """The 99th percentile of gaps beside long prompts over the median of those alone."""
        return self.beside.percentiles[-1] / self.alone.percentiles[0]

    def report(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__}
        gaps = {f"{name}_gap_ms": values.pop(name).report() for name in ("alone", "beside")}
        return values | gaps | {"ratio": self.ratio}

    def show(self, given: argparse.Namespace) -> None:
        """Print the table."""
        print(
            f"{self.streams} streams, {self.longs} prompts of {given.input:,} ids every {given.period:g} s, "
            f"answered within {self.seconds:.1f} s"
        )
        print("gap, ms".ljust(22) + "".join(f"{name:>9}" for name in ("p50", "p90", "p99", "max")))
        for name, gaps in (("decode alone", self.alone), ("beside long prompts", self.beside)):
            print(name.ljust(22) + "".join(f"{value:9.2f}" for value in (*gaps.percentiles, gaps.most)))
        per_event = (
            f"{self.tokens_per_event:.2f} an event" if self.told else "an event counts as one, as it does not say"
        )
        print(
            f"tokens/s of the streams: {self.alone_tokens_per_s:.0f} alone, {self.beside_tokens_per_s:.0f} beside "
            f"({per_event})"
        )
        print(
            f"first token of the long prompts: median {self.first_token_median_ms:.0f} ms, "
            f"max {self.first_token_max_ms:.0f} ms"
        )
        print(f"p99 beside / p50 alone: {self.ratio:.2f}")


def verdict(figures: Figures, given: argparse.Namespace) -> int:
    """Print what was found; the exit status."""
    figures.show(given)
    wrong = []
    if figures.ended:
        wrong.append(f"{figures.ended} streams ended before the last long prompt was answered: give more --output")
    if given.bound is not None and figures.ratio > given.bound:
        wrong.append(f"p99 beside long prompts is {figures.ratio:.2f} times p50 alone, more than {given.bound:g}")
    for line in wrong:
        print(line)
    if given.json:
        given.json.write_text(json.dumps(figures.report()))
    return bool(wrong)


async def measured(given: argparse.Namespace) -> Figures:
    """Ask the endpoint for its model, and drive it."""
    model = given.model or await served_model(given.url, None, given.limit)
    client = SseClient(Target(given.url))
    try:
        return Figures.of(await run(Load(client, model, given), given))
    finally:
        client.close()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="default: the one that is served")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-input", type=int, default=512, help="prompt ids of a stream")
    parser.add_argument("--output", type=int, default=1500, help="most tokens of a stream")
    parser.add_argument("--input", type=int, default=8000, help="prompt ids of a long prompt")
    parser.add_argument("--repeat", type=int, help="long prompts that differ; those behind are repeated ones")
    parser.add_argument("--period", type=float, default=0.5, help="seconds between two long prompts")
    parser.add_argument("--seconds", type=float, default=6.0, help="for which long prompts are sent")
    parser.add_argument("--settle", type=float, default=4.0, help="seconds of decode before the first long prompt")
    parser.add_argument("--vocab", type=int, default=100_000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that the run may take in all")
    parser.add_argument("--bound", type=float, help="most that p99 beside / p50 alone may be")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def main() -> int:
    parser = options()
    given = parser.parse_args()
    try:
        Target(given.url)
    except ValueError as error:
        parser.error(f"--url: {error}")
    # A pause of the collector here would be taken for one of the endpoint.
    gc.disable()
    try:
        figures = uvloop.run(measured(given))
    except (Failed, CommandFailure, UsageMistake) as error:
        sys.exit(str(error))
    finally:
        gc.enable()
    return verdict(figures, given)


if __name__ == "__main__":
    sys.exit(main())
