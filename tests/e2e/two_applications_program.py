"""The program of test_two_applications: a cluster of one node, and a file for `serve deploy` with three applications,
of which two find room."""

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from deploy.cluster.environment import SidePorts, node_environment
from deploy.config.application import ServeConfig
from deploy.serve.app import POLL_S, tell
from workers.channel.ports import free_port, free_ports

NAMES = ("first", "second", "third")
CPUS = 6
"""Two replicas of one rank take so many."""


def main() -> None:
    """Deploy, tell what Serve says of those that do not run, and serve until the end is asked for."""
    config = ServeConfig.load(sys.argv[1])
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="two-") as folder:
        os.environ.update(node_environment(config, "direct", Path(folder), SidePorts(*free_ports("127.0.0.1", 3))))
        os.environ["RAY_AUTH_TOKEN"] = "for-this-test"
        import ray
        from ray.cluster_utils import Cluster

        figures = free_port()
        node = {"num_cpus": CPUS, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        node["metrics_export_port"] = figures
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            ray.init(cluster.address, log_to_driver=False)
            from ray import serve
            from ray.serve.context import _get_global_client
            from ray.serve.schema import ServeDeploySchema

            for number in (signal.SIGINT, signal.SIGTERM):  # now, as Ray installs its own
                signal.signal(number, lambda number, frame: ended.set())
            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            arguments = config.model_dump(mode="json", exclude_defaults=True)
            common = {"import_path": "deploy.serve.app:build"}
            applications = [
                {**common, "name": name, "route_prefix": f"/{name}", "args": {**arguments, "name": name}}
                for name in NAMES
            ]
            _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))
            told = False
            while not ended.wait(POLL_S):
                now = serve.status().applications
                waiting = [
                    f"{name} waits: {deployment.message}"
                    for name, application in now.items()
                    for deployment in application.deployments.values()
                    if application.status != "RUNNING" and "scheduled" in deployment.message
                ]
                running = [name for name, application in now.items() if application.status == "RUNNING"]
                if not told and len(running) == 2 and waiting:
                    told = True
                    tell(f"running: {' '.join(sorted(running))}")
                    tell(waiting[0])
                    tell(f"figures at http://127.0.0.1:{figures}/metrics")
                    tell(f"serving two at http://127.0.0.1:{port}/v1")
            serve.shutdown()
            ray.shutdown()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
