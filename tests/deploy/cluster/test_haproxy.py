"""The command in HAProxy's place, on a configuration that Ray Serve itself renders and HAProxy itself checks."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import psutil
import pytest
from ray.serve._private import haproxy as ray_haproxy
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig

from deploy.cluster import haproxy
from deploy.cluster.environment import fitting_connections
from deploy.config.cache_salts import CacheSalts
from deploy.config.keys import ApiKey
from workers.channel.ports import free_ports
from workers.environment import EnvironmentProblem

PORT, STATS, EXPORTER, REPLICA, ROUTER = free_ports("127.0.0.1", 5)
ROUTER_TIMEOUT_S = 1
BODY_TIMEOUT_S = 2


@pytest.fixture
def router_timeout_s() -> int:
    """Seconds that HAProxy waits for the router. A test of what that one says overrides it: it may be late."""
    return ROUTER_TIMEOUT_S


@pytest.fixture
def rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, router_timeout_s: int) -> Path:
    """Render the configuration as Serve writes it for one replica, its router and the fallback proxy; health checks
    come more often."""
    monkeypatch.setattr(ray_haproxy, "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY", True)
    monkeypatch.setattr(ray_haproxy, "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_TIMEOUT_S", router_timeout_s)
    config = HAProxyConfig(
        socket_path=str(tmp_path / "node" / "admin.sock"),
        server_state_base=str(tmp_path / "node"),
        server_state_file=str(tmp_path / "node" / "server-state"),
        metrics_socket_path=str(tmp_path / "node" / "metrics.sock"),
        stats_port=STATS,
        metrics_port=EXPORTER,
        retry_on="conn-failure empty-response",  # as `deploy.cluster.environment` asks
        retries=1,
        health_check_inter="50ms",
        health_check_fastinter="50ms",
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
    file = tmp_path / "node" / "haproxy.cfg"
    # Without this a check that comes so often has to be answered as fast.
    file.write_text(re.sub(r"^defaults$", "defaults\n    timeout check 5s", file.read_text(), count=1, flags=re.M))
    assert "timeout check" in file.read_text()
    return file


@pytest.fixture
def proxy(rendered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[subprocess.Popen, int]]:
    """HAProxy in front of whatever listens on REPLICA and ROUTER: its parent, which waits for it, and its process."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    binary = haproxy.find_binary()
    assert binary is not None
    command = haproxy.install(tmp_path, binary, BODY_TIMEOUT_S)
    code = "import subprocess, sys; p = subprocess.Popen(sys.argv[1:]); print(p.pid, flush=True); p.wait()"
    arguments = [sys.executable, "-c", code, str(command), "-f", str(rendered)]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", PORT), 1).close()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield parent, pid
    parent.kill()
    parent.wait()
    until_it_has_ended(pid)  # the next one listens at the same port, and both of them would be connected to


@pytest.fixture
def serve() -> Iterator[Callable[..., None]]:
    """Listen on a port and answer by path; where nothing is given for one, with headers if some are named. The text may
    be a function of the request's headers; that of a `slow` path comes once its event is set."""
    servers = []

    def start(
        port: int,
        answers: dict[str, tuple[int, Any]],
        told: tuple[str, ...] = (),
        slow: Mapping[str, threading.Event] = MappingProxyType({}),
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                heard = json.dumps({name: self.headers.get_all(name, []) for name in told}) if told else "an answer"
                status, text = answers.get(self.path, (200, heard))
                text = text if isinstance(text, str) else text(self.headers)
                self.rfile.read(int(self.headers.get("content-length", 0)))
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                if self.path in slow:
                    assert slow[self.path].wait(60)
                self.wfile.write(text.encode())

            do_POST = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}).start()
        servers.append(server)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(path: str, method: str = "GET") -> httpx.Response:
    return httpx.request(method, f"http://127.0.0.1:{PORT}{path}", trust_env=False, timeout=60)


def raw(request: bytes) -> bytes:
    """Everything that comes back for these bytes."""
    with socket.create_connection(("127.0.0.1", PORT), 10) as connection:
        connection.settimeout(60)
        connection.sendall(request)
        answer = b""
        while part := connection.recv(65536):
            answer += part
        return answer


def test_side_doors_are_closed_and_the_rest_is_left(rendered: Path) -> None:
    before = rendered.read_text().split("\n")
    after = haproxy.adapt(rendered.read_text(), Path("/x")).split("\n")
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
    # Two listeners, three error files, two answers in plain text, a short wait, the router's part in every request, a
    # health check, the pools of idle connections; the fallback server in both backends and its pin.
    expected = ["bind"] * 2 + ["errorfile"] * 3 + ["http-check"] + ["http-request"] * 4 + ["http-reuse"] * 2
    expected += ["server"] * 2 + ["use-server"]
    assert sorted(line.split()[0] for line in dropped) == expected
    assert all("fallback" in line for line in dropped if "server" in line.split()[0])
    added = [line.strip().split()[0] for line in after if line not in before]
    errors, requests, close = ["http-error"] * 7, ["http-request"] * 13, ["option"] * 3
    expected = ["backend", "bind", "bind", "http-check", *errors, *requests, "lua-load-per-thread", *close, "server"]
    assert sorted(added) == [*expected, "timeout", "use_backend"]


def test_the_front_door_stays_on_every_interface_when_asked(rendered: Path) -> None:
    config = rendered.read_text().replace(f"bind 127.0.0.1:{PORT}", f"bind *:{PORT}")
    after = haproxy.adapt(config, Path("/x"))
    assert f"bind *:{PORT}" in after
    assert f"server successor 127.0.0.1:{PORT}" in after


def without_servers(config: str) -> str:
    """Render the configuration as Serve does while it knows of no replica."""
    lines = config.split("\n")
    begin = next(n for n, line in enumerate(lines) if line.startswith("backend http-app-via-ingress"))
    end = next(n for n in range(begin + 1, len(lines)) if re.match("[a-z]", lines[n]))
    gone = [*lines[:begin], *lines[end:]]
    wanted = ("    server SERVE_REPLICA", "    use_backend http-app-via-ingress", "    http-request lua.route_via_ing")
    return "\n".join(line for line in gone if not line.startswith(wanted))


def test_servers_are_kept_while_serve_names_none(rendered: Path) -> None:
    whole = haproxy.adapt(rendered.read_text(), Path("/x"))
    empty = haproxy.adapt(without_servers(rendered.read_text()), Path("/x"))
    assert "server SERVE_REPLICA_x " not in empty
    assert haproxy.keep_servers(empty, {}) == (empty, {})
    same, known = haproxy.keep_servers(whole, {})
    assert same == whole
    assert list(known) == ["http-app", "http-app-via-ingress-request-router"]
    kept, still = haproxy.keep_servers(empty, known)
    assert list(still) == ["http-app"]
    assert haproxy.keep_servers(empty, still)[0] == kept, "however often Serve renders it"
    section = kept[kept.index("backend http-app\n") :].split("\nbackend ")[0]
    assert f"server SERVE_REPLICA_x 127.0.0.1:{REPLICA} check " in section
    assert "http-check expect string success\n" in section
    gone = "\n".join(line for line in empty.split("\n") if line != "backend http-app")
    assert haproxy.keep_servers(gone, still)[1] == {}, "an application that is gone is forgotten"


@pytest.mark.long
def test_no_client_notices_that_serve_names_no_replicas_for_a_while(
    rendered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve
) -> None:
    """HAProxy is started again, as for a reload, on a configuration without servers. Those that drain are used no more:
    then the application ends."""
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    binary = haproxy.find_binary()
    assert binary is not None
    command, config = haproxy.install(tmp_path, binary, BODY_TIMEOUT_S), rendered.read_text()
    answers = {"/-/healthz": (200, "success")}
    serve(REPLICA, answers)
    serve(ROUTER, {"/internal/route": (200, json.dumps({"replica_id": "x"}))})

    def until(status: int) -> None:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if ask("/v1/completions", "POST").status_code == status:
                    return
            assert time.monotonic() < deadline
            time.sleep(0.05)

    for servers in (True, False):
        rendered.write_text(config if servers else without_servers(config))
        process = subprocess.Popen([str(command), "-f", str(rendered)])
        try:
            until(200)
            end = time.monotonic() + 1.5  # some checks
            while time.monotonic() < end:
                assert ask("/v1/completions", "POST").status_code == 200
                assert ask("/v1/models").status_code == 200
        finally:
            if servers:
                process.kill()
                process.wait()
        if not servers:
            answers["/-/healthz"] = (503, "DRAINING")
            until(503)
            process.kill()
            process.wait()
            return


def runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until_it_has_ended(pid: int) -> None:
    deadline = time.monotonic() + 60
    while runs(pid):
        assert time.monotonic() < deadline, "HAProxy outlived its parent"
        time.sleep(0.02)


def test_haproxy_ends_with_its_parent(proxy: tuple[subprocess.Popen, int]) -> None:
    parent, pid = proxy
    parent.kill()
    until_it_has_ended(pid)


def test_a_reloaded_haproxy_ends_with_its_last_stream_and_passes_on_what_is_new(
    proxy: tuple[subprocess.Popen, int], serve
) -> None:
    """The reloaded HAProxy is told to by SIGUSR1, from the process that takes its place."""
    parent, pid = proxy
    through = threading.Event()
    serve(ROUTER, {"/internal/route": (200, json.dumps({"replica_id": "x"}))})
    serve(REPLICA, {"/-/healthz": (200, "success")}, slow={"/stream": through})
    deadline = time.monotonic() + 60
    while ask("/v1/models").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    post = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"
    with contextlib.ExitStack() as stack:
        idle, stream = [stack.enter_context(socket.create_connection(("127.0.0.1", PORT), 10)) for _ in range(2)]
        for connection, path in ((idle, b"/v1/models"), (stream, b"/stream")):
            connection.sendall(b"GET %s HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        os.kill(pid, signal.SIGUSR1)
        while True:
            with contextlib.suppress(OSError):  # until it has left the port
                serve(PORT, {"/v1/completions": (200, "the successor's")})
                break
            assert time.monotonic() < deadline
            time.sleep(0.02)
        idle.sendall(post)
        assert b"".join(iter(lambda: idle.recv(65536), b"")).endswith(b"the successor's")
        assert parent.poll() is None
        through.set()
        assert stream.recv(65536).endswith(b"an answer")
        stream.sendall(post)
        assert b"".join(iter(lambda: stream.recv(65536), b"")).endswith(b"the successor's")
    assert parent.wait(60) == 0


@pytest.mark.parametrize("router_timeout_s", [60])
@pytest.mark.parametrize("session", [None, "the client's own"])
def test_the_router_gets_digests_of_api_keys_and_the_replica_what_the_client_sent(
    proxy: tuple[subprocess.Popen, int], serve, session: str | None
) -> None:
    heard: list[str] = []
    names = ("x-session-id", "authorization", "x-api-key")

    def told(headers: Mapping[str, str]) -> str:
        heard.append(headers.get("x-session-id", ""))
        assert not {"authorization", "x-api-key"} & {name.lower() for name in headers}
        return json.dumps({"replica_id": "x"})

    serve(ROUTER, {"/internal/route": (200, told)})
    serve(REPLICA, {"/-/healthz": (200, "success")}, told=names)
    deadline = time.monotonic() + 60
    while ask("/v1/models").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    salts = CacheSalts(["zwei drei", ApiKey(key="sk-one", name="one"), ApiKey(key="sk-ü", name="two")], isolated=True)
    cases: list[tuple[dict[str, str], str]] = [
        ({}, ""),
        ({"authorization": "Bearer sk-one"}, "one"),
        ({"authorization": "bearer  sk-one"}, "one"),
        ({"x-api-key": "sk-ü"}, "two"),
        ({"x-api-key": "sk-ü", "authorization": "Bearer sk-one"}, "one"),
        ({"x-api-key": "unknown", "authorization": "Bearer sk-ü"}, "two"),
        ({"x-api-key": "unknown"}, ""),
        ({"authorization": "Basic c2s="}, ""),
    ]
    for given, name in cases:
        headers = {**given, **({} if session is None else {"x-session-id": session})}
        sent = {key: value.encode() for key, value in headers.items()}
        url = f"http://127.0.0.1:{PORT}/v1/completions"
        answer = httpx.post(url, headers=sent, content=b"{}", trust_env=False, timeout=60).json()
        seen = {key: [one.encode("latin-1").decode() for one in values] for key, values in answer.items()}
        assert seen == {key: [headers[key]] if key in headers else [] for key in names}
        assert salts.name_of(heard.pop()) == name
    assert not heard


def test_a_fault_is_told_as_soon_as_it_is_noted(proxy: tuple[subprocess.Popen, int], serve) -> None:
    """HAProxy runs already: it is reloaded a second or two after a fault, when Serve has noticed."""
    serve(ROUTER, {"/internal/route": (200, json.dumps({"replica_id": "x"}))})
    for cause in ('rank "1" died', "50% of {x}\n<|ü|> \\ $HOME #1"):
        haproxy.note_fault(cause)
        answers = [ask("/health"), ask("/v1/completions", "POST")]  # a POST goes by the router first
        for answer in answers:
            assert answer.status_code == 503
            assert answer.headers["retry-after"]
            assert answer.headers["content-type"] == "application/json"
            error = answer.json()["error"]
            expected = {"type": "server_error", "param": None, "code": "no_replica"}
            assert error == {"message": f"no replica is ready: {cause}", **expected}
    haproxy.note_fault(None)
    assert "starts or ends" in ask("/health").json()["error"]["message"]


@pytest.mark.long
def test_a_replica_that_drains_is_used_while_it_can_be_reached(proxy: tuple[subprocess.Popen, int], serve) -> None:
    """Serve drains a replica in the very moment that it hands its successor to HAProxy, which hears of it later."""
    states = {"/-/healthz": (503, "DRAINING")}
    serve(REPLICA, states)
    serve(ROUTER, {"/internal/route": (200, json.dumps({"replica_id": "x"}))})
    # Long enough for two checks to fail, and for as many to bring it back if it was down before it listened.
    deadline = time.monotonic() + 60
    while ask("/v1/models").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for _ in range(20):
        assert ask("/v1/models").text == ask("/v1/completions", "POST").text == "an answer"
        time.sleep(0.05)
    # One that fails its check is not.
    states["/-/healthz"] = (503, "UNHEALTHY")
    while ask("/v1/models").status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("answer", [None, (503, "{}"), (200, "nonsense"), (200, '{"replica_id": "unheard-of"}')])
def test_without_the_router_replicas_share_the_requests(
    proxy: tuple[subprocess.Popen, int], serve, answer: tuple[int, str] | None
) -> None:
    serve(REPLICA, {"/-/healthz": (200, "success")})
    if answer is not None:
        serve(ROUTER, {"/internal/route": answer})
    deadline = time.monotonic() + 60
    while ask("/v1/models").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with ThreadPoolExecutor(5) as at_once:  # without a router each takes seconds
        answers = list(at_once.map(lambda _: ask("/v1/completions", "POST"), range(5)))
    assert [answer.text for answer in answers] == ["an answer"] * 5


def test_what_haproxy_answers_is_in_the_envelope(proxy: tuple[subprocess.Popen, int]) -> None:
    with socket.create_server(("127.0.0.1", REPLICA)) as replica:

        def nonsense() -> None:
            while True:
                try:
                    connection, _ = replica.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):  # HAProxy has left, perhaps
                    healthy = b"/-/healthz" in connection.recv(65536)
                    success = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsuccess"
                    connection.sendall(success if healthy else b"this is no HTTP\r\n\r\n")

        thread = threading.Thread(target=nonsense)
        thread.start()
        deadline = time.monotonic() + 60
        seen = {}
        while 502 not in seen:
            assert time.monotonic() < deadline
            answer = raw(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            seen[int(answer.split()[1])] = answer
        # A body that never comes: HAProxy waits for it on behalf of the router.
        answer = raw(b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\nConnection: close\r\n\r\n")
        seen[int(answer.split()[1])] = answer
        replica.shutdown(socket.SHUT_RDWR)
        thread.join()
    assert {502, 408} <= set(seen)
    for answer in seen.values():
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"content-type: application/json" in head.lower()
        error = json.loads(body)["error"]
        assert error["message"]
        assert error["code"]
        assert error["type"]


def test_a_request_to_a_replica_that_just_ended_is_answered(proxy: tuple[subprocess.Popen, int]) -> None:
    """Clients that keep their connections are told as well, and find them still open."""
    ended = threading.Event()

    def answer(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while connection.recv(65536) and not ended.is_set():
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nsuccess")

    def accept() -> None:
        while True:
            try:
                connection, _ = replica.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,)).start()

    with contextlib.ExitStack() as open_until_the_end:
        replica = open_until_the_end.enter_context(socket.create_server(("127.0.0.1", REPLICA)))
        threading.Thread(target=accept).start()
        address = f"http://127.0.0.1:{PORT}"
        made = [httpx.Client(base_url=address, trust_env=False, timeout=60) for _ in range(4)]
        clients = [open_until_the_end.enter_context(one) for one in made]
        deadline = time.monotonic() + 60
        while {each.get("/v1/models").status_code for each in clients} != {200}:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        ended.set()
        replica.shutdown(socket.SHUT_RDWR)
        for each in clients:
            assert each.get("/v1/models").json()["error"]["code"] == "no_replica"


def test_a_slow_body_has_longer_than_the_router(rendered: Path) -> None:
    before, after = rendered.read_text(), haproxy.adapt(rendered.read_text(), Path("/x"))
    assert "http-request wait-for-body time 1s if METH_POST" in before
    assert "http-request wait-for-body time 60s if METH_POST" in after


def test_a_request_that_does_not_come_holds_no_connection(proxy: tuple[subprocess.Popen, int]) -> None:
    begun = time.monotonic()
    with ThreadPoolExecutor(2) as at_once:
        answers = list(at_once.map(raw, [b"", b"GET /v1/models HTTP/1.1\r\nHost: x\r\n"]))
    assert BODY_TIMEOUT_S - 0.5 < time.monotonic() - begun < BODY_TIMEOUT_S + 20
    assert [answer.split()[1] for answer in answers] == [b"408"] * 2


@pytest.mark.parametrize("limit", [256, 1024, 4096, 8192, 20_000])
def test_haproxy_starts_within_the_limit_of_open_files(
    rendered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (limit, limit))
    connections = fitting_connections()
    assert connections >= min(4096, limit // 5)
    binary = haproxy.find_binary()
    assert binary is not None
    haproxy.install(tmp_path, binary)
    text, changed = re.subn(r"^(\s*maxconn) \d+$", rf"\1 {connections}", rendered.read_text(), flags=re.M)
    assert changed == 1
    rendered.write_text(haproxy.adapt(text, tmp_path))
    limited = f"import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit})); os.execv"
    code = f"{limited}({binary!r}, [{binary!r}, '-db', '-f', {str(rendered)!r}])"
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        try:
            deadline = time.monotonic() + 60
            while process.poll() is None:
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", PORT), 1).close()
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert process.poll() is None, process.communicate()[1]
        finally:
            process.kill()


def test_a_limit_without_room_for_clients_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 100))
    with pytest.raises(EnvironmentProblem, match=r"ulimit -Hn\) is 100, and HAProxy needs 136"):
        fitting_connections()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
    assert fitting_connections(50_000) == 50_000


def test_every_interface_is_every_interface_with_ipv6_too(rendered: Path) -> None:
    text = rendered.read_text().replace(f"bind 127.0.0.1:{PORT}", f"bind *:{PORT}")
    assert f"    bind [::]:{PORT} v4v6\n" in haproxy.adapt(text, Path("/x"), both=True)
    assert f"    bind *:{PORT}\n" in haproxy.adapt(text, Path("/x"))
    for host, reached in ("::1", "[::1]"), ("localhost", "localhost"), ("*", "127.0.0.1"):
        text = rendered.read_text().replace(f"bind 127.0.0.1:{PORT}", f"bind {host}:{PORT}")
        assert f"    server successor {reached}:{PORT}\n" in haproxy.adapt(text, Path("/x"))


def test_every_error_is_in_the_envelope(tmp_path: Path) -> None:
    haproxy.install(tmp_path, "haproxy")
    for file in tmp_path.glob("*.json"):
        assert set(json.loads(file.read_text())["error"]) == {"message", "type", "param", "code"}


def test_faults_are_noted_beside_the_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", str(tmp_path / "haproxy.cfg"))
    haproxy.note_fault("why")
    haproxy.note_fault("why not")
    assert [file.read_text() for file in tmp_path.iterdir()] == ["why not"]
    haproxy.note_fault(None)
    haproxy.note_fault(None)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    assert haproxy.fault_note("why") is None
    haproxy.note_fault("why")
    assert not list(tmp_path.iterdir())


def test_a_url_that_no_replica_reads_gets_an_envelope(proxy: tuple[subprocess.Popen, int], serve) -> None:
    serve(REPLICA, {"/-/healthz": (200, "success")})
    deadline = time.monotonic() + 60
    while ask("/short").text != "an answer":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    rest = b" HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    assert raw(b"GET /" + b"x" * 60_000 + rest).split()[1] == b"200"
    for method in (b"GET", b"POST"):
        head, _, body = raw(method + b" /" + b"x" * 70_000 + rest).partition(b"\r\n\r\n")
        assert head.split()[1] == b"414"
        assert b"content-type: application/json" in head.lower()
        assert json.loads(body)["error"]["code"] == "url_too_long"


def test_headers_that_serve_cannot_read_are_dropped(proxy: tuple[subprocess.Popen, int], serve) -> None:
    """Such headers were answered 500, in plain text."""
    serve(REPLICA, {"/-/healthz": (200, "success")}, ("x-request-id", "x-request-timeout-seconds"))
    deadline = time.monotonic() + 60
    while ask("/short").status_code != 200:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for name, good, odd in (
        ("x-request-id", b"abc-1/2", (b"\xff", b"\xc3", b"", b"a b", b"x" * 129)),
        ("x-request-timeout-seconds", b"2.5", (b"\xff", b"inf", b"", b"-1", b"1" * 30)),
    ):
        for value in (good, *odd):
            head = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n%s: " % name.encode()
            seen = json.loads(raw(head + value + b"\r\n\r\n").partition(b"\r\n\r\n")[2])
            assert (seen[name] == [good.decode()]) == (value == good), value
            # Without one HAProxy makes one.
            assert len(seen[name]) == (1 if name == "x-request-id" or value == good else 0)
