"""The program of test_ended_ray: `latentserve serve` on a cluster that is killed once the command drains."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from deploy.cluster.environment import SidePorts, node_environment
from deploy.config.application import ServeConfig
from deploy.serve.app import tell
from workers.channel.ports import free_port, free_ports

SERVE = "from deploy.cli import main; main()"


def main() -> None:
    """Relay what the command says. At the first signal have it drain; when it does, kill the cluster, and at the next
    signal of ours have it hear a second one. Its exit code comes last."""
    given = json.loads(Path(sys.argv[1]).read_text())
    config = ServeConfig.model_validate({**given, "port": free_port()})
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        os.environ.update(node_environment(config, "direct", Path(folder), SidePorts(*free_ports("127.0.0.1", 3))))
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 8, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        settings = Path(folder) / "serve.yaml"
        settings.write_text(json.dumps({**given, "port": config.port, "ray_address": cluster.address}))
        command = [sys.executable, "-c", SERVE, "serve", "--config", str(settings)]
        joined = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        signal.signal(signal.SIGTERM, lambda number, frame: joined.send_signal(number))

        def relay() -> None:
            assert joined.stdout is not None
            for line in joined.stdout:
                tell(line.rstrip())
                if line.startswith("draining"):
                    for kind in cluster.head_node.all_processes.values():
                        for info in kind:
                            info.process.kill()
                    tell("(Ray is killed)")

        reader = threading.Thread(target=relay)
        reader.start()
        try:
            joined.wait(600)
            reader.join(60)
            tell(f"exit code {joined.returncode}")
        finally:
            joined.kill()
            cluster.shutdown()


if __name__ == "__main__":
    main()
