"""A Ray whose nodes come and go with what is asked of them: processes of this machine that Ray's autoscaler starts and
ends.

The autoscaler is Ray's own, and so is the provider of pretended nodes (`ray.cluster_utils.AutoscalingCluster`), whose
example of a configuration is not in Ray's wheel.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.cluster_utils import AutoscalingCluster
from typing_extensions import override

from workers.channel.ports import free_ports

START_TIMEOUT_S = 180
STOP_TIMEOUT_S = 60
OBJECT_STORE_BYTES = 100 * 2**20
NOTHING_TO_SET_UP = {
    "initialization_commands": [],
    "setup_commands": [],
    "head_setup_commands": [],
    "worker_setup_commands": [],
    "head_start_ray_commands": [],
    "worker_start_ray_commands": [],
    "file_mounts": {},
    "cluster_synced_files": [],
}
"""Fields that Ray requires of a configuration with an external provider. No machine is set up here."""


class Nodes(FakeMultiNodeProvider):
    """Ray's provider of nodes that are processes of this machine, each with an address of its own, as nodes have."""

    @override
    def _create_node_with_resources_and_labels(self, *arguments: Any) -> None:
        with self.lock, mock.patch("ray.util.get_node_ip_address", return_value=f"127.0.0.{self._next_node_id + 2}"):
            super()._create_node_with_resources_and_labels(*arguments)


class ClusterOfNodesOnDemand(AutoscalingCluster):
    """`AutoscalingCluster` with a configuration of our own, and beside other Rays of this machine: where that one ends
    every Ray that it finds, this one ends its own."""

    def __init__(self, folder: Path, head_resources: dict[str, float], worker_node_types: dict, **config: Any) -> None:
        """`folder`: for Ray's files; its path has to be short. `config`: fields of the autoscaler's configuration."""
        self._folder = folder
        self._port, self._client_port = free_ports("127.0.0.1", 2)
        self._head: subprocess.Popen[bytes] | None = None
        self.address = f"{_own_address()}:{self._port}"
        super().__init__(head_resources, worker_node_types, autoscaler_v2=True, **config)

    @property
    def config(self) -> dict[str, Any]:
        """What the autoscaler reads."""
        return self._config

    @override
    def _generate_config(
        self, head_resources: dict, worker_node_types: dict, autoscaler_v2: bool = False, **config: Any
    ) -> dict[str, Any]:
        head = {"resources": head_resources, "node_config": {}, "max_workers": 0}
        return {
            "cluster_name": "on-demand",
            # `fake_multinode` would look for the example once more.
            "provider": {
                "type": "external",
                "module": f"{Nodes.__module__}.{Nodes.__name__}",
                "head_node_id": FAKE_HEAD_NODE_ID,
                "gcs_address": self.address,
                "launch_multiple": autoscaler_v2,
                "disable_launch_config_check": True,
                "disable_node_updaters": True,  # a node runs once its process does
            },
            "available_node_types": {FAKE_HEAD_NODE_TYPE: head, **worker_node_types},
            "head_node_type": FAKE_HEAD_NODE_TYPE,
            "max_workers": sum(kind["max_workers"] for kind in worker_node_types.values()),
            **NOTHING_TO_SET_UP,
            **config,
        }

    @override
    def start(self, _system_config: dict | None = None, override_env: dict | None = None) -> None:
        """Start the head node; RuntimeError with what it said if it does not come up."""
        config = self._folder / "autoscaler.yaml"
        config.write_text(json.dumps(self.config))
        arguments = {
            "node-ip-address": self.address.rpartition(":")[0],
            "port": self._port,
            "ray-client-server-port": self._client_port,
            "min-worker-port": 0,
            "max-worker-port": 0,
            "dashboard-agent-listen-port": 0,
            "num-cpus": self._head_resources["CPU"],
            "object-store-memory": OBJECT_STORE_BYTES,
            "include-dashboard": False,
            "temp-dir": self._folder,
            "autoscaling-config": config,
        }
        environment = {
            "AUTOSCALER_UPDATE_INTERVAL_S": "1",
            "RAY_FAKE_CLUSTER": "1",
            "RAY_enable_autoscaler_v2": "1",
            "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
            "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        }
        said = self._folder / "head.log"
        with said.open("wb") as output:
            self._head = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("ray")),
                    *("start", "--head", "--block", "--disable-usage-stats"),
                    *(f"--{name}={value}" for name, value in arguments.items()),
                ],
                env={**os.environ, **environment, **(override_env or {})},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a signal to the group of the application is none to Ray
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while "Ray runtime started" not in said.read_text():
            if self._head.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"Ray's head node did not start:\n{said.read_text()}\n{self._logged()}")
            time.sleep(0.1)

    def _logged(self) -> str:
        """The last lines of what the head's daemons say about themselves."""
        logs = self._folder / "session_latest" / "logs"
        files = sorted(file for name in ("gcs_server", "raylet") for file in logs.glob(f"{name}.*") if file.is_file())
        return "\n".join(f"--- {file.name}:\n" + "\n".join(file.read_text().splitlines()[-15:]) for file in files)

    @override
    def shutdown(self) -> None:
        """End the head, and every node and process that it started."""
        if self._head is None:
            return
        try:
            processes = psutil.Process(self._head.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            processes = []
        self._head.terminate()
        try:
            self._head.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._head.kill()
            self._head.wait()
        for process in processes:  # nodes would look for their head for a minute
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, STOP_TIMEOUT_S)
        self._head = None


def _own_address() -> str:
    import ray

    return str(ray.util.get_node_ip_address())
