"""The scheduler of one replica: which rows run in the next step, on which pages. Pure Python.

`Scheduler` composes a waiting queue that serves API keys fairly (`queue`), a pool of reference-counted pages (`pages`),
the prefix cache over it (`prefix`), the state of every request (`sequence`), the choice of the width by draft
acceptance (`speculation`), and what comes of results: gains, the watch over non-finite rows, and counters
(`results`).
"""

from workers.protocol.request import page_keys
from workers.scheduler.config import SchedulerConfig, max_entries_per_row, max_pages_per_row
from workers.scheduler.results import Unsound
from workers.scheduler.scheduler import Scheduler

__all__ = ["Scheduler", "SchedulerConfig", "Unsound", "max_entries_per_row", "max_pages_per_row", "page_keys"]
