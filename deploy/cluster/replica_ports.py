"""The interface on which a Serve replica listens: its node's own address, or the loopback one where Ray itself uses
that.

Ray Serve opens the port over which deployments talk to each other on every interface, and the port that HAProxy sends
requests to at the application's `host`, though nobody but an HAProxy should come there. There are no settings for
either.

Written for Ray 2.60.0: both ports are opened by private parts of it. Without them a line is logged, and replicas listen
where Ray Serve lets them.
"""

from __future__ import annotations

from typing import Any, Final

import ray

from deploy.config.application import EVERYWHERE, LOOPBACK
from kernels.private_api import PrivateApi

_PORTS: Final = PrivateApi(
    "ray",
    (
        "ray._common.network_utils.build_address",
        "ray.serve._private.replica.add_port_to_grpc_server(server, address)",
        "ray.serve._private.replica.start_asgi_http_server(app)",
    ),
    "replicas and routers listen on every interface for each other, and for HAProxy at the application's host; let a "
    "firewall keep all ports but the application's to the cluster",
)
ALONE = "127.0.0.1"
"""A Ray of our own is at this address, and every HAProxy with it."""


def listen_at_home() -> None:
    """Make a replica listen at its node's address. The constructor of whatever Serve makes a replica of calls this: the
    replica listens after it."""
    if not _PORTS.there():
        return
    from ray._common.network_utils import build_address
    from ray.serve._private import replica

    home = ray.util.get_node_ip_address()
    add_port, start_http = replica.add_port_to_grpc_server, replica.start_asgi_http_server
    if hasattr(add_port, "home"):
        return

    def add_port_at_home(server: Any, address: str) -> Any:
        return add_port(server, build_address(home, address.rpartition(":")[2]))

    async def start_http_at_home(app: Any, options: Any, **others: Any) -> Any:
        # HAProxies of other nodes come by the node's address, its own by 127.0.0.1: then it is all of them or none.
        host = ALONE if home == ALONE or options.host in LOOPBACK else EVERYWHERE[0]
        return await start_http(app, options.model_copy(update={"host": host}), **others)

    add_port_at_home.home = home  # type: ignore[attr-defined]
    replica.add_port_to_grpc_server, replica.start_asgi_http_server = add_port_at_home, start_http_at_home
