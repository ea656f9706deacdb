"""Prompts that a router has encoded to choose a replica, handed to that replica so that it need not encode them again.

A prompt travels beside its request, over Ray Serve's own channel, on which clients cannot write. It belongs to the one
request that carries the routing record under which it was handed over, and to one text: the replica makes the text
itself, from the body that it has checked, and takes the ids only if they were made of exactly that text. So a router
that reads a body otherwise than its replica costs time and never gives wrong ids.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from hashlib import blake2b

from workers.protocol.request import Prompt, pack_tokens

HAND_OVER_TOKENS = 1024
"""Shorter prompts are encoded again: that takes no longer than to hand them over."""
MOST_BYTES = 64 * 1024 * 1024
"""Of prompts whose requests have not come. Some never do."""


@dataclass(frozen=True)
class EncodedPrompt:
    """A text and its ids, in a form that travels."""

    digest: bytes
    """Of the text, and of whether special tokens were added (`text_digest`)."""
    packed: bytes
    """Its ids, as `pack_tokens` makes them."""

    @staticmethod
    def of(text: str, add_special_tokens: bool, ids: list[int]) -> EncodedPrompt:
        """As a router hands it over."""
        return EncodedPrompt(text_digest(text, add_special_tokens), pack_tokens(ids))


def text_digest(text: str, add_special_tokens: bool) -> bytes:
    """Names a text and how it is encoded; 128 bits, so that nobody finds another text with the same."""
    # Python's strings may hold halves of surrogate pairs, which UTF-8 has no bytes for; no tokenizer takes them.
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, key=b"%d" % add_special_tokens).digest()


class HandedPrompts:
    """Prompts between their coming and their request's. One per front."""

    def __init__(self, taken: Callable[[], None] = lambda: None, most_bytes: int = MOST_BYTES) -> None:
        """`taken` is called for each prompt that comes to its request and to its text."""
        self._taken, self._most, self._held = taken, most_bytes, 0
        self._waiting: OrderedDict[str, EncodedPrompt] = OrderedDict()
        self._current: ContextVar[EncodedPrompt | None] = ContextVar("handed prompt", default=None)

    def give(self, ticket: str, prompt: EncodedPrompt) -> None:
        """Keep it for the request with this ticket. The oldest make room."""
        self._forget(ticket)
        self._waiting[ticket] = prompt
        self._held += len(prompt.packed)
        while self._held > self._most:
            self._forget(next(iter(self._waiting)))

    def arrive(self, ticket: str | None) -> None:
        """A request came in, with this ticket: `ids` in its task and the task's children are asked about it."""
        self._current.set(None if ticket is None else self._forget(ticket))

    def ids(self, text: str, add_special_tokens: bool) -> Prompt | None:
        """The ids of `text` as it was handed over with the current request; None where nothing was, or another text."""
        prompt = self._current.get()
        if prompt is None or prompt.digest != text_digest(text, add_special_tokens):
            return None
        self._taken()
        return Prompt(prompt.packed)

    def _forget(self, ticket: str) -> EncodedPrompt | None:
        prompt = self._waiting.pop(ticket, None)
        if prompt is not None:
            self._held -= len(prompt.packed)
        return prompt
