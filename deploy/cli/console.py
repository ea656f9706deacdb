"""Input and output of all commands: results on stdout, all else on stderr, one line for a user's mistake."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

import typer

from deploy.mistakes import CommandFailure, UsageMistake

if TYPE_CHECKING:
    from types import FrameType

FAILURE = 1
USAGE = 2
INTERRUPTED = 130


@contextmanager
def reported() -> Iterator[None]:
    """Turn mistakes and failures into one line on stderr and an exit code; all else is a defect and is raised.

    SIGTERM ends a command in order, as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _signals_noted():
            yield
    except UsageMistake as mistake:
        _say(str(mistake))
        raise typer.Exit(USAGE) from None
    except CommandFailure as failure:
        _say(str(failure))
        raise typer.Exit(FAILURE) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        # Whoever read the results has left (`... | head`): nothing to say, and nothing more to write at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(FAILURE) from None
    finally:
        signal.signal(signal.SIGTERM, before)


_noted: int | None = None
"""File descriptor from which the numbers of arrived signals can be read, within `reported`."""


@contextmanager
def _signals_noted() -> Iterator[None]:
    """Python acts on a signal between two of its own instructions. One that comes right before a call that blocks waits
    for that call to end, and what an import calls may drop the KeyboardInterrupt. So a pipe notes signals as well."""
    global _noted
    reading, writing = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    former, noted = signal.set_wakeup_fd(writing, warn_on_full_buffer=False), _noted
    _noted = reading
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        _noted = noted
        os.close(reading)
        os.close(writing)


def check_interrupt() -> None:
    """Raise the KeyboardInterrupt of a signal that came within `reported` and ended nothing. To be called before what
    takes long."""
    if _noted is not None and select.select([_noted], [], [], 0.0)[0] and signal.SIGINT in os.read(_noted, 4096):
        raise KeyboardInterrupt


def read_stdin() -> str:
    """All of stdin as text, ValueError where it is none. Within `reported`: there a signal always ends the wait."""
    assert _noted is not None
    try:
        stdin = sys.stdin.fileno()
    except io.UnsupportedOperation:
        return sys.stdin.read()
    pieces = [b""]
    while True:
        ready, _, _ = select.select([stdin, _noted], [], [])
        check_interrupt()
        if stdin in ready:
            pieces.append(os.read(stdin, 2**20))
            if not pieces[-1]:
                break
    return io.TextIOWrapper(io.BytesIO(b"".join(pieces)), sys.stdin.encoding, sys.stdin.errors).read()


def _interrupt(number: int, frame: FrameType | None) -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def _say(message: str) -> None:
    typer.secho("error: ", fg=typer.colors.RED, err=True, nl=False)
    typer.echo(message, err=True)


@contextmanager
def result_stream() -> Iterator[TextIO]:
    """The real stdout. Within the block, whatever else this process or its children print on stdout goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr), os.fdopen(os.dup(kept), "w", encoding="utf-8") as stream:
            yield stream
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def int_list(text: str, flag: str, least: int = 0) -> tuple[int, ...]:
    """`3,14,15` as integers of at least `least`; UsageMistake naming `flag` otherwise."""
    try:
        values = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise UsageMistake(f"{flag} takes integers separated by commas, such as 3,14,15; not {text!r}") from None
    if not values:
        raise UsageMistake(f"{flag} needs at least one integer")
    if min(values) < least:
        raise UsageMistake(f"{flag}: {min(values)} is less than {least}")
    return values
