"""The rendezvous of ranks is open to those that need it."""

from __future__ import annotations

import os
import socket
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
import torch.distributed as dist

from workers.channel.ports import free_port
from workers.parallel.rendezvous import rendezvous


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2"])
def test_rank_0_listens_at_the_address_that_it_was_given_alone(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)
    port = free_port(host)
    url = f"tcp://{host}:{port}"
    with ThreadPoolExecutor(1) as pool:  # each waits for the other
        joining = pool.submit(rendezvous, 1, 2, url, 60.0)
        store, other = rendezvous(0, 2, url, 60.0), joining.result()
    listening = psutil.Process().net_connections("tcp")
    assert {c.laddr.ip for c in listening if c.status == psutil.CONN_LISTEN and c.laddr.port == port} == {host}
    store.set("said", "heard")
    assert other.get("said") == b"heard"
    # Interfaces are chosen where all ranks are on this machine.
    assert os.environ.get("GLOO_SOCKET_IFNAME") == os.environ.get("NCCL_SOCKET_IFNAME")
    assert os.environ.get("NCCL_SOCKET_IFNAME") == ("lo" if host == "127.0.0.1" else None)


def test_a_port_that_somebody_took_is_an_error_of_the_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(dist.DistNetworkError, match=f"rank 0 cannot listen at 127.0.0.1:{port}: "):
            rendezvous(0, 2, f"tcp://127.0.0.1:{port}", 1.0)


def test_an_interface_that_was_chosen_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    rendezvous(0, 1, f"tcp://127.0.0.1:{free_port()}", 10.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
