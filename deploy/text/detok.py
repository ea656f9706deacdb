"""Token ids to text, as they come, and stop strings in it.

Byte-level vocabularies (GPT-2's, used by every model served here) map each token to fixed bytes, so a token costs one
table look-up and an incremental UTF-8 decoder holds back incomplete characters. Other decoders (sentencepiece's, which
treat the first token apart) are run over a sliding window of ids.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any, Protocol

from typing_extensions import override

from deploy.text.stop import StopMatcher

_Utf8 = codecs.getincrementaldecoder("utf-8")
_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """The text of one sequence. Concatenated results equal the tokenizer's decode of all ids at once."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is certain now, never part of a character."""

    def flush(self) -> str:
        """The sequence has ended: what was held back, incomplete bytes as U+FFFD."""


class ByteDetokenizer(Detokenizer):
    """Detokenizer for byte-level vocabularies: `table` gives each token's bytes."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = _Utf8("replace").decode

    @override
    def push(self, token: int) -> str:
        """Add a token. An id the tokenizer does not know is no text."""
        try:
            return self._decode(self._table[token])
        except IndexError:
            return ""

    @override
    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer(Detokenizer):
    """Detokenizer for any decoder: the text of a token is what decoding a window with it adds to decoding the window
    without it."""

    __slots__ = ("_backend", "_base", "_hidden", "_ids", "_limit", "_shown")

    def __init__(self, backend: Any, hidden: frozenset[int], limit: int = 16) -> None:
        """`hidden` ids are skipped; text that ends in U+FFFD is held back for at most `limit` tokens."""
        self._backend = backend
        self._hidden = hidden
        self._limit = limit
        self._ids: list[int] = []
        self._base = 0
        """Number of tokens at the front of `_ids` that only give context: their text was returned."""
        self._shown = ""
        """Text of the context ids."""

    @override
    def push(self, token: int) -> str:
        if token in self._hidden:
            return ""
        self._ids.append(token)
        text: str = self._backend.decode(self._ids, skip_special_tokens=False)
        pending = len(self._ids) - self._base
        if text.endswith(_REPLACEMENT) and pending < self._limit:
            return ""
        return self._advance(text)

    @override
    def flush(self) -> str:
        if len(self._ids) == self._base:
            return ""
        text: str = self._backend.decode(self._ids, skip_special_tokens=False)
        return self._advance(text)

    def _advance(self, text: str) -> str:
        new = text[len(self._shown) :]
        # The last returned ids stay as context: a decoder may treat the first token of its input apart.
        self._ids = self._ids[self._base :]
        self._base = len(self._ids)
        self._shown = self._backend.decode(self._ids, skip_special_tokens=False)
        return new


class TextStream:
    """Turns the tokens of a sequence into text that may be shown: never part of a character, or of a stop string."""

    __slots__ = ("_flush", "_matcher", "push_unwatched")

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher | None = None) -> None:
        self.push_unwatched = detokenizer.push
        """Text of a token, without looking for stop strings; not to be called once `push` was."""
        self._flush = detokenizer.flush
        self._matcher = matcher

    @property
    def watched(self) -> bool:
        """Whether there are stop strings: if not, `push_unwatched` does for every token."""
        return self._matcher is not None

    @property
    def stop(self) -> str | None:
        """The stop string that was found: the sequence has ended, the rest of its tokens is to be dropped."""
        return self._matcher.matched if self._matcher is not None else None

    def push(self, token: int) -> str:
        """Text that the token makes certain. `stop` may be set after it."""
        text = self.push_unwatched(token)
        return self._matcher.feed(text) if self._matcher is not None and text else text

    def finish(self) -> str:
        """The sequence has ended: what was held back. `stop` may be set after it."""
        text = self._flush()
        if self._matcher is None:
            return text
        shown = self._matcher.feed(text) if text else ""
        return shown if self._matcher.matched is not None else shown + self._matcher.flush()
