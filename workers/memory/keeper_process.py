"""Process that keeps the memory of weights while nobody has it mapped: that of the ranks of one replica and node.

A rank that has loaded its weights hands the descriptors of their memory in. When the rank dies, the memory stays, as
the process here has the descriptors open; the rank that takes its place asks for them. Whoever started this process
holds the other end of its standard input: when that ends, however it ends, so does this process, and with it the
memory.

It must outlive ranks and weigh nothing: no imports but the standard library's, no CUDA, a few megabytes, no work but at
the start of a rank. A message is JSON behind its length and the number of descriptors that follow it; a connection has
one question and one answer.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import shutil
import signal
import socket
import struct
import sys
import time
from collections.abc import Iterator
from typing import Any, Final

_HEAD: Final = struct.Struct("<QI")
_AT_ONCE: Final = 128
"""Descriptors of one message of the kernel's, which takes no more than 253."""
MOST_BYTES: Final = 1 << 28
"""Bytes of a message: the list of a rank's tensors takes less than one hundredth of it."""
PATIENCE_S: Final = 10.0
"""Seconds for a message once it has begun: the other end may be stopped, and others wait."""

Message = dict[str, Any]


def send(channel: socket.socket, message: Message, descriptors: list[int] | None = None) -> None:
    """Send a message, and copies of these descriptors. OSError."""
    text, left = json.dumps(message).encode(), list(descriptors or ())
    channel.sendall(_HEAD.pack(len(text), len(left)) + text)
    while left:
        socket.send_fds(channel, [b"."], left[:_AT_ONCE])
        del left[:_AT_ONCE]


def receive(channel: socket.socket) -> tuple[Message, list[int]]:
    """Receive a message and its descriptors, which are the caller's to close. OSError; ValueError for what is none."""
    length, count = _HEAD.unpack(_exactly(channel, _HEAD.size))
    if length > MOST_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(_exactly(channel, length))
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    found: list[int] = []
    try:
        while len(found) < count:
            data, more, _, _ = socket.recv_fds(channel, 1, _AT_ONCE)
            found += more
            if not data or not more:
                raise ConnectionError("the connection ended among descriptors")
    except BaseException:
        close_all(found)
        raise
    return message, found


def close_all(descriptors: list[int]) -> None:
    """Close them."""
    for descriptor in descriptors:
        os.close(descriptor)


def _exactly(channel: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        more = channel.recv(min(count - len(data), 1 << 20))
        if not more:
            raise ConnectionError("the connection ended in a message")
        data += more
    return bytes(data)


class Kept:
    """What is kept, by slot: the weights of one rank, or a part of them, each."""

    def __init__(self) -> None:
        self._slots: dict[str, tuple[Message, list[int]]] = {}
        self._facts: dict[str, Any] = {}

    def answer(self, message: Message, descriptors: list[int]) -> tuple[Message, list[int]]:
        """Do what is asked. Return the answer, and descriptors that go with it, which stay open here. Those of the
        message are closed, or kept."""
        kind, slot = message.get("kind"), str(message.get("slot"))
        if kind == "keep" and isinstance(message.get("what"), dict):
            self._forget(slot)
            self._slots[slot] = message["what"], descriptors
            return {}, []
        close_all(descriptors)
        if kind == "ask":
            what, held = self._slots.get(slot, ({}, []))
            if what.get("fingerprint") != message["fingerprint"]:
                if message.get("let_go", True):
                    # Nobody will ask for it any more, and who asked needs the memory.
                    self._forget(slot)
                return {"what": None}, []
            return {"what": what}, held
        if kind == "forget":
            self._forget(slot)
            return {}, []
        if kind == "drop":
            dropped = {slot: what.get("size", 0) for slot, (what, _) in self._slots.items()}
            for each in dropped:
                self._forget(each)
            return {"dropped": dropped}, []
        if kind == "slots":
            return {"slots": sorted(self._slots)}, []
        if kind == "note":
            self._facts[message["key"]] = message["value"]
            return {}, []
        if kind == "recall":
            return {"value": self._facts.get(message["key"])}, []
        return {"error": f"unknown kind {kind!r}"}, []

    def all(self) -> Iterator[tuple[Message, list[int]]]:
        """Yield, for each thing that is kept, the message that has another one keep the same, with its descriptors,
        which stay open here."""
        for slot, (what, descriptors) in self._slots.items():
            yield {"kind": "keep", "slot": slot, "what": what}, descriptors
        for key, value in self._facts.items():
            yield {"kind": "note", "key": key, "value": value}, []

    def close(self) -> None:
        """Let everything go."""
        for slot in list(self._slots):
            self._forget(slot)
        self._facts.clear()

    def _forget(self, slot: str) -> None:
        close_all(self._slots.pop(slot, ({}, []))[1])


def serve(listener: socket.socket, end: int) -> None:
    """Answer those who connect, one after the other, until descriptor `end` is at its end."""
    kept = Kept()
    while True:
        ready, _, _ = select.select([listener.fileno(), end], [], [])
        if end in ready and not os.read(end, 1):
            return
        if listener.fileno() not in ready:
            continue
        try:
            channel, _ = listener.accept()
        except OSError:  # no descriptors are left, perhaps: not at once again
            time.sleep(0.1)
            continue
        # Whoever it was may be gone, or no rank.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError), channel:
            channel.settimeout(PATIENCE_S)
            send(channel, *kept.answer(*receive(channel)))


def main() -> None:
    """Keep until standard input ends. Arguments: the descriptor that is listened at, the folder of its socket."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)  # it ends with who started it, who may drain first
    # A descriptor for every 2 GiB of weights of all ranks of the node.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    number = int(sys.argv[1])
    # Nothing but the socket: an inherited descriptor could keep a port, or memory, of somebody else.
    os.closerange(3, number)
    os.closerange(number + 1, 1024)
    try:
        serve(socket.socket(fileno=number), sys.stdin.fileno())
    finally:
        shutil.rmtree(sys.argv[2], ignore_errors=True)


if __name__ == "__main__":
    main()
