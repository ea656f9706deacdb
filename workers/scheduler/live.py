"""The requests that have not ended, and how they do."""

from __future__ import annotations

from workers.scheduler.grammars import Grammars
from workers.scheduler.rows import Rows
from workers.scheduler.sequence import Phase, Sequence


class Live(dict[str, Sequence]):
    """Every request from its arrival to its end, by its id. Whoever ends one calls `end` or `end_nonfinite`, which take
    it from here, from its grammar, and from where it waits or runs."""

    def __init__(self, rows: Rows, grammars: Grammars) -> None:
        super().__init__()
        self._rows, self._grammars = rows, grammars

    def end(self, sequence: Sequence) -> None:
        """A request is over, whatever its state: finished, cancelled or refused."""
        self._forget(sequence)
        if sequence.phase is Phase.COMPILING:
            sequence.phase = Phase.ENDED
        else:
            self._rows.end(sequence)

    def end_nonfinite(self, sequence: Sequence) -> None:
        """A row was bad, and its request is over."""
        self._forget(sequence)
        self._rows.end_nonfinite(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self[sequence.request.request_id]
        if sequence.grammar:
            self._grammars.leave(sequence)
