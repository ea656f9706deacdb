"""What a starting replica says reaches the store, and keeps nobody waiting for it."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from test_live_status_store import Store

from deploy.serve import progress
from deploy.serve.progress import ProgressReader, StatusStore, reports


def lines_at_the_end(count: int) -> list[str]:
    """The lines of the only report, once there are so many."""
    deadline = time.monotonic() + 60
    while len(lines := reports("app")[0].lines if reports("app") else []) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return lines


def test_a_store_that_hangs_keeps_nobody_from_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event loop says lines, and its streams wait for it."""
    kept, may_write = Store(), threading.Event()

    def store(verb: str, *what: Any, **options: Any) -> Any:
        if verb == "put":
            assert threading.current_thread() is not threading.main_thread()
            may_write.wait()
        return kept(verb, *what, **options)

    monkeypatch.setattr(progress, "store", store)
    made = StatusStore("app", "a")
    for number in range(9):
        made.say(f"line {number}")
    assert reports("app") == []
    may_write.set()
    assert lines_at_the_end(9) == [f"line {number}" for number in range(9)]


def test_the_start_that_counts_is_that_of_the_replica_that_was_there_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "store", Store())
    reader = ProgressReader("app")
    assert reader.last_start() is None
    for name, began, start_s in (("a", 10.0, {"weights": 9.0}), ("b", 12.0, {"weights": 3.0, "first step": 1.0})):
        made = StatusStore("app", name)
        made.report.started = began
        made.serving(start_s, {"libraries": 1.0})
    StatusStore("app", "c").say("starting")
    deadline = time.monotonic() + 60
    while sum(bool(report.start_s) for report in reports("app")) < 2 or len(reports("app")) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    last = reader.last_start()
    assert last is not None
    assert (last.started, last.start_s, last.ahead_s) == (10.0, {"weights": 9.0}, {"libraries": 1.0})
    assert [report.lines for report in reports("app")] == [["serving"], ["serving"], ["starting"]]


def test_a_store_that_fails_gets_what_it_missed_with_the_next_line(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Store()
    monkeypatch.setattr(progress, "store", kept)
    made = StatusStore("app", "a")
    kept.broken = True
    made.say("line 0")
    while made._writer is not None:
        time.sleep(0.005)
    kept.broken = False
    made.say("line 1")
    assert lines_at_the_end(2) == ["line 0", "line 1"]


def test_the_end_is_written_when_it_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever said it may end the process, and lines that were said before do not come behind it."""
    monkeypatch.setattr(progress, "store", Store())
    for _ in range(50):
        made = StatusStore("app", "a")
        made.say("line")
        made.fail("the cause", lasting=True, wait_s=60.0)
        [report] = reports("app")
        assert (report.failed, report.lasting, report.lines) == ("the cause", True, ["line"])
        while made._writer is not None:
            time.sleep(0.001)
        assert reports("app")[0].failed == "the cause"


def test_an_end_is_not_waited_for_without_bound_where_the_store_hangs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams wait for the event loop, which says it. What is said is written once the store answers."""
    kept, writing, may_write = Store(), threading.Event(), threading.Event()

    def store(verb: str, *what: Any, **options: Any) -> Any:
        if verb == "put":
            writing.set()
            may_write.wait()
        return kept(verb, *what, **options)

    monkeypatch.setattr(progress, "store", store)
    made = StatusStore("app", "a")
    made.say("line")
    assert writing.wait(60)
    failing = threading.Thread(target=made.fail, args=("the cause", True, 0.1), daemon=True)
    failing.start()
    failing.join(60)
    waits = failing.is_alive()
    may_write.set()
    assert not waits
    assert "not reported yet" in caplog.text
    while made._writer is not None:
        time.sleep(0.005)
    [report] = reports("app")
    assert (report.failed, report.lasting, report.lines) == ("the cause", True, ["line"])


def test_an_end_that_the_store_refuses_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = Store()
    monkeypatch.setattr(progress, "store", kept)
    made = StatusStore("app", "a")
    kept.broken = True
    made.fail("the cause", wait_s=60.0)
    assert "could not be reported" in caplog.text
    assert "the head is away" in caplog.text


def test_a_line_for_which_no_thread_can_start_is_written_with_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(progress, "store", Store())
    made = StatusStore("app", "a")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", full)
        made.say("line 0")
        made.fail("the cause")
    assert "can't start new thread" in caplog.text
    made.say("line 1")
    assert lines_at_the_end(2) == ["line 0", "line 1"]
    assert reports("app")[0].failed == "the cause"
