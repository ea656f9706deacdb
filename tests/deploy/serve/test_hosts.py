"""Addresses that an application listens at, and the URL by which it is reached."""

from types import SimpleNamespace
from typing import Any

import pytest

from deploy.config.application import ServeConfig
from deploy.serve import app, entrance


@pytest.mark.parametrize(
    ("host", "own", "reached"),
    [
        ("127.0.0.1", True, "127.0.0.1"),
        ("0.0.0.0", True, "10.0.0.1"),
        ("::", True, "[::1]"),
        ("::", False, "10.0.0.1"),
        ("::1", True, "[::1]"),
        ("fe80::5", False, "[fe80::5]"),
        ("node-a", False, "node-a"),
    ],
)
def test_a_url_names_a_host_that_can_be_reached(host: str, own: bool, reached: str) -> None:
    connection: Any = SimpleNamespace(own=own, head_address="10.0.0.1")
    assert app._reached_at(host, connection) == reached


def test_one_interface_of_a_cluster_needs_the_proxy() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0", "::"):
        app._check_host(ServeConfig.model_validate({"engine": {"model": "demo"}, "host": host}))
    app._check_host(ServeConfig.model_validate({"engine": {"model": "demo"}, "host": "10.0.0.7", "ingress": "proxy"}))
    with pytest.raises(app.StartFailed, match=r"host = 10\.0\.0\.7: HAProxies of a cluster"):
        app._check_host(ServeConfig.model_validate({"engine": {"model": "demo"}, "host": "10.0.0.7"}))


def test_what_another_process_raised_is_one_line() -> None:
    said = "Ray Serve does not start: "
    trace = "Traceback\n  File x\nRuntimeError: [NOTICE] version\n[ALERT] (1) : Cannot raise\n[WARNING] x\n"
    assert entrance.problem(RuntimeError(trace)) == f"{said}[ALERT] (1) : Cannot raise"
    assert entrance.problem(RuntimeError("Traceback\n\nValueError: no\n\n")) == f"{said}ValueError: no"
    assert entrance.problem(RuntimeError()) == f"{said}no cause is known"
