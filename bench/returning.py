"""Agents' sessions that return to a running endpoint: how much of their prompts is reused, and how long they wait.

    latentserve serve --model DIR --host-cache-bytes 64000000000
    latentserve serve --model DIR --host-cache-bytes 16000000000 --disk-cache-bytes 256000000000 --disk-cache-dir /nvme
    python bench/returning.py                                # 40 sessions of 8,000 to 60,000 tokens
    python bench/returning.py --url http://host:8000 --sessions 80 --json returning.json
    python bench/returning.py --seconds 120                  # where it would take too long: of the turns until then
    python bench/returning.py --sessions 12 --turns 4 --first 300 --last 1200 --think 0.2 1.0    # the demo model
    latentserve serve --model demo --tensor-parallel 1 --drafter none --replicas 2 --cache-pages 200 \\
        --host-cache-bytes 100000000
    python bench/returning.py --sessions 60 --turns 5 --system 256 --first 500 --last 1900 --output 16    # to both

A session begins with a prompt of its own, of which the first `--system` tokens are those of all sessions, and takes
`--turns` turns. Each sends all that was said before, the answers that the endpoint gave among it, and some tokens more,
so that the context grows evenly from about `--first` to about `--last` tokens. Between an answer and the next turn the
agent works for a time that is drawn evenly in the logarithm. Sessions begin spread over the longest such time. Prompts
are random token ids, answers greedy, and none ends by itself.

Printed are the share of prompt tokens that the endpoint took from a cache, by its own account (`cached_tokens`), beside
the share that any cache could give; and the time to the first token of the turns that return. Exit status 1 where a
request fails, or where less is reused than `--bound`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from deploy.loadtest.load_report import percentile
from kernels.page import PAGE_TOKENS

JSON = {"content-type": "application/json"}
LEAST_ID = 10
"""Lower ids are most often special tokens."""


class Failed(Exception):
    """The endpoint did not do what it was asked for; the text says what came instead."""


@dataclass(frozen=True)
class Turn:
    """What came of one request."""

    number: int
    """Of its session; the first is 0."""
    prompt: int
    """Tokens, like the next two."""
    cached: int
    known: int
    """Whole pages of the prompt that the session has sent, or been sent, before, or that another has begun with."""
    waited_s: float
    """For the first token."""


class Sessions:
    """All that is sent to the endpoint, as a function of the seed and of what it answers."""

    def __init__(self, http: httpx.AsyncClient, model: str, given: argparse.Namespace) -> None:
        self._http, self._model, self._given = http, model, given
        self.turns: list[Turn] = []
        self._system = random.Random(f"{given.seed} system").choices(range(LEAST_ID, given.vocab), k=given.system)
        self._system_sent = False
        self._begin = time.perf_counter()

    def _over(self) -> bool:
        """Whether no further turn is to begin."""
        return self._given.seconds is not None and time.perf_counter() - self._begin > self._given.seconds

    async def session(self, number: int) -> None:
        """One session from its first prompt to its last answer."""
        given, chance = self._given, random.Random(f"{self._given.seed} {number}")
        least, most = given.think
        await asyncio.sleep(chance.random() * most)
        grows = max(1, (given.last - given.first) // max(1, given.turns - 1) - given.output)
        history = [*self._system]
        for turn in range(given.turns):
            if self._over():
                return
            if turn == 0:
                known = len(history) if self._system_sent else 0
                self._system_sent = True
            else:
                known = len(history) - 1  # the last token of an answer was never fed
            fresh = given.first - len(history) if turn == 0 else grows
            history += [chance.randrange(LEAST_ID, given.vocab) for _ in range(fresh)]
            cached, waited, answer = await self._ask(history)
            self.turns.append(Turn(turn, len(history), cached, known // PAGE_TOKENS * PAGE_TOKENS, waited))
            history += answer
            if turn + 1 < given.turns:
                await asyncio.sleep(math.exp(chance.uniform(math.log(least), math.log(most))))

    async def _ask(self, prompt: list[int]) -> tuple[int, float, list[int]]:
        """Cached tokens, seconds for the first token, and the answer."""
        body = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": self._given.output,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        content = json.dumps(body).encode()
        sent, first, answer, usage = time.perf_counter(), 0.0, list[int](), dict[str, Any]()
        async with self._http.stream("POST", "/v1/completions", content=content, headers=JSON) as response:
            if response.status_code != 200:
                raise Failed(f"HTTP {response.status_code}: {(await response.aread())[:300].decode(errors='replace')}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[len("data: ") :])
                if "error" in event:
                    raise Failed(str(event["error"]))
                usage = event.get("usage") or usage
                ids = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
                if ids and not answer:
                    first = time.perf_counter() - sent
                answer += ids
        if len(answer) != self._given.output or not usage:
            raise Failed(f"{len(answer)} tokens came of {self._given.output}: does the endpoint know return_token_ids?")
        return (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0, first, answer


def figures(turns: list[Turn]) -> dict[str, float]:
    """What a run showed."""
    prompt = sum(turn.prompt for turn in turns)
    back = sorted(turn.waited_s for turn in turns if turn.number > 0)
    first = sorted(turn.waited_s for turn in turns if turn.number == 0)
    return {
        "requests": len(turns),
        "prompt_tokens": prompt,
        "reused": sum(turn.cached for turn in turns) / prompt,
        "reusable": sum(turn.known for turn in turns) / prompt,
        "first_prompt_p50_ms": 1e3 * percentile(first, 50),
        "return_p50_ms": 1e3 * percentile(back, 50),
        "return_p99_ms": 1e3 * percentile(back, 99),
    }


async def measured(given: argparse.Namespace) -> dict[str, float]:
    """Drive the endpoint. Failed as soon as one request fails."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=given.url, timeout=given.limit, limits=limits, trust_env=False) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        sessions = Sessions(http, model, given)
        begin = time.perf_counter()
        try:
            async with asyncio.timeout(given.limit), asyncio.TaskGroup() as group:
                for number in range(given.sessions):
                    group.create_task(sessions.session(number))
        except TimeoutError:
            raise Failed(f"it did not end within {given.limit:g} s") from None
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return {**figures(sessions.turns), "seconds": time.perf_counter() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--turns", type=int, default=12, help="of each session")
    parser.add_argument("--system", type=int, default=0, help="tokens with which all sessions begin")
    parser.add_argument("--first", type=int, default=8000, help="tokens of the first prompt")
    parser.add_argument("--last", type=int, default=60000, help="tokens of the last prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens of every answer")
    parser.add_argument("--think", type=float, nargs=2, default=(2.0, 20.0), help="seconds between turns, from and to")
    parser.add_argument("--vocab", type=int, default=4000, help="token ids are drawn below this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="begin no turn later, and print the figures of those that began")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds that all of it may take")
    parser.add_argument("--bound", type=float, help="least share of prompt tokens that is to be reused")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    given = parser.parse_args()
    if not 0 <= given.system < given.first:
        parser.error(f"--system {given.system}: the first prompt has --first {given.first} tokens, and some of its own")
    try:
        found = asyncio.run(measured(given))
    except (Failed, httpx.HTTPError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(
        f"{given.sessions} sessions of {given.turns} turns, {given.first:,} to {given.last:,} tokens: "
        f"{found['requests']:.0f} requests in {found['seconds']:.1f} s\n"
        f"reused {found['reused']:.3f} of {found['prompt_tokens']:,.0f} prompt tokens, of which "
        f"{found['reusable']:.3f} were said before\n"
        f"first token: {found['first_prompt_p50_ms']:.0f} ms of first prompts (median), "
        f"{found['return_p50_ms']:.0f} ms of those that return (p99 {found['return_p99_ms']:.0f} ms)"
    )
    if given.json:
        given.json.write_text(json.dumps(found))
    if given.bound is not None and found["reused"] < given.bound:
        print(f"less than {given.bound:g} is reused")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
