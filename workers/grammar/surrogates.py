"""Keeps surrogates (U+D800 ... U+DFFF) out of what is written: no text has them, yet xgrammar takes their bytes, 0xED
and then one of 0xA0 ... 0xBF, for a character. Behind 0xED 0x80 ... 0x9F are Korean syllables, which texts do have.

Shape legend: B integers of a mask: id v is bit v % 32 of integer v // 32.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

_LEAD: Final = b"\xed"
_SECOND: Final = range(0xA0, 0xC0)
_WHOLE: Final = re.compile(rb"\xed[\xa0-\xbf]")


def without_surrogates(table: Sequence[bytes]) -> list[bytes]:
    """Return the bytes of the tokens of a vocabulary, empty for those that hold a surrogate."""
    return [b"" if _WHOLE.search(raw) else raw for raw in table]


class SplitSurrogates:
    """The tokens that two tokens in a row could write one with: one that ends behind the first byte, one that begins
    with the second."""

    def __init__(self, table: Sequence[bytes], vocab: int) -> None:
        """`table`: what each id writes."""
        self._begin = frozenset(index for index, raw in enumerate(table) if raw.endswith(_LEAD))
        self._end = frozenset(index for index, raw in enumerate(table) if raw and raw[0] in _SECOND)
        allowed_V = np.ones(-(-vocab // 32) * 32, dtype=np.uint8)
        allowed_V[list(self._end)] = 0
        self._others_B = np.packbits(allowed_V, bitorder="little").view(np.int32)

    def begins(self, token: int) -> bool:
        """Whether a surrogate could end with the next token."""
        return token in self._begin

    def ends(self, token: int) -> bool:
        """Whether this token could end one."""
        return token in self._end

    def forbid(self, bits_B: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Take those that end one out of a mask."""
        np.bitwise_and(bits_B, self._others_B, out=bits_B)
