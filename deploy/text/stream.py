"""The text of one generated sequence: detokenisation, then stop strings, token by token."""

from __future__ import annotations

from deploy.text.detok import Detokenizer
from deploy.text.stop import StopMatcher


class TextStream:
    """Turns tokens into text that may be shown. Never part of a character, never part of a stop string."""

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
