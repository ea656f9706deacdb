"""The one channel of a replica: ZeroMQ sockets between its front, its scheduler and its workers.

All processes on one node talk over ipc, in a folder that only its owner enters; else over tcp, with keys that both ends
must have (`workers.channel.curve`). The scheduler binds, everyone else connects, so a process that starts late or dies
cannot block another. Messages are msgpack of `workers.protocol.messages`; nothing received is ever executed.
"""

from __future__ import annotations

import contextlib
import select
import shutil
import threading
import uuid
from pathlib import Path
from typing import Any

import msgspec
import zmq

from workers.channel.curve import ClientKeys, Guard
from workers.channel.ports import socket_folder

CONNECT_TIMEOUT_S = 5.0

_encode = msgspec.msgpack.Encoder().encode


class Addresses(msgspec.Struct, frozen=True):
    """ZeroMQ endpoints to connect to."""

    requests: str
    """Front -> scheduler."""
    outputs: str
    """Scheduler -> front."""
    plans: tuple[str, ...]
    """Scheduler -> worker, one per rank."""
    results: str
    """Workers -> scheduler."""
    pulse: str
    """Scheduler -> workers and front, published: it lives."""
    keys: ClientKeys | None = None
    """Keys that the scheduler requires from those who connect over tcp."""

    @property
    def folder(self) -> Path | None:
        """Folder of the socket files; None over tcp."""
        return Path(self.requests.removeprefix("ipc://")).parent if self.requests.startswith("ipc://") else None


class PeerGone(RuntimeError):
    """Error when there is nobody at the other end; the message says who should be."""


class Sender:
    """Pushes messages. The queue is unbounded (watchdogs bound it in practice), so a peer that is slow blocks nobody.

    A bound socket has no queue while nobody is connected. The first message waits `CONNECT_TIMEOUT_S` for the peer;
    from then on a peer that is not there has left.
    """

    def __init__(self, socket: zmq.Socket[bytes], peer: str = "the scheduler") -> None:
        """`peer` names who receives, for PeerGone."""
        socket.setsockopt(zmq.SNDTIMEO, int(CONNECT_TIMEOUT_S * 1000))
        self._socket, self._peer = socket, peer
        self._flags = 0

    def send(self, message: msgspec.Struct) -> None:
        """Queue one message; PeerGone."""
        self.send_encoded(_encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queue a message that was encoded once for several receivers; PeerGone."""
        try:
            self._socket.send(payload, self._flags)
        except zmq.Again:
            raise PeerGone(
                f"{self._peer} has left the channel" if self._flags else f"{self._peer} never came"
            ) from None
        self._flags = zmq.NOBLOCK

    def never_wait(self) -> None:
        """Take, from now on, a peer that is not there for gone, even if it never came."""
        self._flags = zmq.NOBLOCK

    def close(self, linger_ms: int = 500) -> None:
        """Close after at most `linger_ms` spent on what is still queued."""
        self._socket.close(linger=linger_ms)


class Receiver:
    """Pulls messages of one union type."""

    def __init__(self, socket: zmq.Socket[bytes], kind: Any) -> None:
        self.socket = socket
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._monitor: zmq.Socket[bytes] | None = None

    def receive(self, timeout_ms: int | None = None) -> Any:
        """Next message; None when `timeout_ms` passes first (None waits for ever, 0 does not wait)."""
        if timeout_ms is not None and not self.socket.poll(timeout_ms):
            return None
        return self._decode(self.socket.recv())

    def wait(self, seconds: float) -> None:
        """Sleep until a message may be there, at most for so long. A poll counts whole milliseconds, this does not."""
        if self.socket.poll(0):
            return
        with contextlib.suppress(ValueError):  # of a process with so many open files that select cannot name this one
            select.select([self.socket.fileno()], [], [], seconds)

    def watch_connection(self) -> int:
        """Watch whether the connection stays from now on. Returns a file descriptor, which is edge-triggered like those
        of ZeroMQ's sockets; it is readable when `broke` may say something else than before."""
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._monitor.poll(0)  # a socket that nobody has looked at yet wakes nobody up
        return self._monitor.fileno()

    def broke(self) -> bool:
        """Whether the connection, which is watched, broke since the last call. The kernel says so at once when the
        process at the other end has ended, but not when its node is gone."""
        assert self._monitor is not None
        broke = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            broke = True
        return broke

    def close(self) -> None:
        """Close at once."""
        if self._monitor is not None:
            self.socket.disable_monitor()
            self._monitor.close(linger=0)
        self.socket.close(linger=0)


def _socket(kind: int, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> zmq.Socket[bytes]:
    socket: zmq.Socket[bytes] = (context or zmq.Context.instance()).socket(kind)
    socket.set_hwm(0)
    return socket


def _connected(kind: int, address: str, keys: ClientKeys | None) -> zmq.Socket[bytes]:
    socket = _socket(kind)
    if keys is not None:
        keys.guard(socket)
    socket.connect(address)
    return socket


def last_words_have_left(timeout_s: float = 1.0) -> bool:
    """Wait, before this process ends, for what its closed sockets had still to send: they send on beside it. False when
    that, or a socket that nobody closed, takes longer than `timeout_s`."""
    ending = threading.Thread(target=zmq.Context.instance().term, name="last-words", daemon=True)
    ending.start()
    ending.join(timeout_s)
    return not ending.is_alive()


def encode(message: msgspec.Struct) -> bytes:
    """msgpack of a message."""
    return _encode(message)


def connect_sender(address: str, keys: ClientKeys | None) -> Sender:
    """A sender to a bound address. `keys`: those of the `Addresses` that it is one of."""
    return Sender(_connected(zmq.PUSH, address, keys))


def connect_receiver(address: str, kind: Any, keys: ClientKeys | None) -> Receiver:
    """A receiver of messages of `kind` from a bound address. `keys`: those of the `Addresses` that it is one of."""
    return Receiver(_connected(zmq.PULL, address, keys), kind)


def connect_subscriber(address: str, kind: Any, keys: ClientKeys | None) -> Receiver:
    """A receiver of messages of `kind` that a bound address publishes to all who listen. `keys`: as above."""
    socket = _connected(zmq.SUB, address, keys)
    socket.subscribe(b"")
    return Receiver(socket, kind)


def remove_sockets(addresses: Addresses) -> None:
    """Remove the socket files of a scheduler that ends, or that was killed."""
    if addresses.folder is not None:
        shutil.rmtree(addresses.folder, ignore_errors=True)


def channel_folder() -> Path:
    """A fresh folder for the sockets of one scheduler."""
    return socket_folder(below=len("/12345678"))


class Binding:
    """The scheduler's end of every socket, bound to addresses nobody else uses."""

    def __init__(
        self, ranks: int, host: str | None, to_scheduler: Any, from_worker: Any, folder: Path | None = None
    ) -> None:
        """`host` None: ipc in `folder` of this node, by default a fresh one; otherwise tcp on free ports of that ip
        address, of no other interface, for those who were given `addresses`."""
        self._folder = None if host else folder or channel_folder()
        self._host = host
        self._guard = Guard() if host else None
        context = self._guard.context if self._guard else None
        requests, outputs, results = (_socket(kind, context) for kind in (zmq.PULL, zmq.PUSH, zmq.PULL))
        pulse = _socket(zmq.PUB, context)
        plans = [_socket(zmq.PUSH, context) for _ in range(ranks)]
        self.addresses = Addresses(
            requests=self._bind(requests),
            outputs=self._bind(outputs),
            plans=tuple(self._bind(socket) for socket in plans),
            results=self._bind(results),
            pulse=self._bind(pulse),
            keys=self._guard.keys if self._guard else None,
        )
        self.requests = Receiver(requests, to_scheduler)
        self.results = Receiver(results, from_worker)
        self.outputs = Sender(outputs, "the front")
        self.pulse = Sender(pulse, "every rank and the front")
        self.plans = [Sender(socket, f"rank {rank}") for rank, socket in enumerate(plans)]

    def _bind(self, socket: zmq.Socket[bytes]) -> str:
        if self._guard is not None:
            self._guard.guard(socket)
            return f"tcp://{self._host}:{socket.bind_to_random_port(f'tcp://{self._host}')}"
        assert self._folder is not None
        address = f"ipc://{self._folder / uuid.uuid4().hex[:8]}"
        socket.bind(address)
        return address

    def close(self) -> None:
        """Flush what is queued for half a second, close, remove the socket files."""
        for sender in (*self.plans, self.outputs, self.pulse):
            sender.close()
        self.requests.close()
        self.results.close()
        if self._guard is not None:
            self._guard.close()
        remove_sockets(self.addresses)
