"""Sessions of a load that is read from a file: what users wrote, turn by turn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

USERS = ("human", "user")
SYSTEMS = ("system",)
MOST_BYTES = 1 << 31


@dataclass(frozen=True)
class Turn:
    """One user turn, and the messages before it that no model wrote."""

    messages: tuple[dict[str, str], ...]
    """Messages of the chat API: system messages, if any, and one user message."""
    output: int | None = None
    """Tokens to generate; None: as many as of every other request."""


Session = tuple[Turn, ...]
"""Turns of a session. Each is sent when the one before is answered, with the answers that the endpoint gave."""


class TraceError(ValueError):
    """A file that holds no sessions; the text says where and what is missing."""


def read_trace(path: Path, most: int | None = None) -> list[Session]:
    """The first `most` sessions of a file of JSON lines, or of one JSON array, as ShareGPT is published:

    - `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", ...}, ...]}`: what the human wrote counts;
    - `{"messages": [{"role": "user", "content": "..."}, ...]}`: what users wrote, and system messages;
    - `{"prompt": "..."}`: one turn.

    `max_tokens` beside any of them says how many tokens each of its turns asks for. OSError where the file cannot be
    read, TraceError where it is something else; an entry in which nobody wrote anything is left out.
    """
    if path.stat().st_size > MOST_BYTES:
        raise TraceError(f"{path} has more than {MOST_BYTES >> 30} GiB: cut it down")
    sessions: list[Session] = []
    for place, entry in _entries(path):
        if most is not None and len(sessions) >= most:
            break
        try:
            session = _session(entry)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                f"{place} is no session ({_cause(error)}): it needs conversations, messages or a prompt"
            ) from None
        if session:
            sessions.append(session)
    if not sessions:
        raise TraceError(f"{path} holds no session in which a user writes something")
    return sessions


def _cause(error: Exception) -> str:
    return f"no {error}" if isinstance(error, KeyError) else str(error)


def _entries(path: Path) -> Iterator[tuple[str, Any]]:
    """Every entry and where it stands."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no UTF-8 text: {error}") from None
    if text.lstrip().startswith("["):
        try:
            entries = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path} is no JSON: {error}") from None
        yield from ((f"{path}, entry {number}", entry) for number, entry in enumerate(entries, 1))
        return
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{path}, line {number} is no JSON: {error}") from None
        yield f"{path}, line {number}", entry


def _session(entry: dict[str, Any]) -> Session:
    output = entry.get("max_tokens")
    if output is not None and (not isinstance(output, int) or isinstance(output, bool) or output < 1):
        raise ValueError(f"max_tokens is {output!r}")
    if "prompt" in entry:
        said = [("user", entry["prompt"])]
    elif "messages" in entry:
        said = [(message["role"], message["content"]) for message in entry["messages"]]
    else:
        said = [(part["from"], part["value"]) for part in entry["conversations"]]
    turns, before = [], []
    for who, text in said:
        if not isinstance(text, str):
            raise TypeError(f"what {who!r} says is no text")
        if who in SYSTEMS:
            before.append({"role": "system", "content": text})
        elif who in USERS and text:
            turns.append(Turn((*before, {"role": "user", "content": text}), output))
            before = []
    return tuple(turns)
