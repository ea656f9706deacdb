"""Rendezvous of a replica's ranks, and the network interface on which they then listen for each other."""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from urllib.parse import urlsplit

import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # documented, but not typed as exported
from torch.distributed.rendezvous import rendezvous as any_rendezvous

LOOPBACK = "lo"
"""Linux's name of the interface of 127.0.0.1."""


def rendezvous(rank: int, size: int, url: str, timeout_s: float) -> Store:
    """The store at `url`, such as tcp://host:port, where rank 0 of `size` ranks holds it. torch.distributed's errors.

    Torch itself would have rank 0 listen on every interface, without asking for a key; so would gloo and NCCL take the
    interface by which this machine is known to others, which ranks that are all on it have no need of.
    """
    parts, timeout = urlsplit(url), timedelta(seconds=timeout_s)
    if parts.scheme != "tcp":
        store: Store
        store, _, _ = next(any_rendezvous(url, rank, size, timeout=timeout))
        store.set_timeout(timeout)
        return store
    assert parts.hostname is not None, url
    assert parts.port is not None, url
    if parts.hostname == "127.0.0.1" and LOOPBACK in (name for _, name in socket.if_nameindex()):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, LOOPBACK)
    listening = None if rank else _listening(parts.hostname, parts.port)
    return TCPStore(
        parts.hostname,
        parts.port,
        size,
        is_master=rank == 0,
        timeout=timeout,
        master_listen_fd=listening,
    )


def _listening(host: str, port: int) -> int:
    """A descriptor, which the store closes; DistNetworkError where nothing can listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
            listener.listen(socket.SOMAXCONN)
        except OSError as error:
            raise dist.DistNetworkError(f"rank 0 cannot listen at {host}:{port}: {error.strerror}") from error
        return listener.detach()
