"""Common behavior of commands: signals that end them, stdin."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest
import typer

from deploy.cli.console import INTERRUPTED, check_interrupt, read_stdin, reported


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> Iterator[TextIO]:
    """The other end of this process's stdin."""
    ours, theirs = os.pipe()
    with os.fdopen(ours, encoding="utf-8") as stdin, os.fdopen(theirs, "w", encoding="latin-1", newline="") as stream:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield stream


@contextmanager
def interrupts_dropped() -> Iterator[None]:
    """Drop interrupts, as an import does that swallows the exception."""
    before = signal.signal(signal.SIGINT, lambda number, frame: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_whose_interrupt_was_dropped_ends_the_command_at_the_next_occasion(number: int) -> None:
    @reported()
    def command() -> None:
        check_interrupt()
        signal.raise_signal(number)
        check_interrupt()

    with interrupts_dropped(), pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == INTERRUPTED
    assert signal.set_wakeup_fd(-1) == -1


def test_a_signal_whose_interrupt_was_dropped_ends_the_wait_for_stdin(writer: TextIO) -> None:
    @reported()
    def command() -> None:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        read_stdin()

    with interrupts_dropped(), pytest.raises(typer.Exit) as ended:
        command()
    assert ended.value.exit_code == INTERRUPTED


def test_all_of_stdin_is_read_as_text(writer: TextIO) -> None:
    def write() -> None:
        for piece in ("def f():\r\n", "", "    pass\n"):
            writer.write(piece)
            writer.flush()
            time.sleep(0.05)
        writer.close()

    threading.Thread(target=write).start()
    with reported():
        assert read_stdin() == "def f():\n    pass\n"


def test_stdin_that_is_no_text(writer: TextIO) -> None:
    writer.write("\xff")
    writer.close()
    with reported(), pytest.raises(ValueError, match="utf-8"):
        read_stdin()
