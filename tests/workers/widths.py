"""Schedulers whose steps change their width whatever pays."""

from __future__ import annotations

from collections.abc import Callable

from workers.scheduler import Scheduler


def restless(scheduler: Scheduler, next_width: Callable[[], int]) -> None:
    """Let `next_width` say, before every plan, what is taken for the width that pays: 1 ... the most."""
    speculation = scheduler._speculation

    def settle(rows: int) -> None:
        speculation._best, speculation._exploring = next_width(), 0

    speculation._unknown = 0
    speculation._settle = settle  # type: ignore[method-assign]
