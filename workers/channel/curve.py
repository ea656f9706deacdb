"""Access to a channel that goes over TCP: CURVE keys of its two ends, made for one replica, kept in memory.

CURVE (https://rfc.zeromq.org/spec/26) encrypts a connection and proves either end to the other. The end that binds has
a key pair; all who connect share another. What those need travels in the channel's addresses, from process to process
through Ray: see `workers.channel.sockets.Addresses`. Sockets of a node (ipc) need none of this: their folder is its
owner's.
"""

from __future__ import annotations

import msgspec
import zmq
from typing_extensions import override
from zmq.auth.thread import ThreadAuthenticator

_DOMAIN = "latentserve"


class ClientKeys(msgspec.Struct, frozen=True):
    """Keys for connecting, each of 40 characters in Z85. `secret` must not be printed, so no key is."""

    server: bytes
    """Public key of the end that binds."""
    public: bytes
    """Public key of those who connect."""
    secret: bytes
    """Secret key of those who connect."""

    @override
    def __repr__(self) -> str:
        return "ClientKeys(...)"

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Let a socket that is going to connect talk to the holder of `server` only. Before `connect`."""
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = self.server, self.public, self.secret


class _OneKey:
    """Answers ZeroMQ's question whether a key may connect."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether `key` (Z85) is the one that may."""
        return key == self._public


class Guard:
    """The side that binds: turns away whoever has not been given `keys`.

    ZeroMQ asks one authenticator a context, so a guard has a context of its own, in which the guarded sockets are made.
    """

    def __init__(self) -> None:
        server, self._secret = zmq.curve_keypair()
        public, secret = zmq.curve_keypair()
        self.keys = ClientKeys(server, public, secret)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self.context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _OneKey(public))

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Answer none but the holders of `keys` on a socket of `context`. Before `bind`."""
        socket.curve_server = True
        socket.curve_secretkey = self._secret
        socket.zap_domain = _DOMAIN.encode()

    def close(self) -> None:
        """Wait for what the sockets of `context`, all closed, have still to send; then end it."""
        self._authenticator.stop()
        self.context.term()
