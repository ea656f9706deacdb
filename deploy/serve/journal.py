"""Journal of one answer, in memory that outlives the front: what another front needs to write the rest of it.

It begins with the request, and then has, in order, every output that a choice was given and the length and checksum of
everything that was written to the client. What is taken down is there once the word at its beginning says so, so a
front may be killed at any instruction. The front that owns an answer holds a lock on its journal, which the kernel
releases when the front has ended and gives to one other front only.

    word 0     bytes that are valid
    word 1     bytes that the connection had been given before this answer
    word 2     1 once the head of a stream was written
    records    one byte that says of which kind, four that say how long, and as many bytes
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import msgspec

from workers.protocol.messages import RequestOutput

_RECORD: Final = struct.Struct("<BII")
"""Kind, then for `_WRITTEN` length and checksum, for others the length of what follows and the number of a choice."""
_REQUEST, _HEAD, _FED, _WRITTEN = 1, 2, 3, 4
BEGIN: Final = 24
"""Bytes before the first record."""
_ROOM: Final = 16 * 1024
"""Bytes that a new journal has beyond its first record; memory is taken as it is written."""

_encode = msgspec.msgpack.Encoder().encode
_decode_output = msgspec.msgpack.Decoder(RequestOutput).decode


class Began(msgspec.Struct):
    """The request of an answer, and what its front made of it."""

    fingerprint: str
    """What serves it, as `deploy.serve.neighbor_store.fingerprint` has it."""
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    secret: bytes
    """As `deploy.api.http.draws.Draws` has it, like `created`."""
    created: float
    checksum: int
    """Of its prompts."""
    conversation: bytes | None = None
    """What the front kept of earlier answers and this one goes on from."""


@dataclass
class Recorded:
    """What a journal holds."""

    began: Began
    head: bytes | None = None
    """Status line and headers; None where nothing was written."""
    written: list[tuple[int, int]] = field(default_factory=list)
    """Length and checksum of everything that was written behind the head, in order."""
    outputs: defaultdict[int, list[RequestOutput]] = field(default_factory=lambda: defaultdict(list))
    """Outputs by choice."""

    @property
    def tokens(self) -> int:
        """Tokens of all choices."""
        return sum(len(output.tokens) for outputs in self.outputs.values() for output in outputs)


class JournalTaken(Exception):
    """Another front goes on with the answer, or the one that began it lives."""


class Journal:
    """A journal that this process owns. `deploy.api.generation.journaling.Journal` of an answer that begins here."""

    age_s: float | None = None

    def __init__(self, memory: int) -> None:
        """Own the journal in a memfd, which stays the caller's. JournalTaken where another process does."""
        # A lock belongs to an open file description, and the descriptor that is handed around shares one with others.
        self._file = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._file)
            raise JournalTaken from None
        self._size = os.fstat(self._file).st_size
        self._map = mmap.mmap(self._file, self._size)
        self._words = memoryview(self._map)[:BEGIN].cast("Q")
        self._end = self._words[0]
        self._head_out = self._full = False

    @staticmethod
    def begin(began: Began, given: int) -> tuple[Journal, int]:
        """Begin a journal; also returns its memfd, which is the caller's. `given`: bytes that the connection has been
        given so far."""
        record = _encode(began)
        memory = os.memfd_create("latentserve-journal")
        try:
            os.ftruncate(memory, -(-(BEGIN + _RECORD.size + len(record) + _ROOM) // mmap.PAGESIZE) * mmap.PAGESIZE)
            journal = Journal(memory)
        except BaseException:
            os.close(memory)
            raise
        journal._end = BEGIN
        journal._words[1] = given
        journal._take_down(_RECORD.pack(_REQUEST, len(record), 0) + record)
        return journal, memory

    @property
    def size(self) -> int:
        """Bytes, whether memory was taken for them or not."""
        return self._size

    @property
    def given_before(self) -> int:
        """Bytes that its connection had been given before the answer."""
        return self._words[1]

    def outputs(self, choice: int) -> Sequence[RequestOutput]:
        """None: the answer begins here."""
        return ()

    def repeated(self, choice: int, ended: bool) -> None:
        """Nothing is, where the answer begins."""

    def fed(self, choice: int, output: RequestOutput) -> None:
        """Take down an output that a choice is about to be given."""
        record = _encode(output)
        self._take_down(_RECORD.pack(_FED, len(record), choice) + record)

    def wrote(self, data: bytes) -> None:
        """Take down what is about to be written to the client."""
        if self._head_out:
            self._take_down(_RECORD.pack(_WRITTEN, len(data), crc32(data)))
        else:
            self._head_out = True
            self._take_down(_RECORD.pack(_HEAD, len(data), 0) + data)
            self._words[2] = is_chunked(data)

    def _take_down(self, record: bytes) -> None:
        end = self._end + len(record)
        if end > self._size and not self._full:
            self._grow(end)
        if self._full:
            return  # what the client has then is more than the journal says, and nobody takes the answer over
        self._map[self._end : end] = record
        # One store of an aligned word: with it, and not before, the record is valid.
        self._words[0] = self._end = end

    def _grow(self, least: int) -> None:
        size = max(2 * self._size, -(-least // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._words.release()
        try:
            self._map.resize(size)
            self._size = size
        except (OSError, SystemError):
            self._full = True
        self._words = memoryview(self._map)[:BEGIN].cast("Q")

    def read(self) -> Recorded:
        """Read all that is valid. msgspec.MsgspecError for what this version does not know."""
        data, at = bytes(self._map[: self._end]), BEGIN
        found: Recorded | None = None
        while at < len(data):
            kind, length, number = _RECORD.unpack_from(data, at)
            at += _RECORD.size
            if kind == _WRITTEN:
                assert found is not None
                found.written.append((length, number))
                continue
            record = data[at : at + length]
            at += length
            if kind == _REQUEST:
                found = Recorded(msgspec.msgpack.decode(record, type=Began))
            elif found is not None and kind == _HEAD:
                found.head, self._head_out = record, True
            elif found is not None and kind == _FED:
                found.outputs[number].append(_decode_output(record))
        if found is None:
            raise msgspec.ValidationError("the journal has no request")
        return found

    def close(self) -> None:
        """Give it up; whoever has its memory may own it then."""
        with contextlib.suppress(BufferError):
            self._words.release()
            self._map.close()
        os.close(self._file)


def is_chunked(head: bytes) -> bool:
    """Whether an answer with this head comes in chunks."""
    return b"transfer-encoding: chunked" in head.lower()


class JournalledTransport:
    """Transport of a connection that takes down in a journal what is written, before it is."""

    def __init__(self, transport: Any, journal: Journal) -> None:
        wrote, write = journal.wrote, transport.write

        def journalled(data: bytes) -> None:
            wrote(data)
            write(data)

        self._transport, self.write = transport, journalled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
