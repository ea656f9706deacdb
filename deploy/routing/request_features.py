"""Cost of a request, read from its body before any replica sees it: prompt tokens, page hashes, sequences.

Never fails: a body that makes no sense is the chosen replica's to refuse, it only has to be sent somewhere. Of a body
that was cut off at the router's limit, the head gives the page hashes, its tokens a byte give the length of the rest.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any, Literal

from pydantic_core import from_json

from deploy.config.cache_salts import SHARED, CacheSalts
from deploy.routing.chat_shapes import as_chat
from deploy.routing.policy import RequestFeatures
from deploy.text.chat import (
    MOST_MESSAGES,
    MOST_TEMPLATE_VARIABLES,
    ChatTemplateError,
    Content,
    content_of,
    is_begun,
    readable,
    spoken,
    template_message,
    tools_of,
)
from deploy.text.effort import thinking_of
from deploy.text.handed import HAND_OVER_TOKENS, EncodedPrompt, text_digest
from deploy.text.lane import aside, at_once
from deploy.text.mending import with_whole_escapes
from deploy.text.segments import MOST_BYTES, EncodedSegments
from deploy.text.tokenizer import Tokenizer
from kernels.page import PAGE_TOKENS
from workers.protocol.request import PAGE_BYTES, TOKEN_BYTES, Prompt, pack_tokens

BYTES_PER_TOKEN = 4
"""Bytes per token where nothing better is known."""
REMEMBERED = 512
"""Bodies whose features are remembered."""
REMEMBERED_BYTES = 64 * 1024 * 1024
"""Most that their prompts take."""
MOST_ROWS = 1024
"""Nonsense must not outweigh all other requests."""
INLINE_MESSAGES = 256
"""Chats of up to so many messages are rendered in the event loop."""


class FeatureReader:
    """Turns bodies of the generating endpoints into what routing needs to know."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        chat_template: str | None = None,
        control_tokens_in_text: bool = False,
        salts: CacheSalts = SHARED,
        segment_bytes: int = MOST_BYTES,
    ) -> None:
        """`tokenizer`, settings and `salts`: the same as the replicas', so that page hashes agree; None for a model
        without a tokenizer. `segment_bytes`: memory for parts of prompts and their ids (`deploy.text.segments`)."""
        self._tokenizer, self._salts = tokenizer, salts
        self._segments = None if tokenizer is None else EncodedSegments(tokenizer, segment_bytes)
        self._template, self._control_tokens_in_text = chat_template, control_tokens_in_text
        self._recent: OrderedDict[bytes, tuple[RequestFeatures, EncodedPrompt | None]] = OrderedDict()
        self._held = 0
        """Bytes of the prompts in `_recent`."""
        self._reading: dict[bytes, asyncio.Task[tuple[RequestFeatures, EncodedPrompt | None]]] = {}
        """By digest: bodies that are being read."""

    async def read(self, body: bytes, full_length: int | None = None, key: str = "") -> RequestFeatures:
        """`full_length`: bytes of the whole body when `body` is only its head. `key`: name of the request's API key;
        empty where there is none that is known."""
        features, _ = await self.read_prompt(body, full_length, key)
        return features

    async def read_prompt(
        self, body: bytes, full_length: int | None = None, key: str = ""
    ) -> tuple[RequestFeatures, EncodedPrompt | None]:
        """`read`, and the prompt where it is worth handing over: a long one, the only one of its request, all of which
        is here. Equal bodies that come at one time are read once, also where the one that came first is given up."""
        whole = full_length or len(body)
        of = whole.to_bytes(8, "little") + self._salts.salt(key, None)
        digest = blake2b(body, digest_size=16, key=of).digest()
        if (known := self._recent.get(digest)) is not None:
            self._recent.move_to_end(digest)
            return known
        if (reading := self._reading.get(digest)) is None:
            reading = self._reading[digest] = asyncio.create_task(self._read_once(digest, body, whole, key))
        return await asyncio.shield(reading)

    async def _read_once(
        self, digest: bytes, body: bytes, whole: int, key: str
    ) -> tuple[RequestFeatures, EncodedPrompt | None]:
        """Read a body that is neither remembered nor being read, and remember it."""
        try:
            read = await self._read(body, whole, key)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError, ChatTemplateError):
            read = RequestFeatures(whole // BYTES_PER_TOKEN), None
        finally:
            del self._reading[digest]
        self._recent[digest] = read
        self._held += len(read[0].prompt.packed)
        while len(self._recent) > REMEMBERED or self._held > REMEMBERED_BYTES:
            _, (oldest, _) = self._recent.popitem(last=False)
            self._held -= len(oldest.prompt.packed)
        return read

    async def _read(self, body: bytes, whole: int, key: str) -> tuple[RequestFeatures, EncodedPrompt | None]:
        cut = whole > len(body)
        data = _loaded(body, cut)
        if not isinstance(data, dict):
            raise TypeError("not an object")
        asked = data.get("cache_salt")
        salt = self._salts.salt(key, asked if isinstance(asked, str) else None)
        prompts = await self._prompts(data, salt)
        lengths = [prompt.length for prompt in prompts]
        if not sum(lengths):
            return RequestFeatures(whole // BYTES_PER_TOKEN), None
        # Pages are looked up for the first prompt only: the others of one request mostly share what it shares.
        first = prompts[0]
        features = RequestFeatures(sum(lengths), first, min(_rows(data) * len(prompts), MOST_ROWS), salt)
        if cut:
            # The last word was cut: it may be other tokens in the whole text.
            known = Prompt(first.packed[: max(first.length - 1, 0) // PAGE_TOKENS * PAGE_BYTES])
            features = replace(
                features, tokens=max(round(features.tokens * whole / len(body)), features.tokens), prompt=known
            )
        alone = len(prompts) == 1 and first.length >= HAND_OVER_TOKENS and not cut
        return features, EncodedPrompt(first.digest, first.packed) if alone and first.digest else None

    async def _prompts(self, data: Mapping[str, Any], salt: bytes) -> list[_Encoded]:
        if "messages" in data or "input" in data:
            return [await self._chat(as_chat(data), salt)]
        prompt = data.get("prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise TypeError("no prompt")
        if all(type(item) is int for item in prompt):
            return [_Encoded(pack_tokens(prompt))]
        special = data.get("add_special_tokens") is not False
        return [
            _Encoded(pack_tokens(item)) if isinstance(item, list) else await self._encode(item, special, salt)
            for item in prompt
        ]

    async def _chat(self, data: Mapping[str, Any], salt: bytes) -> _Encoded:
        if self._tokenizer is None:
            raise TypeError("no tokenizer")
        given, extra = data["messages"], data.get("chat_template_kwargs") or {}
        if len(given) > MOST_MESSAGES or len(extra) > MOST_TEMPLATE_VARIABLES:
            raise ValueError("a replica refuses it")
        messages = [
            template_message(str(message["role"]), _content(message.get("content")), message)
            for message in readable(given)
            if isinstance(message, dict) and "role" in message
        ]
        tools = tools_of(data.get("tools") or []) if data.get("tool_choice") not in ("none", {"type": "none"}) else []
        begun = is_begun(given)
        render = partial(
            self._tokenizer.render_chat,
            messages,
            tools=tools,
            template=self._template,
            add_generation_prompt=data.get("add_generation_prompt") is not False and not begun,
            continue_final_message=data.get("continue_final_message") is True or begun,
            thinking=thinking_of(data),
            extra=extra,
            control_tokens_in_text=self._control_tokens_in_text,
        )
        text = await (aside if len(messages) > INLINE_MESSAGES else at_once)(render)
        return await self._encode(text, data.get("add_special_tokens") is True, salt)

    async def _encode(self, text: Any, special: bool, salt: bytes) -> _Encoded:
        if self._tokenizer is None or self._segments is None or not isinstance(text, str):
            raise TypeError("no tokenizer, or no text")
        if special:  # what a tokenizer adds stands around the whole text
            packed = pack_tokens(await self._tokenizer.encode_async(text, True))
        else:
            packed = await self._segments.encode(text, salt)
        long = len(packed) >= HAND_OVER_TOKENS * TOKEN_BYTES
        return _Encoded(packed, text_digest(text, special) if long else b"")


class _Encoded(Prompt):
    """A prompt of a body, and the digest of its text where it is a long text."""

    def __init__(self, packed: bytes, digest: bytes = b"") -> None:
        super().__init__(packed)
        self.digest = digest


def _loaded(body: bytes, cut: bool) -> Any:
    partial: Literal["trailing-strings", False] = "trailing-strings" if cut else False
    try:
        return from_json(body, allow_partial=partial)
    except ValueError:
        return from_json(with_whole_escapes(body), allow_partial=partial)


def _rows(data: Mapping[str, Any]) -> int:
    n = data.get("n")
    return n if isinstance(n, int) and n > 0 else 1


def _content(content: Any) -> Content:
    if isinstance(content, list):
        return content_of([part["text"] for part in spoken(content) if isinstance(part, dict) and "text" in part])
    return content if isinstance(content, str) else ""
