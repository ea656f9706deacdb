"""Seconds of a start by its parts, for who wants it to be shorter."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

from typing_extensions import override

T = TypeVar("T")


class StartTimes:
    """Times of the parts of a start: those that follow each other, and those that run beside them."""

    def __init__(self, before_s: float = 0.0) -> None:
        """The first part begins, or began so many seconds before."""
        self._last = time.perf_counter() - before_s
        self._parts: dict[str, float] = {}
        self._beside: dict[str, float] = {}

    def end(self, part: str) -> None:
        """This part ends, and the next one begins."""
        now = time.perf_counter()
        self._parts[part] = self._parts.get(part, 0.0) + now - self._last
        self._last = now

    def beside(self, part: str, call: Callable[[], T]) -> Future[T]:
        """Run a part in a thread beside all others. The future has its result, or its error."""
        done: Future[T] = Future()

        def run() -> None:
            begin = time.perf_counter()
            try:
                result = call()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)
            finally:
                self._beside[part] = time.perf_counter() - begin

        Thread(target=run, name=part, daemon=True).start()
        return done

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of the parts that follow each other, by their names, in the order in which they began."""
        return dict(self._parts)

    @override
    def __str__(self) -> str:
        def told(parts: dict[str, float]) -> str:
            return ", ".join(f"{part} {seconds:.1f} s" for part, seconds in parts.items())

        beside = f"; beside them {told(self._beside)}" if self._beside else ""
        return f"{sum(self._parts.values()):.1f} s: {told(self._parts)}{beside}"
