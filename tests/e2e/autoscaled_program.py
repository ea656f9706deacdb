"""The program of test_autoscaled_nodes: a Ray that starts a node for each replica, and the application on it."""

import os
import sys
import tempfile
from pathlib import Path

from deploy.cluster.environment import SidePorts, node_environment
from deploy.config.application import ServeConfig
from deploy.serve.app import start
from deploy.serve.app import tell as say
from workers.channel.ports import free_ports

IDLE_S = 2.0
"""Seconds without work after which a node goes: far less than a stream takes, so a node that went too soon would cut
one."""


def main() -> None:
    """The head has no cores for replicas; a node has those of one replica with one rank."""
    config = ServeConfig.load(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="scaled-") as folder:
        ports = SidePorts(*free_ports("127.0.0.1", 3))
        os.environ.update(node_environment(config, "direct", Path(folder) / "front", ports))
        from autoscaled_nodes import OBJECT_STORE_BYTES, ClusterOfNodesOnDemand

        resources = {"CPU": 3, "object_store_memory": OBJECT_STORE_BYTES}
        node = {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": 2}
        cluster = ClusterOfNodesOnDemand(Path(folder), {"CPU": 0}, {"node": node}, idle_timeout_minutes=IDLE_S / 60)
        try:
            cluster.start()
            say(f"logs in {folder}/session_latest/logs")
            # Whoever joins a cluster has none of its environment but the token.
            for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
                del os.environ[name]
            start(config.model_copy(update={"ray_address": cluster.address}))
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
