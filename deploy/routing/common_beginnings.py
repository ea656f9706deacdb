"""Which cached pages are the end of what several prompts begin with, such as a system prompt."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

COMMON_AFTER: Final = 2
"""A page is the end of a common beginning once so many prompts before went on from it, each in another way."""
MOST_PAGES: Final = 4096
"""Pages of which it is remembered how prompts went on: those met last."""


class CommonBeginnings:
    """Pages that were the last one of a prompt that any replica had, and how those prompts went on.

    A session that begins goes on from its system prompt, as others did in other ways. A session that returns goes on
    from what its turn before has added, as no other prompt does, and a prompt that is sent again in the same way. Turns
    so short that they fill no page go on from the same page, but each begins with the one before it: that is one way.
    """

    def __init__(self) -> None:
        self._went_on: OrderedDict[bytes, set[bytes]] = OrderedDict()  # by key of the page

    def is_common(self, key: bytes, then: bytes) -> bool:
        """Whether the page of this key is the end of a common beginning, for a prompt of which nothing more is cached
        and that goes on with `then`: packed tokens, of a page at the most. Remembers it for those that come next."""
        known = self._went_on.setdefault(key, set())
        self._went_on.move_to_end(key)
        if len(self._went_on) > MOST_PAGES:
            self._went_on.popitem(last=False)
        others = sum(not (way.startswith(then) or then.startswith(way)) for way in known)
        if then and others == len(known) <= COMMON_AFTER:  # one that ends with the page goes on in no way
            known.add(then)
        return others >= COMMON_AFTER
