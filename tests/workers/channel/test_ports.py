"""Ports that nobody else is given while a process that will listen at them starts."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path
from typing import Any

import pytest

from workers.channel import ports


def outgoing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    """Have the kernel say from where to where it chooses ports of outgoing connections."""
    (tmp_path / "range").write_text(text)
    monkeypatch.setattr(ports, "_OUTGOING", tmp_path / "range")


def test_ports_are_none_that_outgoing_connections_get(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    outgoing(monkeypatch, tmp_path, "21000\t60999\n")
    found = ports.free_ports("127.0.0.1", 50)
    assert len(set(found)) == 50
    assert all(20000 <= port < 21000 for port in found)


def test_ports_in_use_are_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        used = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_ABOVE_RAYS", used)
        outgoing(monkeypatch, tmp_path, f"{used + 1}\t{used + 2}")
        assert ports.free_port() != used


@pytest.mark.parametrize("text", ["1024\t65535\n", "", "nonsense"])
def test_there_are_ports_whatever_the_kernel_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    outgoing(monkeypatch, tmp_path, text)
    assert len(set(ports.free_ports("127.0.0.1", 5))) == 5


def test_a_host_that_is_not_here_is_an_error() -> None:
    with pytest.raises(OSError, match="assign"):
        ports.free_port("203.0.113.77")


@pytest.mark.parametrize("room", [0, -1])
def test_a_folder_for_sockets_is_not_too_deep_for_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room: int
) -> None:
    """The deepest place for temporary files that serves, and one a character deeper."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    name = "/" + "x" * (107 - len(os.fsencode(tmp_path)) - len("/latentserve-12345678") - 1 - room)
    folder = ports.socket_folder(len(name))
    try:
        assert folder.parent == (tmp_path if room == 0 else Path("/tmp"))
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"{folder}{name}")
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "0.0.0.0", "::"])
def test_a_host_is_an_address_of_either_kind_or_a_name(host: str) -> None:
    port = ports.free_port(host)
    with ports.bound(host, port) as opened:
        opened.listen()
        with pytest.raises(OSError, match="in use"):
            ports.bound(host, port, reuse=True)


def test_a_host_that_is_none_is_named_so() -> None:
    with pytest.raises(OSError, match="not known"):
        ports.bound("nowhere.invalid", 0)


def test_a_name_with_addresses_of_ipv6_alone_is_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray Serve's proxy would look for one of IPv4."""
    known = socket.getaddrinfo
    addresses = {"six.test": ["::1"], "both.test": ["::1", "127.0.0.1"], "four.test": ["127.0.0.1"]}

    def found(host: str, *more: Any, **others: Any) -> Any:
        return [one for address in addresses.get(host, [host]) for one in known(address, *more, **others)]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    assert ports.six_alone("six.test") == "::1"
    for host in ("both.test", "four.test", "127.0.0.1", "0.0.0.0", "::", "::1", "nowhere.invalid"):
        assert ports.six_alone(host) == host
