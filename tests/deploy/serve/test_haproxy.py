"""The command in HAProxy's place, on a configuration that Ray Serve itself renders and HAProxy itself checks."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig

from deploy import haproxy
from deploy.connection import free_ports

PORT, STATS, EXPORTER, REPLICA, ROUTER = free_ports("127.0.0.1", 5)


@pytest.fixture
def rendered(tmp_path: Path) -> Path:
    """As Serve writes it for one replica and its fallback proxy."""
    config = HAProxyConfig(
        socket_path=str(tmp_path / "node" / "admin.sock"),
        server_state_base=str(tmp_path / "node"),
        server_state_file=str(tmp_path / "node" / "server-state"),
        metrics_socket_path=str(tmp_path / "node" / "metrics.sock"),
        stats_port=STATS,
        metrics_port=EXPORTER,
    )
    config.http_options.host = "127.0.0.1"
    config.http_options.port = PORT
    backend = BackendConfig(
        name="http-app",
        path_prefix="/",
        app_name="app",
        servers=[ServerConfig("SERVE_REPLICA_x", "127.0.0.1", REPLICA, replica_id="x")],
        ingress_request_router_servers=[ServerConfig("ROUTER", "127.0.0.1", ROUTER)],
        fallback_server=ServerConfig("SERVE_PROXY_ACTOR-fallback-node", "127.0.0.1", REPLICA),
    )
    api = HAProxyApi(config, {backend.name: backend}, str(tmp_path / "node" / "haproxy.cfg"))
    api._generate_config_file_internal()
    return tmp_path / "node" / "haproxy.cfg"


def test_side_doors_are_closed_and_the_rest_is_left(rendered: Path) -> None:
    before = rendered.read_text().split("\n")
    after = haproxy.adapt(rendered.read_text(), Path("/x/503.http"), Path("/x/503.json")).split("\n")
    assert [line.strip() for line in before if line.strip().startswith("bind")] == [
        f"bind :{EXPORTER}",
        f"bind 127.0.0.1:{PORT}",
        f"bind *:{STATS}",
    ]
    assert [line.strip() for line in after if line.strip().startswith("bind")] == [
        f"bind 127.0.0.1:{EXPORTER}",
        f"bind 127.0.0.1:{PORT}",
        f"bind 127.0.0.1:{STATS}",
    ]
    dropped = [line.strip() for line in before if line not in after]
    kinds = [line.split()[0] for line in dropped]
    # Two listeners, three error files, a refusal; the fallback server in both backends and its pin.
    expected = ["bind", "bind", "errorfile", "errorfile", "errorfile", "http-request", "server", "server", "use-server"]
    assert sorted(kinds) == expected
    assert all("fallback" in line for line in dropped if "server" in line.split()[0])
    assert len(before) - len(after) == 3


def test_the_front_door_stays_on_every_interface_when_asked(rendered: Path) -> None:
    config = rendered.read_text().replace(f"bind 127.0.0.1:{PORT}", f"bind *:{PORT}")
    assert f"bind *:{PORT}" in haproxy.adapt(config, Path("/x"), Path("/y"))


def test_haproxy_starts_with_it_answers_and_ends_with_its_parent(rendered: Path, tmp_path: Path) -> None:
    import httpx

    binary = haproxy.find_binary()
    assert binary is not None
    command = haproxy.install(tmp_path, binary)
    (tmp_path / haproxy.FAULT_FILE).write_text("rank 1 died")
    # The parent starts HAProxy in its place and waits; killing it must end HAProxy.
    code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    arguments = [sys.executable, "-c", code, str(command), "-f", str(rendered)]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                answer = httpx.get(f"http://127.0.0.1:{PORT}/health", trust_env=False)
                break
            except httpx.HTTPError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        assert answer.status_code == 503
        assert answer.headers["retry-after"]
        error = answer.json()["error"]
        assert error["code"] == "no_replica"
        assert error["message"] == "no replica is ready: rank 1 died"
        # A POST goes by the router first, which is not there either.
        answer = httpx.post(f"http://127.0.0.1:{PORT}/v1/completions", json={}, trust_env=False)
        assert (answer.status_code, answer.json()["error"]) == (503, error)
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    deadline = time.monotonic() + 5
    while Path(f"/proc/{pid}").exists() and Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "HAProxy outlived its parent"
        time.sleep(0.02)


def test_faults_are_noted_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    haproxy.note_fault("why")
    assert (tmp_path / haproxy.FAULT_FILE).read_text() == "why"
    haproxy.note_fault(None)
    haproxy.note_fault(None)
    assert not (tmp_path / haproxy.FAULT_FILE).exists()
    monkeypatch.delenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    haproxy.note_fault("why")
    assert not list(tmp_path.iterdir())
