"""A bound on the memory that requests of all clients together take while they come in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Bytes that may be held at one time."""

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0

    @contextmanager
    def account(self) -> Iterator[Account]:
        """What one request holds; given back at the end of the block."""
        account = Account(self)
        try:
            yield account
        finally:
            self.held -= account.held


class Account:
    """One request's part of a budget."""

    def __init__(self, budget: Budget) -> None:
        self._budget, self.held = budget, 0

    def grow(self, held: int) -> bool:
        """Hold `held` bytes from now on; False, and nothing changes, where that is more than is left."""
        more = held - self.held
        if self._budget.held + more > self._budget.total:
            return False
        self._budget.held += more
        self.held = held
        return True
