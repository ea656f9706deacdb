"""Log-probabilities of a prompt's tokens as they travel: packed, because a prompt may have a hundred thousand
tokens."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

import msgspec


class Scores(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural, of the unscaled model distribution) of tokens of a prompt that follow each other.

    All numbers are little-endian and have 32 bits.
    """

    top: int = 0
    """Number of the most probable ids at each position."""
    chosen: bytes = b""
    """Floats: of the prompt's own token at each place."""
    ranks: bytes = b""
    """Unsigned: 1 + how many ids are more probable than that token."""
    ids: bytes = b""
    """Unsigned: the most probable ids of each place, `top` of them, then those of the next one."""
    logprobs: bytes = b""
    """Floats: theirs."""

    @property
    def count(self) -> int:
        """Places."""
        return len(self.chosen) // 4

    @staticmethod
    def joined(parts: Sequence[Scores]) -> Scores:
        """Join the scores of the parts of a prompt, in order."""
        if len(parts) == 1:
            return parts[0]
        return Scores(
            max((part.top for part in parts), default=0),
            b"".join(part.chosen for part in parts),
            b"".join(part.ranks for part in parts),
            b"".join(part.ids for part in parts),
            b"".join(part.logprobs for part in parts),
        )

    def entries(self) -> Iterator[tuple[float, int, tuple[int, ...], tuple[float, ...]]]:
        """Yield for each position the log-probability and the rank of the prompt's token, the most probable ids, and
        their log-probabilities."""
        ids, values, top = iter(_whole(self.ids)), iter(_real(self.logprobs)), self.top
        for chosen, rank in zip(_real(self.chosen), _whole(self.ranks), strict=True):
            yield chosen, rank, tuple(islice(ids, top)), tuple(islice(values, top))


def _whole(packed: bytes) -> array[int]:
    values = array("I", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def _real(packed: bytes) -> array[float]:
    values = array("f", packed)
    if sys.byteorder == "big":
        values.byteswap()
    return values
