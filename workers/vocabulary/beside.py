"""Reads what tokens write in a process of its own: transformers takes a second to import, and a rank, which nothing may
hold up, needs nothing else of it. `python -m workers.vocabulary.beside FOLDER` is that process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import msgspec

from workers.vocabulary.folder import text_of_tokens


class _Read(msgspec.Struct, array_like=True):
    """Answer of the process."""

    table: list[bytes] | None = None
    special: list[int] = []
    error: str = ""


def text_of_tokens_beside(folder: Path) -> tuple[list[bytes], frozenset[int]] | None:
    """`text_of_tokens`, here if transformers has been imported already, else in another process. Other threads can run
    meanwhile. ValueError as there, and when the process fails."""
    if "transformers" in sys.modules:
        return text_of_tokens(folder)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(folder)],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
    )
    if done.returncode:
        said = done.stderr.decode("utf-8", "replace").strip()[-1000:]
        raise ValueError(f"the tokenizer in {folder} cannot be read: exit status {done.returncode}: {said}")
    read = msgspec.msgpack.decode(done.stdout, type=_Read)
    if read.error:
        raise ValueError(read.error)
    return None if read.table is None else (read.table, frozenset(read.special))


def _main(folder: str) -> None:
    with redirect_stdout(sys.stderr):  # whatever a library prints is no part of the answer
        try:
            table, special = text_of_tokens(Path(folder)) or (None, ())
            read = _Read(table, sorted(special))
        except ValueError as error:
            read = _Read(error=str(error))
    sys.stdout.buffer.write(msgspec.msgpack.encode(read))


if __name__ == "__main__":
    _main(sys.argv[1])
