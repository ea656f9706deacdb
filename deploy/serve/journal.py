"""Journal of one answer, in memory that outlives the front: what another front needs to write the rest of it.

It begins with the request, and then has, in order, every output that a choice was given and the length and checksum of
everything that was written to the client. What is taken down is there once the word at its beginning says so, so a
front may be killed at any instruction. The front that owns an answer holds a lock on its journal, which the kernel
releases when the front has ended and gives to one other front only.

    word 0     bytes that are valid; 0 once the answer is over
    word 1     bytes that the connection had been given before this answer
    word 2     1 once the head of a stream was written
    word 3     fronts that have owned it
    records    one byte that says of which kind, and what there is to say

The ordinary piece of a stream, a token and the event that it becomes, is one record of a few bytes. This costs a front
half a microsecond for a token; that the piece is written past the layers of the server saves more.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import struct
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from zlib import crc32

import msgspec

from deploy.api.generation.journaling import WritePiece
from workers.protocol.messages import RequestOutput

_RECORD: Final = struct.Struct("=BII")
"""Kind, then for `_WRITTEN` length and checksum, for others the length of what follows and the number of a choice."""
_TOKEN: Final = struct.Struct("=BIII")
"""Of a token that was given to the only choice and the piece that was written next: kind, length, checksum, token."""
_pack_token: Final = _TOKEN.pack_into
_REQUEST, _HEAD, _FED, _WRITTEN, _TOKEN_WRITTEN = range(1, 6)
BEGIN: Final = 32
"""Bytes before the first record."""
_ROOM: Final = 16 * 1024
"""Bytes that a new journal has beyond its first record."""

_encode = msgspec.msgpack.Encoder().encode
_decode_output = msgspec.msgpack.Decoder(RequestOutput).decode


class Began(msgspec.Struct):
    """The request of an answer, and what its front made of it."""

    fingerprint: str
    """What serves it, as `deploy.serve.neighbor_store.NeighborStore.answers_as` has it."""
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    secret: bytes
    """As `deploy.api.http.draws.Draws` has it, like `created` and `arrived`."""
    created: float
    arrived: float
    checksum: int
    """Of its prompts."""
    ordinary: bool
    """Whether it is a stream of one choice that shows nothing of its tokens but their text and number."""
    conversation: bytes | None = None
    """What the front kept of earlier answers and this one goes on from."""


def checksum(piece: bytes) -> int:
    """Checksum of a piece that is written. Pieces of one answer are of equal length often and differ in a few bytes,
    such as `101` and `020`: a CRC tells them apart, a sum (Adler-32) may not."""
    return crc32(piece)


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
    __slots__ = (
        "_end",
        "_file",
        "_full",
        "_head_out",
        "_map",
        "_ordinary",
        "_pending",
        "_size",
        "_words",
        "write_piece",
    )

    def __init__(self, memory: int) -> None:
        """Own the journal in a memfd, which stays the caller's. JournalTaken where another process does; OSError or
        ValueError where its memory cannot be mapped."""
        # A lock belongs to an open file description, and the descriptor that is handed around shares one with others.
        self._file = os.open(f"/proc/self/fd/{memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalTaken from None
            self._size = os.fstat(self._file).st_size
            # Page by page, as they are written, the kernel would take several times as long.
            self._map = mmap.mmap(self._file, self._size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except BaseException:
            os.close(self._file)
            raise
        self._words = memoryview(self._map)[:BEGIN].cast("Q")
        self._end = self._words[0]
        self._words[3] += 1
        self._head_out = self._full = False
        self._pending: list[RequestOutput] = []
        """Outputs that are not taken down yet. Nothing was written since they came."""
        self._ordinary = False
        self.write_piece: WritePiece | None = None
        """See `deploy.api.generation.journaling.Journal`."""

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
        journal._ordinary = began.ordinary
        journal._take_down(_RECORD.pack(_REQUEST, len(record), 0) + record)
        return journal, memory

    @property
    def size(self) -> int:
        """Bytes, whether memory was taken for them or not."""
        return self._size

    @property
    def owners(self) -> int:
        """Fronts that have owned it, this one included."""
        return self._words[3]

    @property
    def given_before(self) -> int:
        """Bytes that its connection had been given before the answer."""
        return self._words[1]

    def outputs(self, choice: int) -> Sequence[RequestOutput]:
        """None: the answer begins here."""
        return ()

    def repeated(self, choice: int, ended: bool) -> None:
        """Nothing is, where the answer begins."""

    def feeder(self, choice: int) -> Callable[[RequestOutput], object]:
        """Return a function that takes down an output of a choice."""
        # The only choice of a stream writes next, and it is taken down then: in the least time, for every token.
        return self._pending.append if self._ordinary else partial(self.fed, choice)

    def fed(self, choice: int, output: RequestOutput) -> None:
        """Take down an output that a choice is about to be given."""
        record = _encode(output)
        self._take_down(_RECORD.pack(_FED, len(record), choice) + record)

    def wrote(self, data: bytes) -> None:
        """Take down what is about to be written to the client."""
        for output in self._pending:
            self.fed(0, output)
        self._pending.clear()
        if self._head_out:
            self._take_down(_RECORD.pack(_WRITTEN, len(data), checksum(data)))
        else:
            self._head_out = True
            self._take_down(_RECORD.pack(_HEAD, len(data), 0) + data)
            self._words[2] = is_chunked(data)

    def writer(self, write: Callable[[bytes], object]) -> Callable[[bytes], None]:
        """Return a function that takes down what is to be written, and then has `write` write it."""
        pending, size = self._pending, _TOKEN.size

        def journalled(data: bytes) -> None:
            if len(pending) == 1 and self._head_out:
                output, begin = pending.pop(), self._end
                tokens, end = output.tokens, begin + size
                ordinary = len(tokens) == 1 and not (output.finish or output.cached_tokens)
                if ordinary and end <= self._size and not self._full:
                    _pack_token(self._map, begin, _TOKEN_WRITTEN, len(data), crc32(data), tokens[0])
                    self._words[0] = self._end = end
                    write(data)
                    return
                pending.append(output)
            self.wrote(data)
            write(data)

        return journalled

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
            if kind in (_WRITTEN, _TOKEN_WRITTEN):
                assert found is not None
                found.written.append((length, number))
                if kind == _TOKEN_WRITTEN:
                    *_, token = _TOKEN.unpack_from(data, at)
                    outputs = found.outputs[0]
                    outputs.append(RequestOutput("", (token,), at=_end_of(outputs)))
                at += _TOKEN.size if kind == _TOKEN_WRITTEN else _RECORD.size
                continue
            at += _RECORD.size
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

    def end(self) -> None:
        """The answer is over: empty it and give it up. Whoever owns it from now on finds nothing to go on with."""
        self._words[0] = 0
        self.close()

    def close(self) -> None:
        """Give it up; whoever has its memory may own it then."""
        with contextlib.suppress(BufferError):
            self._words.release()
            self._map.close()
        os.close(self._file)


def _end_of(outputs: Sequence[RequestOutput]) -> int:
    """Tokens that a choice has."""
    return outputs[-1].at + len(outputs[-1].tokens) if outputs else 0


def is_chunked(head: bytes) -> bool:
    """Whether an answer with this head comes in chunks."""
    return b"transfer-encoding: chunked" in head.lower()


class JournalledTransport:
    """Transport of a connection that takes down in a journal what is written, before it is."""

    __slots__ = ("_transport", "write")

    def __init__(self, transport: Any, journal: Journal) -> None:
        self._transport, self.write = transport, journal.writer(transport.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)
