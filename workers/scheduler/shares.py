"""Fair shares: what each API key has had, so that the one which had least for its weight is served next.

This is weighted fair queueing by tokens that are known only once they are generated: the virtual token counter of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A key pays for the prompt tokens that are
computed for it and for the tokens that are generated, each divided by its weight. Among those that wait, the key that
has paid least goes next. Who did not wait saves nothing up: it begins with what those who wait have paid.

Keys also pay for what other replicas give them, of which a replica hears about once a second (`Charges`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from workers.protocol.messages import Charge, Charges

AHEAD_S = 30.0
"""Seconds that bound how far other replicas' work for a key puts it behind: at most by what all keys pay here in that
time. A key never has to wait longer for others to catch up, whatever it was given elsewhere."""


@dataclass(slots=True, eq=False)
class Share:
    """Share of one key: the tokens that its requests have had."""

    name: str
    weight: float
    """Weight of the key. Keys that always wait are given tokens in proportion to it."""
    paid: float = 0.0
    """Tokens by weight; of use only in comparison with that of others."""
    charged: int = 0
    """Tokens that this replica computed for it."""
    told: int = 0
    """Tokens, among those charged, that other replicas were told of."""

    def charge(self, tokens: int) -> None:
        """Charge the key for tokens that were computed for it."""
        self.charged += tokens
        self.paid += tokens / self.weight


class Shares:
    """Shares of all keys that a request has named so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._known: dict[str, Share] = {}
        self._clock = clock
        self._looks: deque[tuple[float, float]] = deque([(clock(), 0.0)])  # when, and what all had paid here by then

    def of(self, name: str, weight: float) -> Share | None:
        """Return the share of a key, with the weight it has now; None for requests without a key, which are served in
        order of arrival."""
        if not name:
            return None
        share = self._known.get(name)
        if share is None:
            share = self._known[name] = Share(name, weight)
        share.weight = weight
        return share

    def news(self) -> Charges | None:
        """Return the charges since the last call; None if there were none."""
        found = []
        for share in self._known.values():
            if share.charged > share.told:
                found.append(Charge(share.name, share.weight, share.charged - share.told))
                share.told = share.charged
        return Charges(tuple(found)) if found else None

    def ahead(self) -> float:
        """Return what all keys pay here in `AHEAD_S`, by what they paid lately."""
        now, paid = self._clock(), sum(share.charged / share.weight for share in self._known.values())
        looks = self._looks
        while len(looks) > 1 and looks[1][0] <= now - AHEAD_S:
            looks.popleft()
        begun, before = looks[0]
        looks.append((now, paid))
        seconds = now - begun
        # Weights may change from one request to the next, and with them what was paid.
        return max(paid - before, 0.0) * (min(AHEAD_S / seconds, 1.0) if seconds else 1.0)
