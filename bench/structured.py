"""Whether every constrained answer is valid, and the same at every width, while other prompts are served beside.

    python bench/structured.py                                  # the demo model on this machine's CPU, 1, 3 and auto
    python bench/structured.py --requests 40 --widths 2
    python bench/structured.py --url http://host:8000           # an endpoint that runs already

For each width it starts `latentserve serve --model demo` and asks it, with the official openai client and 16 streams at
once, for answers under JSON schemas, half of them sampled with a seed. Beside them go plain prompts of 300 tokens. It
prints how many answers parsed and validated and how many texts differ from the first width's, with the requests that
did; the exit status is 0 only where all are valid and none differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import openai

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.soak import Application, long_model

STREAMS = 16
WORDS = ("red", "green", "blue", "open", "closed", "north", "south")


def drawn_schema(draw: Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose answers are short: what a model makes of an unbounded string may have no end."""
    kinds = ["string", "integer", "boolean", "enum", "format"] + (["object", "array"] * 2 if depth < 2 else [])
    match draw.choice(kinds if depth else ["object"]):
        case "string":
            return {"type": "string", "maxLength": draw.randint(1, 12)}
        case "integer":
            return {"type": "integer", "minimum": draw.randint(-50, 0), "maximum": draw.randint(1, 5000)}
        case "boolean":
            return {"type": "boolean"}
        case "enum":
            return {"enum": draw.sample(WORDS, draw.randint(1, 4))}
        case "format":
            return {"type": "string", "format": draw.choice(["date", "uuid", "ipv4"])}
        case "array":
            items = drawn_schema(draw, depth + 1)
            return {"type": "array", "items": items, "minItems": draw.randint(0, 1), "maxItems": draw.randint(1, 3)}
        case _:
            names = draw.sample(["id", "name", "state", "tags", "size", "next"], draw.randint(1, 4))
            properties = {name: drawn_schema(draw, depth + 1) for name in names}
            return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def asked(number: int) -> dict[str, Any]:
    """Request `number`: the same whoever asks."""
    draw = Random(number)
    schema = drawn_schema(draw)
    sampled = {"temperature": 0.9, "top_p": 0.95, "seed": number} if number % 2 else {"temperature": 0.0}
    return {
        "messages": [{"role": "user", "content": f"def make_{draw.choice(WORDS)}({number}):"}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
        # The demo model was trained on code: between the parts of a text it likes as much white space as it may have.
        "max_tokens": 3000,
        **sampled,
    }


@contextmanager
def load_beside(url: str, model: str) -> Iterator[list[int]]:
    """Plain prompts of 300 tokens, two at a time; how many were answered."""
    over, answered = threading.Event(), [0]
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5)

    def go_on(seed: int) -> None:
        draw = Random(seed)
        while not over.is_set():
            prompt = [10 + draw.randrange(4000) for _ in range(300)]
            client.completions.create(model=model, prompt=prompt, max_tokens=24, temperature=0.0)
            answered[0] += 1

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(go_on, seed) for seed in (1, 2)]
        try:
            yield answered
        finally:
            over.set()
            for one in running:
                one.result()


def fault_of(number: int, text: str, reason: str) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if reason != "stop":
        return f"finish_reason {reason}"
    schema = asked(number)["response_format"]["json_schema"]["schema"]
    try:
        jsonschema.validate(json.loads(text), schema)
    except (json.JSONDecodeError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


def answers(url: str, requests: int) -> tuple[list[str], int]:
    """The texts, and how many are invalid; these are printed."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=5, timeout=600)
    model = client.models.list().data[0].id

    def ask(number: int) -> tuple[str, str]:
        choice = client.chat.completions.create(model=model, **asked(number)).choices[0]
        return choice.message.content or "", choice.finish_reason

    begin = time.monotonic()
    with load_beside(url, model) as beside, ThreadPoolExecutor(STREAMS) as pool:
        found = list(pool.map(ask, range(requests)))
        seconds = time.monotonic() - begin
    wrong = 0
    for number, (text, reason) in enumerate(found):
        if fault := fault_of(number, text, reason):
            wrong += 1
            print(f"  request {number}: {fault}: {text[:200]!r}")
    print(f"  {requests - wrong} of {requests} valid in {seconds:.1f} s, {beside[0]} plain prompts beside", flush=True)
    return [text for text, _ in found], wrong


@contextmanager
def served(width: str) -> Iterator[str]:
    """The address of the demo model at a width, on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        engine: dict[str, object] = {
            "model": str(long_model(Path(folder))),
            "device": "cpu",
            "tensor_parallel": 1,
            "max_rows": STREAMS,
            "token_budget": 128,
            "width": width if width == "auto" else int(width),
        }
        app = Application(Path(folder), {"engine": engine, "name": "demo", "port": 0})
        try:
            yield app.url
        finally:
            for wrong in app.stop():
                print(wrong)


def main() -> None:
    """Ask at every width and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--widths", default="1,3,auto")
    parser.add_argument("--url", action="append", help="of an endpoint that runs already, in place of widths")
    options = parser.parse_args()
    first: list[str] = []
    invalid = different = 0
    for place in options.url or options.widths.split(","):
        print(place if options.url else f"width {place}", flush=True)
        if options.url:
            texts, wrong = answers(place, options.requests)
        else:
            with served(place) as url:
                texts, wrong = answers(url, options.requests)
        invalid += wrong
        first = first or texts
        for number, (one, other) in enumerate(zip(first, texts, strict=True)):
            if one != other:
                different += 1
                print(f"  request {number} differs from the first: {one[:120]!r} and {other[:120]!r}")
    print(f"{invalid} invalid, {different} different")
    sys.exit(bool(invalid or different))


if __name__ == "__main__":
    main()
