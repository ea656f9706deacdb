"""How much each API key has had, so that the one which had least for its weight is served next.

This is weighted fair queueing by tokens that are known only once they are generated: the virtual token counter of
"Fairness in Serving Large Language Models" (Sheng et al., OSDI 2024). A key pays for the prompt tokens that are
computed for it and for the tokens that are generated, each divided by its weight. Among those that wait, the key that
has paid least goes next. Who did not wait saves nothing up: it begins with what those who wait have paid.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Share:
    """What the requests of one key have had."""

    name: str
    weight: float
    """Of two keys that always wait, each is given tokens in proportion to it."""
    paid: float = 0.0
    """Tokens by weight; of use only in comparison with that of others."""

    def charge(self, tokens: int) -> None:
        """So many tokens were computed for it."""
        self.paid += tokens / self.weight


class Shares:
    """All keys that a request has named so far."""

    def __init__(self) -> None:
        self._known: dict[str, Share] = {}

    def of(self, name: str, weight: float) -> Share | None:
        """That of a key, with the weight it has now; None for requests without one, which come by arrival alone."""
        if not name:
            return None
        share = self._known.get(name)
        if share is None:
            share = self._known[name] = Share(name, weight)
        share.weight = weight
        return share
