"""Ports to listen at, chosen before the process that will listen has begun; and folders for sockets that have none."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from pathlib import Path
from typing import Final

_ABOVE_RAYS: Final = 20000
"""Ray's workers listen below."""
_OUTGOING: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_OUTGOING_FROM: Final = 32768
"""Lowest port of outgoing connections where the kernel does not give it: Linux's own default, which is below that of
others."""
_DRAWS: Final = 200
_SOCKET_PATH: Final = 107
"""Most bytes of a socket's path on Linux, see unix(7)."""
_SHORT: Final = "/tmp"
_FOLDER: Final = "latentserve-"


def free_ports(host: str, count: int) -> list[int]:
    """Ports that were free a moment ago, all different.

    None of those that the kernel gives to outgoing connections, where there are enough others: until somebody listens
    at a port, which may take seconds, a connection could be given it. OSError when nothing can be bound at `host`.
    """
    below = _first_outgoing()
    candidates = range(_ABOVE_RAYS, below) if below > _ABOVE_RAYS else range(0)
    sockets: list[socket.socket] = []
    try:
        for port in random.sample(candidates, min(_DRAWS, len(candidates))):
            if len(sockets) == count:
                break
            try:
                sockets.append(bound(host, port))
            except OSError:
                continue
        while len(sockets) < count:
            sockets.append(bound(host, 0))
        return [int(probe.getsockname()[1]) for probe in sockets]
    finally:
        for probe in sockets:
            probe.close()


def bound(host: str, port: int, reuse: bool = False) -> socket.socket:
    """A TCP socket that is bound there: `host` is an IPv4 or IPv6 address, or a name, of whose addresses the first that
    can be bound is taken. `reuse`: also where closed connections of a server that ended still wait. OSError."""
    problem: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        opened = socket.socket(family, kind, protocol)
        try:
            if reuse:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            opened.bind(address)
        except OSError as error:
            opened.close()
            problem = error
        else:
            return opened
    raise problem or OSError(f"{host} has no address")


def six_alone(host: str) -> str:
    """The address of a name that has IPv6 addresses alone, the first that can be bound; any other `host` as it is.

    Servers that look at a host's spelling to choose between the two take a name for one of IPv4."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError:  # whoever binds it says so
        return host
    if any(family != socket.AF_INET6 for family, *_ in found):
        return host
    try:
        with bound(host, 0) as probe:
            return str(probe.getsockname()[0])
    except OSError:
        return host


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port of `free_ports`."""
    return free_ports(host, 1)[0]


def socket_folder(below: int) -> Path:
    """A fresh folder for sockets, whose paths go on for `below` characters: where temporary files go, or in /tmp where
    that is too deep for them."""
    usual = tempfile.gettempdir()
    name = len("/") + len(_FOLDER) + len("12345678")
    return Path(tempfile.mkdtemp(prefix=_FOLDER, dir=usual if fits_sockets(usual, name + below) else _SHORT))


def fits_sockets(folder: str, below: int) -> bool:
    """Whether there can be sockets whose paths go on for `below` characters there."""
    return len(os.fsencode(folder)) + below <= _SOCKET_PATH


def _first_outgoing() -> int:
    try:
        return int(_OUTGOING.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _OUTGOING_FROM
