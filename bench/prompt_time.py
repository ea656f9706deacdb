"""What a chat costs before the engine has its prompt: processor time of router and front, with and without the router's
handing the ids to the front.

    python bench/prompt_time.py --tokens 8000,100000

Router and front are the real ones, in this process, without sockets: the router reads the body, packs the ids, and they
are pickled and read again as on their way between two of Ray's processes; the front reads the body, checks it and asks
an engine that answers at once. What Ray itself spends on the call is not in it. The chat is of source text in turns of
4,000 characters; printed is the median of the repetitions in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import pickle
import statistics
import sys
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import httpx

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from frontend import NullEngine

from deploy.api.app import create_app
from deploy.routing.arrivals import ROUTING_HEADER, Arrivals
from deploy.routing.request_features import FeatureReader
from deploy.serve.under_serve import UnderServe
from deploy.text.handed import EncodedPrompt, HandedPrompts
from deploy.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
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
    turns = [text[begin : begin + 4000] for begin in range(0, len(text), 4000)]
    messages = [{"role": ("user", "assistant")[place % 2], "content": turn} for place, turn in enumerate(turns)]
    messages += [{"role": "user", "content": "Go on."}] * (len(messages) % 2 == 0)
    return json.dumps({"model": "null", "messages": messages, "max_tokens": 1}).encode()


async def spent(work: Awaitable[T]) -> tuple[float, T]:
    """Milliseconds of the processor that `work` took, in all threads, and what it gave."""
    begin = time.process_time()
    result = await work
    return (time.process_time() - begin) * 1e3, result


async def measure(tokenizer: Tokenizer, tokens: int, repeat: int) -> None:
    handed = HandedPrompts()
    front = UnderServe(create_app(NullEngine(tokenizer), tokenizer, handed=handed), "me", Arrivals(), None, handed)
    reader = FeatureReader(tokenizer)

    async def routed(body: bytes, number: int, hand_over: bool) -> None:
        features, prompt = await reader.read_prompt(body)
        assert features.tokens > 0.9 * tokens
        if hand_over and prompt is not None:
            digest, packed = pickle.loads(pickle.dumps((prompt.digest, prompt.packed)))
            handed.give(f"r/{number}", EncodedPrompt(digest, packed))

    times: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(front), base_url="http://front") as http:
        for number in range(2 * repeat):
            body, hand_over = chat(tokenizer, tokens, number), bool(number % 2)
            gc.collect()
            router_ms, _ = await spent(routed(body, number, hand_over))
            headers = {"content-type": "application/json", ROUTING_HEADER: f"r/{number}/{tokens}/1"}
            front_ms, answer = await spent(http.post("/v1/chat/completions", content=body, headers=headers))
            answer.raise_for_status()
            times[hand_over].append((router_ms, front_ms))
    sums = {}
    for hand_over, found in times.items():
        router_ms, front_ms = (statistics.median(column) for column in zip(*found, strict=True))
        sums[hand_over] = router_ms + front_ms
        kind = "ids handed over" if hand_over else "encoded twice  "
        print(
            f"{tokens} tokens, {kind}: router {router_ms:.1f} ms, front {front_ms:.1f} ms, both {sums[hand_over]:.1f}"
        )
    print(f"{tokens} tokens: {sums[True] / sums[False]:.2f} of the time")


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
        asyncio.run(measure(tokenizer, int(tokens), options.repeat))


if __name__ == "__main__":
    main()
