"""What every command shares at its edges: results on stdout, all else on stderr, one line for a user's mistake."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, TextIO

import typer

if TYPE_CHECKING:
    from types import FrameType

    from pydantic import ValidationError

FAILURE = 1
USAGE = 2
INTERRUPTED = 130


class UsageMistake(Exception):
    """The command was called wrongly; the text says what to do instead. Exit code 2."""


class CommandFailure(Exception):
    """The command was right but could not be carried out; the text is the cause. Exit code 1."""


@contextmanager
def reported() -> Iterator[None]:
    """Turn mistakes and failures into one line on stderr and an exit code; all else is a defect and is raised.

    SIGTERM ends a command in order, as Ctrl-C does.
    """
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
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


_PLAINER = {"tuple_type": "Input should be a list", "model_type": "Input should hold settings by name"}
"""What pydantic says in Python's terms, in those of a settings file."""


def explain(error: ValidationError, label: Callable[[str], str]) -> str:
    """A pydantic error for people, a line a field; `label` gives what the user calls a field (its dotted name)."""
    lines = []
    for item in error.errors(include_url=False):
        message = _PLAINER.get(item["type"]) or item["msg"].removeprefix("Value error, ")
        name = ".".join(str(part) for part in item["loc"])
        # A mistake between fields is reported on what holds them, and its text names them.
        lines.append(message if not name or item["type"] == "value_error" else f"{label(name)}: {message}")
    return "\n".join(lines)


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
