"""Fronts that come while answers of one that died wait for them.

Part of the process of `deploy.serve.watchdog_process`: it imports the standard library and other parts of it alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import time
from typing import TYPE_CHECKING

from deploy.serve.held_connection import Held

if TYPE_CHECKING:
    from collections.abc import Iterable

HEIR = "heir"
"""Name of the socket at which a front takes answers over. All fronts of an application on a node have it in folders of
their own below one that they share."""


class Newcomers:
    """Fronts of the node that nobody told of, and those that come while answers wait for one."""

    def __init__(
        self,
        shared: str,
        patience_s: float,
        starter: int | None,
        elsewhere: bool = False,
        most_bytes: float = math.inf,
    ) -> None:
        """`shared`: the folder in which they have their folders; empty: nobody comes. `patience_s`: how long it is
        waited for one. `starter`: descriptor of the process that starts fronts here (pidfd); once that has ended no
        other front comes, and likewise where it is None. `elsewhere`: what has not begun waits for none, because a
        replica of another node can answer it, if its request has no more than `most_bytes`: proxies keep no longer one
        to send it again."""
        self._shared, self._starter = shared, starter
        self._elsewhere, self._most_bytes = elsewhere, most_bytes
        self._until = time.monotonic() + patience_s if shared and starter is not None else 0.0
        self._known: set[str] = set()

    @property
    def may_come(self) -> bool:
        """Whether it is worth waiting for one."""
        if self._starter is None or time.monotonic() >= self._until:
            return False
        ended = select.poll()
        ended.register(self._starter, select.POLLIN)
        return not ended.poll(0)

    def needed_by(self, held: Held) -> bool:
        """Whether an answer has nobody but a front that comes here."""
        return not self._elsewhere or held.begun or held.noted > self._most_bytes

    def new(self, known: Iterable[str]) -> list[str]:
        """Return the sockets that were not there at the last call, nor are `known` otherwise."""
        found: list[str] = []
        if self._until:
            with contextlib.suppress(OSError):
                found = sorted(f"{self._shared}/{name}/{HEIR}" for name in os.listdir(self._shared))
        self._known.update(known)
        found = [path for path in found if path not in self._known and os.path.exists(path)]
        self._known.update(found)
        return found
