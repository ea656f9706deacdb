"""The program of test_busy_cluster: a cluster of one node whose only (pretended) GPU somebody else has at first."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from deploy.cluster.environment import SidePorts, node_environment
from deploy.config.application import ServeConfig
from deploy.serve.app import launch, tell
from workers.channel.ports import free_port, free_ports

SERVE = "from deploy.cli import main; main()"


class Other:
    """Somebody else's application."""


def command(*flags: str) -> None:
    """`latentserve serve` that must not come up; its last line."""
    done = subprocess.run([sys.executable, "-c", SERVE, "serve", *flags], capture_output=True, text=True, timeout=60)
    tell(f"exit code {done.returncode}: {done.stderr.splitlines()[-1]}")


def main() -> None:
    """Free the GPU once somebody says that it is waited for. Before and after, try what cannot work on this cluster."""
    config = ServeConfig.load(sys.argv[1])
    ended = threading.Event()
    with tempfile.TemporaryDirectory(prefix="nodes-") as folder:
        os.environ.update(node_environment(config, "direct", Path(folder), SidePorts(*free_ports("127.0.0.1", 3))))
        os.environ["RAY_AUTH_TOKEN"] = "for-this-test"
        import ray
        from ray.cluster_utils import Cluster

        node = {"num_cpus": 8, "num_gpus": 1, "object_store_memory": 100 * 2**20, "include_dashboard": False}
        cluster = Cluster(initialize_head=True, head_node_args=node)
        try:
            ray.init(cluster.address, log_to_driver=False)
            other = ray.remote(num_gpus=1)(threading.Event).options(name="other", lifetime="detached", namespace="them")
            holder = other.remote()
            ray.get(holder.is_set.remote())
            from ray import serve

            port = free_port()
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            serve.run(serve.deployment(ray_actor_options={"num_cpus": 0})(Other).bind(), name="other")
            command("--ray-address", cluster.address, "--port", str(port), "--device", "cpu")
            serve.delete("other")
            ray.shutdown()
            signal.signal(signal.SIGTERM, lambda number, frame: ended.set())  # now, as Ray installs its own

            def say(line: str) -> None:
                tell(line)
                if "wait for room" in line:
                    ray.kill(ray.get_actor("other", namespace="them"))

            running = launch(config.model_copy(update={"ray_address": cluster.address, "port": port}), say)
            command("--ray-address", cluster.address, "--port", str(free_port()))
            command("--ray-address", cluster.address, "--port", str(port), "--ingress", "proxy")
            command("--ray-address", f"127.0.0.1:{free_port()}", "--port", "0")
            tell(f"serving {config.model_name} at {running.url}/v1")
            ended.wait()
            running.stop()
        finally:
            cluster.shutdown()


if __name__ == "__main__":
    main()
