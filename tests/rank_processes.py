"""Processes of several ranks on one machine.

Where there is no GPU they are forked from a process that has imported what they need, and what the modules of tests do,
in which their functions are: those seconds are most of what a process costs.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, SpawnContext
from typing import Any

import torch


def start_method() -> SpawnContext | ForkServerContext:
    """Return how rank processes start."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["workers.rank.worker_process", "pytest", "transformers.models.auto.modeling_auto"])
    return context


def run_ranks(main: Callable[..., None], ranks: int, *arguments: Any) -> None:
    """Call `main(rank, *arguments)` in a process per rank; raises what the first of them raises."""
    method = start_method().get_start_method()
    torch.multiprocessing.start_processes(main, arguments, ranks, start_method=method)
