"""A Ray that has changed: less works, and a line says so, or an error says what to install."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import ray._private.worker
import ray.serve.context
from ray import serve
from ray._private import ray_constants, services
from ray._private.node import Node
from ray.experimental import internal_kv
from ray.serve._private import api as serve_api
from ray.serve._private import common, constants, haproxy_templates
from ray.serve._private import replica as serve_replica
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.request_router import replica_wrapper
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from deploy.cluster import environment, head_node, quiet, ray_address, replica_ports, sessions
from deploy.cluster.environment import resolve_ingress
from deploy.cluster.sessions import Sessions
from deploy.config.application import ServeConfig
from deploy.serve import app, application, capacity, entrance, progress, under_serve
from tests.support.private_apis import untouched
from workers.environment import EnvironmentProblem


def config(**settings: Any) -> ServeConfig:
    engine = {"model": "demo", "device": "cpu"}
    return ServeConfig.model_validate({"engine": engine, **settings})


@pytest.fixture
def lines():
    """Collect the lines that are logged by modules that have not looked at Ray yet."""
    modules = (environment, head_node, quiet, ray_address, replica_ports, sessions)
    with untouched(*modules, application, entrance, progress, capacity, under_serve) as told:
        yield told


def test_without_the_function_that_shows_them_all_of_rays_lines_are_shown(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ray._private.worker, "print_to_stdstream")
    level = logging.getLogger("ray.serve").level
    with quiet.quiet_driver():
        assert logging.getLogger("ray.serve").level >= logging.WARNING
    assert logging.getLogger("ray.serve").level == level
    assert len(lines) == 1


def test_with_it_only_harmless_lines_are_dropped(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []

    def show(data: dict[str, Any], ignore_prefix: bool) -> None:
        shown.append(data["lines"])

    monkeypatch.setattr(ray._private.worker, "print_to_stdstream", show)
    with quiet.quiet_driver():
        for line in ("A worker died or was killed while executing a task", "no room"):
            ray._private.worker.print_to_stdstream({"lines": [line]}, False)
    assert shown == [["no room"]]
    assert ray._private.worker.print_to_stdstream is show
    assert lines == []


def test_without_the_function_that_starts_them_daemons_stay_in_our_group(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delattr(services, "ConsolePopen")
    ours = Sessions()
    with ours.of_their_own():
        pass
    assert not ours.begun
    ours.end()
    [line] = lines
    assert "ConsolePopen" in line
    assert "process group" in line


def test_daemons_that_are_started_another_way_are_noticed(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(services, "ConsolePopen", subprocess.Popen)
    folder = tmp_path / "folder"
    folder.mkdir()
    ours = Sessions()
    ours.keep(folder)
    try:
        with pytest.raises(KeyboardInterrupt), ours.of_their_own():
            raise KeyboardInterrupt
        assert lines == []
        with ours.of_their_own():
            pass
    finally:
        ours.end()
    [line] = lines
    assert "process group" in line


def test_ray_is_kept_to_this_machine(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    before = ray_constants.ENABLE_RAY_CLUSTER
    with ray_address.alone(token=False):
        assert ray_constants.ENABLE_RAY_CLUSTER is False
    assert before == ray_constants.ENABLE_RAY_CLUSTER
    assert lines == []


def test_without_the_switch_that_keeps_ray_to_this_machine_it_needs_its_token(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(ray_constants, "ENABLE_RAY_CLUSTER")
    with ray_address.alone(token=True):
        pass
    assert not hasattr(ray_constants, "ENABLE_RAY_CLUSTER")
    [line] = lines
    assert "nothing but its token keeps them out" in line
    refused = pytest.raises(EnvironmentProblem, match=r"ENABLE_RAY_CLUSTER.*pip install 'ray==2\.60\.0'")
    with refused, ray_address.alone(token=False):
        raise AssertionError("Ray was started")


def test_settings_that_ray_does_not_know_are_an_error_that_says_what_to_install(lines: list[str]) -> None:
    refused = pytest.raises(EnvironmentProblem, match=r"has no _gone in ray\.init.*pip install 'ray==2\.60\.0'")
    with refused, ray_address.alone(token=True):
        ray.init(address="local", _gone=1, log_to_driver=False)
    assert not ray.is_initialized()
    with pytest.raises(RuntimeError, match=r"^something else$"), ray_address.alone(token=True):
        raise RuntimeError("something else")


def test_without_rays_reading_of_an_address_nobody_knocks(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(services, "canonicalize_bootstrap_address_or_die")
    assert ray_address.knock("auto") == "auto"
    assert ray_address.knock("127.0.0.1:1") == "127.0.0.1:1"
    assert len(lines) == 1


def test_without_their_folder_the_logs_are_those_of_the_latest_session(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(get_logs_dir_path=lambda: "/x/logs"))
    assert ray_address.logs_folder() == "/x/logs"
    assert lines == []


def test_without_the_folder_of_the_logs_the_latest_sessions_is_named(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace())
    monkeypatch.setenv("RAY_TMPDIR", "/elsewhere")
    assert ray_address.logs_folder() == ray_address.logs_folder() == "/elsewhere/ray/session_latest/logs"
    assert len(lines) == 1


@pytest.mark.parametrize("name", ["add_port_to_grpc_server", "start_asgi_http_server"])
def test_without_a_way_to_choose_where_replicas_listen_where_serve_lets_them(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    other = ({"add_port_to_grpc_server", "start_asgi_http_server"} - {name}).pop()
    kept = getattr(serve_replica, other)
    monkeypatch.delattr(serve_replica, name)
    replica_ports.listen_at_home()
    replica_ports.listen_at_home()
    assert getattr(serve_replica, other) is kept
    [line] = lines
    assert name in line
    assert "firewall" in line


async def test_replicas_listen_at_home(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def add_port(server: Any, address: str) -> None:
        asked.append(address)

    async def start_http(app: Any, options: Any, **others: Any) -> None:
        asked.append(options)

    monkeypatch.setattr(serve_replica, "add_port_to_grpc_server", add_port)
    monkeypatch.setattr(serve_replica, "start_asgi_http_server", start_http)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    for _ in range(2):
        replica_ports.listen_at_home()
    options = SimpleNamespace(host="0.0.0.0", model_copy=lambda update: update)
    serve_replica.add_port_to_grpc_server(None, "[::]:0")
    await serve_replica.start_asgi_http_server(None, options, event_loop=None)
    assert asked == ["127.0.0.1:0", {"host": "127.0.0.1"}]
    assert lines == []


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Puts another line in the place of one in the template that Ray Serve has for HAProxy's configuration."""
    text = Path(haproxy_templates.__file__).read_text()
    file = tmp_path / "ray" / "serve" / "_private" / "haproxy_templates.py"
    file.parent.mkdir(parents=True)
    found = importlib.util.find_spec

    def find_spec(name: str) -> Any:
        return SimpleNamespace(origin=str(tmp_path / "ray" / "__init__.py")) if name == "ray" else found(name)

    def change(before: str, after: str) -> None:
        assert before in text
        file.write_text(text.replace(before, after))

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    return change


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("    bind :{{ config.metrics_port }}", "    bind [::]:{{ config.metrics_port }}"),
        ("  bind *:{{ config.stats_port }}", "  bind *:{{ config.stats_port }} v4v6"),
        ("frontend prometheus", "frontend exporter"),
        ("listen stats", "frontend statistics"),
        ("frontend http_frontend", "frontend http"),
        ('"""global\n', '"""# Written by Ray Serve\nglobal   # all\n'),
        ("errorfile 50", "http-error status 50"),
        ("Ingress request router failed", "No router"),
        ("http-request return status 404", "http-request deny status 404"),
        ("http-reuse always", "http-reuse safe"),
        ("http-check expect status 200", "http-check expect rstatus 2.."),
        ("timeout http-keep-alive", "timeout tunnel"),
        ("wait-for-body time", "wait-for-body at-least 1 time"),
    ],
)
def test_haproxy_is_not_chosen_where_its_configuration_is_another(
    lines: list[str], template: Callable[[str, str], None], before: str, after: str
) -> None:
    template(before, before)
    assert resolve_ingress(config()) == "direct"
    assert lines == []
    template(before, after)
    assert resolve_ingress(config()) == resolve_ingress(config()) == "proxy"
    [line] = lines
    assert "HAProxy's configuration: Ray Serve's own proxy stands in front" in line
    with pytest.raises(EnvironmentProblem, match=r"ingress = direct, but ray .* has no .*'ray==2\.60\.0'.*use proxy"):
        resolve_ingress(config(ingress="direct"))


def test_haproxy_is_not_chosen_where_its_configuration_is_nowhere(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert resolve_ingress(config()) == "proxy"
    [line] = lines
    assert "has no template of HAProxy's configuration" in line


@pytest.mark.parametrize("variable", ["0", "1"])
def test_without_serves_switch_the_environment_says_whether_haproxy_stands_in_front(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.delattr(constants, "RAY_SERVE_ENABLE_HA_PROXY")
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", variable)
    assert application.running_ingress(config()) == ("direct" if variable == "1" else "proxy")
    with pytest.raises(EnvironmentProblem, match="evaluate" if variable == "0" else "use auto or direct"):
        application.running_ingress(config(ingress="direct" if variable == "0" else "proxy"))
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("holder", "name"),
    [
        (None, ""),
        (serve.Application, "_with_ingress_request_router"),
        (DeploymentHandle.__base__, "_init"),
        (DeploymentHandle, "choose_replica"),
        (replica_wrapper, "ReplicaSelection"),
    ],
)
def test_without_the_router_haproxy_shares_requests_itself(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, holder: Any, name: str
) -> None:
    monkeypatch.setattr(constants, "RAY_SERVE_ENABLE_HA_PROXY", True)
    if holder is not None:
        monkeypatch.delattr(holder, name)
    made = application.build_application(config())
    assert (made._ingress_request_router is None) == (holder is not None)
    policy = made._bound_deployment._deployment_config.request_router_config
    # Serve refuses a policy of ours that HAProxy, without a router, would never ask.
    assert (policy.request_router_class == RequestRouterConfig().request_router_class) == (holder is not None)
    if holder is None:
        assert lines == []
    else:
        [line] = lines
        assert name in line
        assert "without a look at their load" in line


def test_without_a_connection_streams_go_unguarded(lines: list[str]) -> None:
    behind_serves_proxy = SimpleNamespace(_receive_asgi_messages=None)
    tls = SimpleNamespace(get_extra_info=lambda name: object())

    class Cycle:
        transport: Any = tls

        async def receive(self) -> None:
            pass

    for receive in (behind_serves_proxy, SimpleNamespace(_receive=Cycle().receive)):
        assert under_serve.connection_of(receive) is None
    assert lines == []
    Cycle.transport = None
    for receive in (object(), SimpleNamespace(_receive=len), SimpleNamespace(_receive=Cycle().receive)):
        assert under_serve.connection_of(receive) is None
    assert len(lines) == 1


def test_serves_own_receive_channels_are_those_that_are_told_apart() -> None:
    from ray.serve._private.direct_ingress_http_util import ASGIDIReceiveProxy
    from ray.serve._private.http_util import ASGIReceiveProxy

    by_haproxy = ASGIDIReceiveProxy({"type": "http"}, "receive", None)
    assert by_haproxy._receive == "receive"
    assert not hasattr(by_haproxy, "_receive_asgi_messages")
    by_serves_proxy = ASGIReceiveProxy({"type": "http"}, None, None)
    assert hasattr(by_serves_proxy, "_receive_asgi_messages")


@pytest.mark.parametrize("name", ["_create_controller_and_proxy_refs", "_coerce_controller_options", ""])
def test_serve_is_waited_for_where_it_cannot_start_in_the_background(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """On a cluster that somebody else started it is, too: there Serve may end proxies that are slow beside replicas."""
    began: list[Any] = []
    monkeypatch.setattr(serve, "start", lambda **options: began.append(options))
    if name:
        monkeypatch.delattr(serve_api, name)
    assert not entrance.begin("EveryNode", "0.0.0.0", 80, beside=bool(name)).starting
    assert began == [{"proxy_location": "EveryNode", "http_options": {"host": "0.0.0.0", "port": 80}}]
    kept = ServeControllerClient.wait_for_proxies_serving
    with entrance.handing_over():
        assert (ServeControllerClient.wait_for_proxies_serving is kept) == bool(name)
    assert [name in line and "not beside it" in line for line in lines] == ([True] if name else [])


@pytest.mark.parametrize("name", ["start_api_server", "start_log_monitor"])
def test_a_head_node_that_cannot_be_told_starts_as_ever(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(Node, name)
    before = dict(vars(Node))
    with head_node.short_start("127.0.0.1:1", lambda: pytest.fail("called")):
        assert dict(vars(Node)) == before
    assert not head_node.dashboard_ended()
    [line] = lines
    assert name in line
    assert "waits some seconds for Ray's dashboard" in line


@pytest.mark.parametrize("dashboard", [False, True])
def test_what_ray_imports_for_a_node_is_imported_before_another_thread_imports(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, dashboard: bool
) -> None:
    did: list[str] = []
    monkeypatch.setattr(Node, "start_api_server", lambda node, *, include_dashboard, raise_on_failure: None)
    monkeypatch.setattr(ray._private.utils, "get_dashboard_dependency_error", lambda: did.append("imported"))
    with head_node.short_start("127.0.0.1:1", lambda: did.append("then")):
        Node.start_api_server(SimpleNamespace(all_processes={}), include_dashboard=dashboard, raise_on_failure=True)
    assert did == ["imported", "then"]
    assert lines == []


def test_without_serves_client_an_entrance_elsewhere_is_not_noticed(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    http = SimpleNamespace(host="127.0.0.1", port=1)
    monkeypatch.setattr(
        ray.serve.context,
        "_get_global_client",
        lambda raise_if_no_controller_running: SimpleNamespace(http_config=http),
    )
    with pytest.raises(app.StartFailed, match=r"listens on 127\.0\.0\.1:1"):
        app._check_entrance(config(), lambda line: None)
    assert lines == []


@pytest.mark.parametrize("renamed", [False, True])
def test_without_a_known_client_nothing_is_refused(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, renamed: bool
) -> None:
    if renamed:
        monkeypatch.setattr(ray.serve.context, "_get_global_client", lambda must_exist: None)
    else:
        monkeypatch.delattr(ray.serve.context, "_get_global_client")
    for _ in range(2):
        app._check_entrance(config(), lambda line: None)
    [line] = lines
    assert "is not noticed" in line


@pytest.mark.parametrize("waits", [False, True])
def test_an_application_is_deleted_whether_serve_can_go_on_meanwhile_or_not(
    lines: list[str], monkeypatch: pytest.MonkeyPatch, waits: bool
) -> None:
    deleted: list[Any] = []
    ways = (lambda name, _blocking=True: deleted.append((name, _blocking)), lambda name: deleted.append((name, True)))
    monkeypatch.setattr(serve, "delete", ways[waits])
    entrance.delete("a")
    assert deleted == [("a", waits)]
    assert len(lines) == waits


@pytest.mark.parametrize("verb", ["put", "get", "list", "del"])
def test_without_rays_store_nothing_is_reported(lines: list[str], monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    monkeypatch.delattr(internal_kv, f"_internal_kv_{verb}")
    status_store = progress.StatusStore("a", "r")
    status_store.say("starting")
    status_store.fail("why", lasting=True)
    reader = progress.ProgressReader("a")
    assert (reader.new_lines(), reader.failures(), reader.lasting_failure()) == ([], [], "")
    progress.clear("a")
    [line] = lines
    assert f"_internal_kv_{verb}" in line


def test_with_rays_store_reports_come_through(lines: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    kept: dict[bytes, bytes] = {}

    def delete(key: bytes, del_by_prefix: bool = False, *, namespace: bytes) -> None:
        for other in [other for other in kept if other == key or (del_by_prefix and other.startswith(key))]:
            del kept[other]

    ways: dict[str, Callable[..., Any]] = {
        "put": lambda key, value, overwrite, *, namespace: kept.update({key: value}),
        "get": lambda key, *, namespace: kept.get(key),
        "list": lambda prefix, *, namespace: [key for key in kept if key.startswith(prefix)],
        "del": delete,
    }
    for verb, way in ways.items():
        monkeypatch.setattr(internal_kv, f"_internal_kv_{verb}", way)
    progress.StatusStore("a", "r").say("starting")
    deadline = time.monotonic() + 20
    while not kept:  # it is written in a thread
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert progress.ProgressReader("a").new_lines() == ["starting"]
    progress.clear("a")
    assert not kept
    assert lines == []


def test_without_serves_prefix_that_of_the_known_version_is_looked_for(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    known = common.REPLICA_ID_FULL_ID_STR_PREFIX
    monkeypatch.delattr(common, "REPLICA_ID_FULL_ID_STR_PREFIX")
    assert capacity._replica_prefix() == known
    assert len(lines) == 1
