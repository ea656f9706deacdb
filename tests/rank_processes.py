"""Processes of several ranks on one machine."""

from collections.abc import Callable
from typing import Any

from torch import multiprocessing


def run_ranks(main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call `main(rank, *arguments)` in a process a rank; raises what the first of them raises.

    They are forked from a process that has imported what they need: seconds a process are most of what it costs.
    """
    multiprocessing.get_context("forkserver").set_forkserver_preload(["workers.models"])
    multiprocessing.start_processes(main, arguments, ranks, start_method="forkserver")
