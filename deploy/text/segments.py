"""Encoding a conversation's new part only: a text is cut where its tokens cannot depend on what stands before the cut,
and the ids of what lies between two cuts are remembered.

Most of a chat was in the request before it, and its system prompt is in those of others. A tokenizer looks for the
tokens that were added to its vocabulary, as those that name roles, before anything else, and encodes what is between
them apart. So the ids of a text are those of its segments, one after the other, where each segment but the first begins
with such a token.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Sequence
from sys import getsizeof
from typing import Any, Final, NamedTuple, Protocol
from unicodedata import category

from deploy.text.chat import BREAK, beginnings
from deploy.text.lane import aside, at_once
from workers.protocol.request import pack_tokens

LEAST_CHARS: Final = 256
"""Segments are not shorter than this, but for the last one of a text: looking one up takes time, too."""
MOST_SEGMENTS: Final = 1024
"""Texts of more segments are encoded whole."""
INLINE_CHARS: Final = 2**16
"""Texts of up to so many characters are cut in the event loop."""
MOST_BYTES: Final = 64 * 1024 * 1024
"""Memory for segments and their ids."""
_ENTRY_BYTES: Final = 400
"""What a segment takes besides its characters and ids."""
_OF_WORDS: Final = ("L", "M", "N", "Pc", "Cf")
"""Categories of the characters that words consist of, and a few more."""


class Cuts:
    """Places at which the texts of one tokenizer may be cut."""

    def __init__(self, backend: Any) -> None:
        """`backend`: a `tokenizers.Tokenizer`."""
        tokens = [token for token in backend.get_added_tokens_decoder().values() if token.content]
        tails = [token.content[1:] for token in tokens]
        within = "\0".join(tails)
        ends = {tail[begin:] for tail in tails for begin in range(len(tail))}
        bound = [token.content for token in tokens if token.lstrip or token.single_word or token.normalized]
        words = any(token.single_word for token in tokens)

        def begins_a_segment(text: str) -> bool:
            """Whether the tokenizer separates what stands before `text`, whatever that is: no added token that begins
            earlier reaches into it, none that ends before it has to end a word, and none that begins with it depends on
            what is around, or is looked for in normalized text."""
            reached = text in within or any(text[:length] in ends for length in range(1, len(text) + 1))
            goes_on = words and category(text[0]).startswith(_OF_WORDS)
            return not (reached or goes_on or text[0].isspace() or any(other.startswith(text) for other in bound))

        # Settings under which the ids of a text are not those of its parts.
        whole = backend.truncation or backend.padding or backend.encode_special_tokens
        safe = [] if whole else [token.content for token in tokens if begins_a_segment(token.content)]
        self._begins: re.Pattern[str] | None = beginnings(safe)

    def segments(self, text: str) -> list[str]:
        """`text` in parts, each of which but the first begins with an added token."""
        parts, begin = [], 0
        for found in self._begins.finditer(text, LEAST_CHARS) if self._begins is not None else ():
            if found.start() - begin >= LEAST_CHARS:
                parts.append(text[begin : found.start()])
                begin = found.start()
        parts.append(text[begin:])
        return parts


class Encodes(Protocol):
    """What is needed of a tokenizer."""

    @property
    def cuts(self) -> Cuts:
        """Where its texts may be cut."""

    async def encode_async(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """Ids of a text, without a limit where `most` is None."""

    async def encode_all_async(
        self, texts: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """Ids of each of several texts."""


class _Key(NamedTuple):
    salt: bytes
    segment: str
    """One that begins a text is encoded like an equal one within a text: they begin with the same token, or are none
    that could be within one."""


class EncodedSegments:
    """Encodes texts with one tokenizer and remembers their segments, the latest ones. There is one per router."""

    def __init__(self, tokenizer: Encodes, most_bytes: int = MOST_BYTES) -> None:
        """`most_bytes`: memory for what is remembered; 0 for nothing."""
        self._tokenizer, self._most, self._held = tokenizer, most_bytes, 0
        self._cuts = tokenizer.cuts  # made here, and not while a first request waits
        self._known: OrderedDict[_Key, bytes] = OrderedDict()

    async def encode(self, text: str, salt: bytes) -> bytes:
        """The ids of `text`, packed, without those that a tokenizer adds around it. Only texts of equal `salt` find
        what others left: how long encoding takes tells what was encoded before."""
        keys = await (at_once if len(text) <= INLINE_CHARS else aside)(self._keys, text, salt)
        if self._most <= 0 or not 1 < len(keys) <= MOST_SEGMENTS:
            return pack_tokens(await self._tokenizer.encode_async(text, False))
        found = {key: self._known.get(key) for key in keys}
        if missing := [key for key, packed in found.items() if packed is None]:
            encoded = await self._tokenizer.encode_all_async([key.segment for key in missing], False)
            found.update(zip(missing, map(pack_tokens, encoded), strict=True))
        for key, packed in found.items():
            assert packed is not None
            self._remember(key, packed)
        return b"".join([found[key] or b"" for key in keys])

    def _keys(self, text: str, salt: bytes) -> list[_Key]:
        return [_Key(salt, segment) for part in text.split(BREAK) for segment in self._cuts.segments(part)]

    def _remember(self, key: _Key, packed: bytes) -> None:
        if key in self._known:
            self._known.move_to_end(key)
            return
        self._known[key] = packed
        self._held += _size(key, packed)
        while self._held > self._most:
            self._held -= _size(*self._known.popitem(last=False))


def _size(key: _Key, packed: bytes) -> int:
    return getsizeof(key.segment) + len(packed) + _ENTRY_BYTES
