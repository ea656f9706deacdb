"""A bound on the memory that requests of all clients together take while they come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Budget:
    """Bytes that may be held at one time. Several requests of one API key may together hold as many as they leave free,
    so that some are left for other keys, however much one sends."""

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0
        self.by_key: Counter[str] = Counter()

    @contextmanager
    def account(self, key: str = "") -> Iterator[Account]:
        """What one request holds, of the API key of this name; given back at the end of the block."""
        account = Account(self, key)
        try:
            yield account
        finally:
            self.held -= account.held
            self.by_key[key] -= account.held
            if not self.by_key[key]:
                del self.by_key[key]


class Account:
    """One request's part of a budget."""

    def __init__(self, budget: Budget, key: str) -> None:
        self._budget, self._key, self.held = budget, key, 0

    def grow(self, held: int) -> bool:
        """Hold `held` bytes from now on; False, and nothing changes, where that is more than is left."""
        budget, key, more = self._budget, self._key, held - self.held
        left = budget.total - budget.held - more
        of_key = budget.by_key[key]
        if left < 0 or (key and of_key > self.held and of_key + more > left):
            return False
        budget.held += more
        budget.by_key[key] += more
        self.held = held
        return True
