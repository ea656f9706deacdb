"""Asks a running endpoint with the openai client, and prints what came and how long it took. Exit status 0 if it did.

    python bench/openai_client.py --url http://127.0.0.1:8000
    python bench/openai_client.py --same                       # the endpoint runs with --invariant
    python bench/openai_client.py --chat                       # a chat, too; the model needs a template

The same prompt is sent twice, once for a whole answer and once for a stream. Without `--invariant` rounding depends on
how many tokens a step feeds, and the tokens of random weights are nearly equal, so that only their number has to be the
same.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from openai import OpenAI

TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--same", action="store_true", help="the streamed text has to be that of the whole answer")
    parser.add_argument("--chat", action="store_true", help="ask for a chat, too, as a whole and for a stream")
    given = parser.parse_args()
    try:
        from openai import OpenAI
    except ImportError:
        sys.exit("the openai package is not installed: pip install openai")
    client = OpenAI(base_url=f"{given.url}/v1", api_key="none", timeout=60)
    model = client.models.list().data[0].id
    begin = time.perf_counter()
    # Random weights may end a text at once; token ids serve where they know no text.
    more = {"ignore_eos": True}
    whole = client.completions.create(
        model=model, prompt=[3, 14, 15, 92], max_tokens=TOKENS, temperature=0, extra_body=more
    )
    took = time.perf_counter() - begin
    made = 0 if whole.usage is None else whole.usage.completion_tokens
    print(f"{model}: {made} tokens in {took * 1e3:.1f} ms")
    begin, first, streamed, made_streamed = time.perf_counter(), 0.0, "", 0
    for chunk in client.completions.create(
        model=model,
        prompt=[3, 14, 15, 92],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    ):
        first = first or time.perf_counter() - begin
        streamed += "".join(choice.text for choice in chunk.choices)
        made_streamed = chunk.usage.completion_tokens if chunk.usage else made_streamed
    print(f"streamed: first chunk after {first * 1e3:.1f} ms, end after {(time.perf_counter() - begin) * 1e3:.1f} ms")
    if not made == made_streamed == TOKENS:
        sys.exit(f"{made} tokens of {TOKENS}, and {made_streamed} in the stream")
    if given.same and streamed != whole.choices[0].text:
        sys.exit(f"streamed {streamed!r}, at once {whole.choices[0].text!r}")
    if given.chat:
        ask_a_chat(client, model)


def ask_a_chat(client: OpenAI, model: str) -> None:
    """Ask for a chat as a whole and for a stream; exit with a status of 1 unless each has all its tokens."""
    said = {"role": "user", "content": "What does def read_lines(path) do?"}
    more = {"ignore_eos": True}
    whole = client.chat.completions.create(
        model=model, messages=[said], max_tokens=TOKENS, temperature=0, extra_body=more
    )
    made = 0 if whole.usage is None else whole.usage.completion_tokens
    made_streamed, ended = 0, ""
    for chunk in client.chat.completions.create(
        model=model,
        messages=[said],
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    ):
        ended = next((choice.finish_reason for choice in chunk.choices if choice.finish_reason), ended)
        made_streamed = chunk.usage.completion_tokens if chunk.usage else made_streamed
    print(f"chat: {made} tokens, {made_streamed} in the stream, which ended with {ended}")
    if not made == made_streamed == TOKENS or {ended, whole.choices[0].finish_reason} != {"length"}:
        sys.exit(f"a chat of {TOKENS} tokens had {made}, and {made_streamed} in the stream")


if __name__ == "__main__":
    main()
