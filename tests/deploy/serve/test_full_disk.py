"""A disk that is full, as /dev/full is, takes neither logs nor notes, and nothing else suffers from that."""

import errno
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from deploy.cluster import haproxy
from deploy.config.application import LogConfig
from deploy.observability import logs
from deploy.serve.app import tell

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")


@pytest.fixture
def full() -> Iterator[TextIO]:
    stream = FULL.open("w", buffering=1)
    yield stream
    with suppress(OSError):  # what it has not taken
        stream.close()


@pytest.fixture
def restored() -> Iterator[None]:
    handlers = {name: logging.getLogger(name).handlers[:] for name in logs.LOGGERS}
    propagated = {name: logging.getLogger(name).propagate for name in logs.LOGGERS}
    yield
    for name in logs.LOGGERS:
        logging.getLogger(name).handlers[:] = handlers[name]
        logging.getLogger(name).propagate = propagated[name]


def test_lines_are_lost_and_nothing_else(restored: None, full: TextIO) -> None:
    logs.configure(LogConfig(), full, process="front")
    for number in range(3):
        logging.getLogger("latentserve.test").error("no room %d", number, extra={logs.FIELDS: {"cause": "x" * 10_000}})
    with pytest.raises(OSError, match="No space left"):
        full.write("and there really was none\n")


def test_the_command_goes_on_without_its_lines(full: TextIO, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", full)
    for _ in range(3):
        tell("serving")


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO])
def test_other_errors_of_the_terminal_are_none_of_a_disk(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone:
        def write(self, text: str) -> int:
            raise OSError(number, "gone")

        def flush(self) -> None: ...

    monkeypatch.setattr("sys.stdout", Gone())
    with pytest.raises(OSError, match="gone"):
        tell("serving")


def test_a_replica_that_fails_goes_on_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))

    def full(self: Path, text: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    haproxy.note_fault("why")
    assert not list(tmp_path.iterdir())
