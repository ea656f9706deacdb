"""The environment variables that Ray's processes need before they start: Ray Serve reads these settings nowhere else.

`latentserve serve` sets them for the cluster that it starts. For nodes started by `ray start`, `python -m
deploy.cluster.environment` prints them as shell exports; `cluster.yaml` evaluates that on every node.

Many are private to Ray 2.60.0, which ignores those that it does not know. HAProxy is chosen only where Serve's template
of its configuration is the one that `deploy.cluster.haproxy` knows; where not, a line is logged.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from deploy.cluster.haproxy import find_binary, install, unknown_template
from deploy.config.application import Ingress, ServeConfig
from deploy.mistakes import explain
from kernels.private_api import PrivateApi
from workers.environment import EnvironmentProblem

PROCESS_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",  # two threads per rank on a busy machine are slower than one
    # One GPU per rank is reserved, all of them stay visible: symmetric memory opens its neighbours' memory.
    "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
}
"""Environment variables that a rank's process needs. Where its node lacks them, the process asks for them and starts
later."""

logger = logging.getLogger("latentserve.cluster")

_TEMPLATE: Final = PrivateApi(
    "ray", (), "Ray Serve's own proxy stands in front in place of HAProxy, which passes on many times its tokens"
)

RELOADED_S = 24 * 3600
"""Seconds for which a HAProxy that was reloaded may go on with the streams it has. It is reloaded whenever a replica
comes or goes, but most of its streams are those of replicas that stay, which nothing limits; those of a replica that
ends are limited by `drain.timeout_s`. It ends with its last stream."""

DASHBOARD_FILE = Path(__file__).resolve().parents[1] / "observability" / "grafana_dashboard.json"


MOST_CONNECTIONS: Final = 4096
"""Connections that HAProxy takes at a time, as Ray Serve has it."""
FEWEST_CONNECTIONS: Final = 16
OWN_FILES: Final = 96
"""Files that HAProxy has open beside two for each connection: what it listens at, its threads', health checks."""


@dataclass(frozen=True)
class SidePorts:
    """Ports beside the one that clients use. Ray Serve's defaults."""

    stats: int = 8404
    """HAProxy's statistics page, on 127.0.0.1."""
    exporter: int = 9101
    """HAProxy's Prometheus exporter, on 127.0.0.1."""
    fallback: int = 8500
    """Serve's own proxy, where HAProxy sends what has no replica yet."""


def resolve_ingress(config: ServeConfig) -> Ingress:
    """The ingress for a cluster that we start ourselves; EnvironmentProblem when `direct` cannot be had."""
    if config.ingress == "proxy":
        return "proxy"
    if find_binary() is None:
        if config.ingress == "direct":
            raise EnvironmentProblem(
                "ingress = direct, but no HAProxy binary is found: install ray[serve] or haproxy, or use proxy"
            )
        return "proxy"
    if unknown := unknown_template():
        if config.ingress == "direct":
            raise EnvironmentProblem(f"ingress = direct, but {_TEMPLATE.problem(unknown)}, or use proxy")
        _TEMPLATE.lost(unknown)
        return "proxy"
    return "direct"


def fitting_connections(most: int = MOST_CONNECTIONS) -> int:
    """`most`, or as many connections as the hard limit of open files has room for: HAProxy does not start with more.
    Each takes two files, and every fourth a pipe of two more. EnvironmentProblem where there is room for hardly any."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return most
    room = (hard - OWN_FILES) * 2 // 5
    if room < FEWEST_CONNECTIONS:
        least = OWN_FILES + 5 * FEWEST_CONNECTIONS // 2
        raise EnvironmentProblem(
            f"the limit of open files (ulimit -Hn) is {hard}, and HAProxy needs {least} "
            "for a few clients: raise it, or set ingress to proxy"
        )
    if room < most:
        logger.warning(
            "the limit of open files (ulimit -Hn) is %d: HAProxy takes %d connections at a time, not %d",
            hard,
            room,
            most,
        )
    return min(room, most)


def node_environment(config: ServeConfig, ingress: Ingress, folder: Path, ports: SidePorts) -> dict[str, str]:
    """Variables for every Ray process of one node. Files they name are written into `folder`, which must stay."""
    folder.mkdir(parents=True, exist_ok=True)
    dashboards = folder / "dashboards"
    dashboards.mkdir(exist_ok=True)
    if DASHBOARD_FILE.exists():
        shutil.copy(DASHBOARD_FILE, dashboards / "latentserve.json")
    variables = {
        "RAY_AUTH_MODE": config.ray_auth,
        "RAY_USAGE_STATS_ENABLED": "0",
        **PROCESS_ENVIRONMENT,
        # Ray gives a node up that is not there after 30 s: on a slow machine its agents import for as long.
        "RAY_raylet_start_wait_time_s": "60",
        "TOKENIZERS_PARALLELISM": "false",
        # A rank that fails takes the rendezvous along; of those that wait there torch would tell frame by frame.
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        "RAY_metrics_report_interval_ms": str(round(config.metrics_period_s * 1000)),
        "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR": str(dashboards),
        # The front's code and Serve's share one event loop: a token crosses no thread.
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # The third failure in a row replaces a HAProxy that ended: with Serve's 10 s nobody listens for half a minute.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "2",
        # Serve ends a proxy that is not up after 5 s and starts another: on a slow machine, where replicas start beside
        # it, it ends each of them.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "240",
        "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(max(config.drain.deregister_s, 0.1)),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(config.drain.deregister_s),
        "RAY_SERVE_ENABLE_HA_PROXY": "1" if ingress == "direct" else "0",
    }
    if ingress == "direct":
        binary = find_binary()
        assert binary is not None, "resolve_ingress finds one first"
        variables |= {
            "RAY_SERVE_HAPROXY_BINARY_PATH": str(install(folder, binary, both=config.host == "::")),
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
            "RAY_SERVE_HAPROXY_MAXCONN": str(
                fitting_connections(int(os.environ.get("RAY_SERVE_HAPROXY_MAXCONN", MOST_CONNECTIONS)))
            ),
            "RAY_SERVE_HAPROXY_NBTHREAD": str(min(4, os.cpu_count() or 1)),
            # A request whose replica died before it answered anything goes to another one, once.
            "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
            "RAY_SERVE_HAPROXY_RETRIES": "1",
            "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.stats),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.exporter),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback),
            "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(max(RELOADED_S, round(config.drain.timeout_s))),
            # Serve would not give a replica's port to another for as long; but an old process sends nobody new there.
            "RAY_SERVE_PORT_QUARANTINE_S": str(config.drain.timeout_s + 30),
            "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": str(max(3600, round(config.drain.timeout_s))),
            # The router looks at the prompt.
            "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
            "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": str(config.routing.affinity_bytes),
        }
    return variables


def main() -> None:
    """Print the variables of one node of a cluster as shell exports."""
    parser = argparse.ArgumentParser(prog="python -m deploy.cluster.environment", description=main.__doc__)
    parser.add_argument("--config", type=Path, help="the application's settings; only host-wide ones matter here")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/latentserve"), help="for HAProxy's files; kept short")
    arguments = parser.parse_args()
    if arguments.config is not None:
        try:
            config = ServeConfig.load(arguments.config)
        except ValidationError as error:
            parser.error(explain(error, settings=ServeConfig, source=str(arguments.config)))
    else:
        config = ServeConfig.model_validate({"engine": {"model": "demo"}})
    for name, value in node_environment(config, resolve_ingress(config), arguments.folder, SidePorts()).items():
        print(f"export {name}={shlex.quote(value)}")


if __name__ == "__main__":
    main()
