"""Where the rest of an answer begins: what of it a client has had, and what another front made that it lacks.

The front that goes on makes everything once more from the outputs that the first one had. What it makes is compared
with the lengths and checksums of what was written: equal pieces take their place, wherever choices of one answer stand
in turns, and of those only bytes go out that the kernel was never given. What is not among them is new.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from deploy.serve.journal import checksum


class Splice:
    """The seam of one answer."""

    def __init__(
        self, head: bytes, written: Sequence[tuple[int, int]], given: int, known: Iterable[bytes] = ()
    ) -> None:
        """`head` as it was written, and length and checksum of each piece behind it; empty where nothing was written.
        `given`: the bytes of all this that the kernel was given. `known`: pieces that follow from no output, and may
        be among those that were written any number of times."""
        self._pieces: list[bytes | None] = [head, *([None] * len(written))]
        self._places: defaultdict[tuple[int, int], deque[int]] = defaultdict(deque)
        for place, key in enumerate(written, 1):
            self._places[key].append(place)
        self._given = given
        self._new: list[bytes] = []
        """Pieces that were made before all that was written had been made once more."""
        self.missing = len(written)
        """Pieces that were written and not made once more so far."""
        for piece in known:
            for place in self._places.pop((len(piece), checksum(piece)), ()):
                self._put(place, piece)
        total = len(head) + sum(length for length, _ in written)
        if not 0 <= given <= total:
            raise ValueError(f"the client was sent {given} bytes, and {total} were taken down")
        ends = [len(head)]
        for length, _ in written:
            ends.append(ends[-1] + length)
        self.at_seam = given in ends
        """Whether the client has had whole pieces only."""

    def _put(self, place: int, piece: bytes) -> None:
        self._pieces[place] = piece
        self.missing -= 1

    def begin(self) -> bytes:
        """What goes out before anything is made; nothing unless no piece is missing."""
        return b"" if self.missing else self._rest()

    def take(self, piece: bytes) -> tuple[bytes, list[bytes]]:
        """Take the next piece that was made. Return what was taken down and has to go out now, and what is new."""
        if self.missing:
            places = self._places.get((len(piece), checksum(piece)))
            if not places:
                self._new.append(piece)
                return b"", []
            self._put(places.popleft(), piece)
            if self.missing:
                return b"", []
            new, self._new = self._new, []
            return self._rest(), new
        return b"", [piece]

    def _rest(self) -> bytes:
        begin, parts = 0, []
        for piece in self._pieces:
            assert piece is not None
            if (skipped := max(self._given - begin, 0)) < len(piece):
                parts.append(piece[skipped:])
            begin += len(piece)
        self._pieces = []
        return b"".join(parts)
