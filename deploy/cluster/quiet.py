"""Keeps off the terminal what Ray and Serve tell a driver and the application says in its own words, or need not say.

All of it stays in Ray's logs. What is not known to be harmless, such as a lack of resources, is shown as before.

Written for Ray 2.60.0: what shows a driver such lines is a private part of it. Without it a line is logged, and all of
them are shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from kernels.private_api import PrivateApi

_SHOWN: Final = PrivateApi(
    "ray",
    ("ray._private.worker.print_to_stdstream(data, ignore_prefix)",),
    "the terminal shows all that Ray tells of processes that end, the harmless included",
)
_HARMLESS = (
    # Of every process of a replica that failed or was ended; the status store names the cause.
    "A worker died or was killed while executing a task",
    # The controller ends itself when Serve is shut down, or is ended where that takes it too long.
    "Task ServeController.graceful_shutdown failed",
    "Task ServeController.listen_for_change failed",
)


@contextmanager
def quiet_driver() -> Iterator[None]:
    """Enter once Ray is connected and its environment is set: it imports Ray Serve."""
    import ray.serve  # sets its logger up

    assert ray.serve
    log = logging.getLogger("ray.serve")
    level = log.level
    log.setLevel(max(level, logging.WARNING))
    try:
        with _harmless_lines_dropped():
            yield
    finally:
        log.setLevel(level)


@contextmanager
def _harmless_lines_dropped() -> Iterator[None]:
    if not _SHOWN.there():
        yield
        return
    import ray._private.worker as driver

    show = driver.print_to_stdstream

    def shown(data: dict[str, Any], ignore_prefix: bool) -> None:
        if not any(line.startswith(_HARMLESS) for line in data["lines"]):
            show(data, ignore_prefix)

    driver.print_to_stdstream = shown
    try:
        yield
    finally:
        driver.print_to_stdstream = show
