"""The Ray an application runs on: one that exists, or one of its own with everything it needs in its environment.

Written for Ray 2.60.0: `ray.init` is given two addresses by settings that are private (`ray_address` says what happens
without them).
"""

from __future__ import annotations

import math
import os
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Thread

import psutil

from deploy.cluster.environment import SidePorts, node_environment, resolve_ingress
from deploy.cluster.head_node import dashboard_ended, patient, short_start
from deploy.cluster.quiet import quiet_driver
from deploy.cluster.ray_address import alone, logs_folder
from deploy.cluster.ray_address import knock as _knock
from deploy.cluster.sessions import Sessions
from deploy.config.application import ServeConfig
from workers.channel.ports import bound, fits_sockets, free_ports, socket_folder
from workers.environment import visible_gpus

Say = Callable[[str], None]
NODES_ELSEWHERE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Whether Ray's nodes may be on several machines, on whatever operating system."""
HAPROXY_SOCKETS = len(f"/{'node':->56}/metrics.sock") + 10
"""Characters in the path of HAProxy's longest socket after our folder, and ten in reserve."""
MEANWHILE_S = 3.0
"""Seconds that a start which failed waits for what is imported meanwhile, most of which reads the environment."""
RAY_SOCKETS = len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store")
"""Characters that Ray's longest socket path has after the folder for temporary files."""


class CannotJoin(RuntimeError):
    """Error when there is no Ray at the address that was given, or none that lets us in; the message says which and
    why."""


def cluster_to_join(config: ServeConfig) -> str | None:
    """Address of the Ray that is asked for; None for one of our own."""
    address = config.ray_address or os.environ.get("RAY_ADDRESS")
    return None if address in ("", "local") else address  # `local` is Ray's own word for one of our own


class RayConnection:
    """A driver's connection to Ray, until `close`."""

    def __init__(
        self,
        config: ServeConfig,
        say: Say,
        sessions: Sessions | None = None,
        meanwhile: Callable[[], object] = lambda: None,
        more: Mapping[str, str] | None = None,
    ) -> None:
        """Join the Ray that is asked for, or start one in `sessions`, with `more` variables in its environment: `own`
        tells. CannotJoin when there is none to join. `meanwhile` is called in a thread while this process waits for a
        Ray of our own: to import what is needed next. What it raises is dropped, as whoever imports the same later gets
        it, too."""
        self._sessions, self._meanwhile = sessions or Sessions(), meanwhile
        self._beside = Thread(target=self._run_meanwhile, name="meanwhile", daemon=True)
        self._before: dict[str, str | None] = {}
        self._quiet = ExitStack()
        self._tells_of_dashboard = False
        address, before = cluster_to_join(config), _descendants()
        self.own = not address
        self.head_address = "127.0.0.1"
        """Address of the head node, as this process reaches it. The head node always takes requests."""
        try:
            if address:
                self._join(address, say)
            else:
                self._start(config, say, more or {})
            self._quiet.enter_context(quiet_driver())
        except BaseException:
            started = _descendants() - before if self.own else set()
            try:
                self._wait_for_meanwhile(MEANWHILE_S)  # `close` changes the environment
            finally:
                self.close()
                # A Ray that had not come up forgets its processes: some end soon, its agents after a minute.
                for process in started:
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
            raise

    def _join(self, address: str, say: Say) -> None:
        say(f"joining Ray at {address}")
        with _our_signal_handlers():
            import ray

            try:
                ray.init(address=_knock(address), log_to_driver=False)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                raise CannotJoin(
                    f"cannot join Ray at {address}: {error}; give the address of one that runs, has this machine as a "
                    "node (`ray start`) and knows its token (`ray get-auth-token`), or neither --ray-address nor "
                    "RAY_ADDRESS to start one"
                ) from error
        self._sessions.join(ray.get_runtime_context().gcs_address)
        # Ray Serve decides by the environment what it supports, here as there: see it as the cluster's processes do.
        try:
            self._export(ray.get(ray.remote(_serve_environment).options(num_cpus=0).remote()))
        except ray.exceptions.RayTaskError as error:
            raise CannotJoin(
                f"a node of the Ray at {address} cannot run latentserve: {error.cause}; install the same on all nodes"
            ) from error
        (head,) = (node for node in ray.nodes() if node["Alive"] and "node:__internal_head__" in node["Resources"])
        if head["NodeID"] != ray.get_runtime_context().get_node_id():
            self.head_address = head["NodeManagerAddress"]

    def _start(self, config: ServeConfig, say: Say, more: Mapping[str, str]) -> None:
        ingress = resolve_ingress(config)
        stats, exporter, fallback, dashboard, figures = free_ports("127.0.0.1", 5)
        folder = socket_folder(HAPROXY_SOCKETS)
        self._sessions.keep(folder)
        usual = os.environ.get("TMPDIR") or "/tmp"
        rays = os.environ.get("RAY_TMPDIR") or (usual if fits_sockets(usual, RAY_SOCKETS) else "/tmp")
        # What Ray's processes leave, should they be killed, goes with the folder. Ray's own files stay: its logs.
        self._export({"TMPDIR": str(folder), "RAY_TMPDIR": rays})
        self._export({**node_environment(config, ingress, folder, SidePorts(stats, exporter, fallback)), **more})
        if config.ray_auth == "token" and not os.access(Path.home(), os.W_OK):
            # Ray keeps its token under the home directory, where `ray` and `serve` find it; here they cannot.
            self._export({"RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN") or secrets.token_hex(16)})
        processes = config.most_replicas * (2 + config.engine.mesh().world.size)
        say(f"starting Ray ({ingress} ingress)")
        with _our_signal_handlers():
            import ray

            self._export({NODES_ELSEWHERE: "0"})  # for Ray's processes; this one has imported it
            with (
                self._sessions.of_their_own(),
                alone(token=config.ray_auth == "token"),
                short_start(f"127.0.0.1:{dashboard}", self._beside.start),
            ):
                patient(ray.init, self._sessions.forget, say)(
                    address="local",
                    num_cpus=max(os.cpu_count() or 1, math.ceil(processes * config.cpus_per_process)),
                    num_gpus=visible_gpus(),  # Ray would count the names in CUDA_VISIBLE_DEVICES, such as -1
                    object_store_memory=config.object_store_bytes,
                    include_dashboard=config.dashboard,
                    dashboard_host="127.0.0.1",
                    dashboard_port=dashboard,
                    _metrics_export_port=figures,
                    _node_ip_address="127.0.0.1",
                    log_to_driver=False,
                    configure_logging=False,
                )
        self._wait_for_meanwhile()  # two threads that import parts of one package may find them half imported
        self._tells_of_dashboard = config.dashboard
        if config.dashboard:
            say(f"Ray dashboard at http://127.0.0.1:{dashboard} (`ray get-auth-token` prints its token)")
        say(f"figures for Prometheus at http://127.0.0.1:{figures}/metrics")
        say(f"logs in {logs_folder()}")

    def _run_meanwhile(self) -> None:
        with suppress(Exception):
            self._meanwhile()

    def _wait_for_meanwhile(self, timeout_s: float | None = None) -> None:
        if self._beside.ident is not None:
            self._beside.join(timeout_s)

    def news(self) -> list[str]:
        """Return what has become known since the last call of the Ray that was started."""
        if not self._tells_of_dashboard or not dashboard_ended():
            return []
        self._tells_of_dashboard = False
        return [f"Ray's dashboard has ended, and all else goes on: dashboard.log in {logs_folder()} says why"]

    def _export(self, variables: dict[str, str]) -> None:
        self._before |= {name: os.environ.get(name) for name in variables if name not in self._before}
        os.environ.update(variables)

    def close(self) -> None:
        """Leave; end a Ray of our own with every process and file of it."""
        # Where a signal came while it was imported, there is none yet, nor can it be imported once more.
        ray = sys.modules.get("ray")
        if ray is not None and hasattr(ray, "shutdown"):
            self._sessions.closing()
            ray.shutdown()
        self._quiet.close()
        self._sessions.end()
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _descendants() -> set[psutil.Process]:
    """Processes that this one started, and that those did."""
    return set(psutil.Process().children(recursive=True))


def _serve_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith("RAY_SERVE_")}


@contextmanager
def _our_signal_handlers() -> Iterator[None]:
    """Ray installs handlers of its own when a driver connects: put ours back."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as exit:
        if exit.code == signal.SIGTERM:  # by Ray's handler
            raise KeyboardInterrupt from None
        raise
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in kept.items():
                signal.signal(number, handler)


def port_problem(host: str, port: int) -> str:
    """Return why a server cannot listen at `host` and `port`; empty if it can."""
    try:
        bound(host, port, reuse=True).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""
