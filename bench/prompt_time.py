"""What a chat costs before the engine has its prompt: processor time of router and front, where the router hands the
ids to the front and remembers those of parts of texts, and where both encode the whole text.

    python bench/prompt_time.py --tokens 8000,100000

Router and front are the real ones, in this process, without sockets and without a client's work: the router reads the
body, packs the ids, and they are pickled and read again as on their way between two of Ray's processes; the front reads
the body, checks it and asks an engine that answers at once. What Ray itself spends on the call is not in it. The chat
is of source text in turns of 4,000 characters. A fresh one has no turn of an earlier one; a returning one goes on with
a chat that the router has read, by an answer and a question of 1,000 characters each. Printed are medians of the
repetitions in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pickle
import statistics
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import uvloop
from starlette.types import ASGIApp, Message

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frontend import NullEngine

from deploy.api.app import create_app
from deploy.routing.arrivals import ROUTING_HEADER, Arrivals
from deploy.routing.request_features import FeatureReader
from deploy.serve.under_serve import UnderServe
from deploy.text.handed import EncodedPrompt, HandedPrompts
from deploy.text.segments import MOST_BYTES
from deploy.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
os.environ["TOKENIZERS_PARALLELISM"] = "false"  # as in the processes of a cluster (deploy/cluster/environment.py)
T = TypeVar("T")


def chat(tokenizer: Tokenizer, tokens: int, number: int) -> bytes:
    """The body of a chat of about so many tokens, like no other one."""
    files = [*sorted((ROOT / "workers").rglob("*.py")), *sorted((ROOT / "deploy").rglob("*.py"))]
    text, counted = f"{number}\n", 0
    for file in files * 9:
        more = file.read_text()
        counted += len(tokenizer.encode(more))
        text += more
        if counted >= tokens:
            break
    text = text[: len(text) * tokens // counted]
    turns = [f"{number} {text[begin : begin + 4000]}" for begin in range(0, len(text), 4000)]
    messages = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
    messages += [{"role": "user", "content": "Go on."}] * (len(messages) % 2 == 0)
    return json.dumps({"model": "null", "messages": messages, "max_tokens": 1}).encode()


async def spent(work: Awaitable[T]) -> tuple[float, T]:
    """Milliseconds of the processor that `work` took, in all threads, and what it gave."""
    begin = time.process_time()
    result = await work
    return (time.process_time() - begin) * 1e3, result


async def asked(front: ASGIApp, body: bytes, routed: str) -> None:
    """Have a front answer a chat. RuntimeError where it refuses it."""
    given = (("content-type", "application/json"), ("content-length", str(len(body))), (ROUTING_HEADER, routed))
    headers = [(name.encode(), value.encode()) for name, value in given]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/chat/completions",
        "raw_path": b"/v1/chat/completions",
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    left = asyncio.Event()

    async def receive() -> Message:
        if waiting:
            return waiting.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start" and message["status"] != 200:
            raise RuntimeError(f"the front answered {message['status']}")

    await front(scope, receive, send)


def goes_on(body: bytes) -> bytes:
    """The body of the next turn of a chat."""
    given = json.loads(body)
    answer = "".join(reversed(given["messages"][0]["content"][:1000]))
    given["messages"] += [{"role": "assistant", "content": answer}, {"role": "user", "content": answer[::-1]}]
    return json.dumps(given).encode()


class Pair:
    """A router and a front; `once`: the router alone encodes a prompt, and of a chat that goes on what is new."""

    def __init__(self, tokenizer: Tokenizer, once: bool) -> None:
        self._handed, self._once, self._sent = HandedPrompts(), once, 0
        app = create_app(NullEngine(tokenizer), tokenizer, handed=self._handed)
        self._front = UnderServe(app, "me", Arrivals(), None, self._handed)
        self._reader = FeatureReader(tokenizer, segment_bytes=MOST_BYTES if once else 0)

    async def asked(self, body: bytes, tokens: int) -> tuple[float, float]:
        """Milliseconds of router and of front for a chat of about so many tokens."""
        self._sent += 1
        router_ms, _ = await spent(self._routed(body, tokens))
        front_ms, _ = await spent(asked(self._front, body, f"r/{self._sent}/{tokens}/1"))
        return router_ms, front_ms

    async def _routed(self, body: bytes, tokens: int) -> None:
        features, prompt = await self._reader.read_prompt(body)
        assert features.tokens > 0.9 * tokens
        if self._once and prompt is not None:
            digest, packed = pickle.loads(pickle.dumps((prompt.digest, prompt.packed)))
            self._handed.give(f"r/{self._sent}", EncodedPrompt(digest, packed))


async def measure(tokenizer: Tokenizer, tokens: int, repeat: int) -> None:
    """Print what fresh and returning chats of about so many tokens cost."""
    pairs = {once: Pair(tokenizer, once) for once in (False, True)}
    gc.collect()
    gc.freeze()  # as router and replica do once they are up
    times: dict[tuple[str, bool], list[tuple[float, float]]] = {}
    for number in range(repeat + 1):
        body = chat(tokenizer, tokens, number)
        for once in (False, True) if number % 2 else (True, False):
            for kind, given in (("fresh", body), ("returning", goes_on(body))):
                gc.collect()
                found = await pairs[once].asked(given, tokens)
                if number:  # the first ones import and compile
                    times.setdefault((kind, once), []).append(found)
    for kind in ("fresh", "returning"):
        sums = {}
        for once in (False, True):
            router_ms, front_ms = (statistics.median(column) for column in zip(*times[kind, once], strict=True))
            sums[once] = statistics.median(map(sum, times[kind, once]))
            what = f"{tokens} tokens, {kind}, encoded {'once ' if once else 'twice'}"
            print(f"{what}: router {router_ms:.1f} ms, front {front_ms:.1f} ms, both {sums[once]:.1f} ms")
        print(f"{tokens} tokens, {kind}: {sums[True] / sums[False]:.2f} of the time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"), help="a folder with a tokenizer")
    parser.add_argument("--tokens", default="8000,100000", help="of the chats")
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    tokenizer = Tokenizer.load(options.model)
    if tokenizer is None:
        raise SystemExit(f"{options.model} holds no tokenizer")
    for tokens in options.tokens.split(","):
        uvloop.run(measure(tokenizer, int(tokens), options.repeat))


if __name__ == "__main__":
    main()
