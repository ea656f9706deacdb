"""The program of test_two_nodes: a Ray of two nodes with pretended GPUs, and the application on it."""

import os
import sys
import tempfile
from pathlib import Path

from deploy.cluster.environment import SidePorts, node_environment
from deploy.config.application import ServeConfig
from deploy.serve.app import start
from workers.channel.ports import free_ports


def main() -> None:
    """Nodes are processes of this machine; each believes in one GPU."""
    config = ServeConfig.load(sys.argv[1])
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        ports = SidePorts(*free_ports("127.0.0.1", 3))
        os.environ.update(node_environment(config, "direct", Path(folder), ports))
        os.environ["RAY_AUTH_TOKEN"] = "for-this-test"
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 100 * 2**20}
        # An address of its own for the second, or both would count as one host.
        head = {**node, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        cluster.add_node(**node, node_ip_address="127.0.0.2")
        cluster.wait_for_nodes()
        # Whoever joins a cluster has none of its environment but the token.
        for name in [name for name in os.environ if name.startswith("RAY_SERVE_")]:
            del os.environ[name]
        try:
            start(config.model_copy(update={"ray_address": cluster.address}))
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
