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


def _limit_s(item: pytest.Item) -> float:
    """The limit as pytest-timeout reads it: of the test, else of the command, the environment or the settings; 0: there
    is none."""
    if (marker := item.get_closest_marker("timeout")) is not None:
        own = marker.args[0] if marker.args else marker.kwargs.get("timeout")
        if own is not None:
            return float(own)
    asked = item.config.getoption("timeout", None)
    if asked is None:
        asked = os.environ.get("PYTEST_TIMEOUT") or item.config.getini("timeout")
    return float(asked or 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Say where all threads are, and end the process. pytest-xdist names the test, and goes on with another process."""
    limit_s = _limit_s(item)
    if limit_s and not item.config.getoption("usepdb"):
        faulthandler.dump_traceback_later(limit_s + GRACE_S, exit=True, file=item.config.stash[_STDERR])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()
