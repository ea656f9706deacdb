"""Ends the process of a test that outlives its time limit.

pytest-timeout raises an exception then, wherever the main thread is. Within a task of an event loop that nobody awaits,
or within a callback, that is where it stays: the loop goes on, and the test with it.
"""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

GRACE_S = 60.0
"""Seconds behind the limit."""
_STDERR = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the process's own stderr, which is not captured yet."""
    config.stash[_STDERR] = os.dup(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say where all threads are, and end the process. pytest-xdist names the test, and goes on with another process."""
    marker = item.get_closest_marker("timeout")
    limit_s = float(marker.args[0] if marker is not None and marker.args else item.config.getini("timeout") or 0)
    if limit_s:
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
