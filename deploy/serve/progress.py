"""Progress of starting replicas, for whoever waits for them: lines and failures, in Ray's key-value store.

It needs no process of its own, and survives the replica that wrote it.

Written for Ray 2.60.0, whose key-value store is private. Without it a line is logged, and nothing is reported.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from kernels.private_api import PrivateApi

logger = logging.getLogger("latentserve.replica")

_STORE: Final = PrivateApi(
    "ray",
    tuple(f"ray.experimental.internal_kv._internal_kv_{verb}" for verb in ("del", "get", "list", "put")),
    "a start says nothing of its replicas' progress and little of why they fail, which Ray's logs of them do; "
    "/live shows the replica that answers alone",
)
_NAMESPACE = b"latentserve"
_KEPT_LINES = 200
_KEPT_REPORTS = 32


class Report(msgspec.Struct):
    """Report of one replica so far."""

    replica: str
    started: float
    """Unix time, seconds."""
    lines: list[str] = []
    cut: int = 0
    """Lines that were dropped from the front of `lines`."""
    failed: str = ""
    """First cause of its end."""
    lasting: bool = False
    """Whether another start would end the same."""
    start_s: dict[str, float] = {}
    """Seconds of the parts of its start, by their names, in order, once it serves."""
    ahead_s: dict[str, float] = {}
    """The same of its rank 0, where that started ahead of Ray: no parts of the above, as they ran beside Ray."""


class StatusStore:
    """The report of one replica, written by it."""

    def __init__(self, application: str, replica: str) -> None:
        self._key = _key(application, replica)
        for old in reports(application)[:-_KEPT_REPORTS]:
            store("del", _key(application, old.replica))
        self.report = Report(replica, time.time())
        self._changing = threading.Condition()
        self._writer: threading.Thread | None = None
        self._unwritten = False

    def say(self, line: str) -> None:
        """Add a line. It is written in a thread: where Ray's store hangs nobody waits for it."""
        with self._changing:
            self.report.lines.append(line)
            if len(self.report.lines) > _KEPT_LINES:
                del self.report.lines[0]
                self.report.cut += 1
            self._write_soon()

    def serving(self, start_s: dict[str, float], ahead_s: dict[str, float]) -> None:
        """Report that the replica serves, and the seconds of the parts of its start, and of a rank that started ahead
        of Ray."""
        with self._changing:
            self.report.start_s, self.report.ahead_s = start_s, ahead_s
        self.say("serving")

    def fail(self, cause: str, lasting: bool = False, wait_s: float = 10.0) -> None:
        """The replica is going down; it waits until that is written, but no longer than so many seconds. `lasting`:
        another start would end the same."""
        with self._changing:
            self.report.failed, self.report.lasting = cause, lasting
            self._write_soon()
            if not self._changing.wait_for(lambda: self._writer is None, wait_s):
                logger.warning("the end of this replica is not reported yet: Ray's store does not answer")

    def _write_soon(self) -> None:
        self._unwritten = True
        if self._writer is not None:
            return
        writer = threading.Thread(target=self._write_all, name="status-store", daemon=True)
        try:
            writer.start()
        except RuntimeError as error:  # as many threads as may be; the next line tries it again
            logger.warning("nothing can be reported now: %s", error)
            return
        self._writer = writer

    def _write_all(self) -> None:
        while True:
            with self._changing:
                if not self._unwritten:
                    self._writer = None
                    self._changing.notify_all()
                    return
                self._unwritten = False
                report = msgspec.msgpack.encode(self.report)
                level = logging.WARNING if self.report.failed else logging.DEBUG
            try:
                store("put", self._key, report, overwrite=True)
            except Exception:  # Ray's, of many kinds: its head may be away for a while
                logger.log(level, "a line could not be reported", exc_info=True)


def reports(application: str) -> list[Report]:
    """Every report of the application's replicas, oldest first."""
    prefix = _key(application, "")
    found = []
    for key in store("list", prefix) or ():
        if (value := store("get", key)) is not None:
            found.append(msgspec.msgpack.decode(value, type=Report))
    return sorted(found, key=lambda report: report.started)


def clear(application: str) -> None:
    """Forget the reports of an application."""
    store("del", _key(application, ""), del_by_prefix=True)


class ProgressReader:
    """Gives every line once, in order of replicas."""

    def __init__(self, application: str) -> None:
        self._application = application
        self._seen: dict[str, int] = {}
        self._failed: set[str] = set()

    def new_lines(self) -> list[str]:
        """Lines since the last call, each led by its replica's name when there are several."""
        lines = []
        found = reports(self._application)
        for report in found:
            label = f"{report.replica}: " if len(found) > 1 else ""
            skip = max(self._seen.get(report.replica, 0) - report.cut, 0)
            lines += [label + line for line in report.lines[skip:]]
            self._seen[report.replica] = report.cut + len(report.lines)
            if report.failed and report.replica not in self._failed:
                self._failed.add(report.replica)
                lines.append(f"{label}failed: {report.failed}")
        return lines

    def last_start(self) -> Report | None:
        """Return the report of the replica that was there last, with the parts of its start; None where nobody reports
        any."""
        starts = [report for report in reports(self._application) if report.start_s]
        return max(starts, key=lambda start: start.started + sum(start.start_s.values()), default=None)

    def failures(self) -> list[str]:
        """Causes of every replica that failed so far, oldest first."""
        return [report.failed for report in reports(self._application) if report.failed]

    def lasting_failure(self) -> str:
        """Cause of the first failure that another start would only repeat; empty while there is none."""
        return next((report.failed for report in reports(self._application) if report.lasting), "")


def _key(application: str, replica: str) -> bytes:
    return f"progress/{application}/{replica}".encode()


def others(prefix: bytes, own: str) -> Iterator[tuple[bytes, str, bytes]]:
    """Yield the entries that other replicas than `own` have put into Ray's store, each below `prefix` under its name:
    (key, name, value)."""
    for key in store("list", prefix) or ():
        name = bytes(key).removeprefix(prefix).decode()
        value = None if name == own else store("get", key)
        if value is not None:
            yield key, name, value


def store(verb: str, *arguments: Any, **options: Any) -> Any:
    """Put, get, list or del in Ray's store, in a namespace of our own; None where this Ray has none. It may wait for
    Ray, and raises what Ray raises."""
    if not _STORE.there():
        return None
    from ray.experimental import internal_kv

    return getattr(internal_kv, f"_internal_kv_{verb}")(*arguments, namespace=_NAMESPACE, **options)
