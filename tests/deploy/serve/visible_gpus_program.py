"""The program of test_placements: the ranks of one replica on a Ray of two nodes with two (pretended) GPUs each.

One of the nodes is told of its GPUs by CUDA_VISIBLE_DEVICES. Writes a list of every rank: that variable as it sees it,
the GPU that Ray assigned, the device it takes.
"""

import asyncio
import json
import os
import sys
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from deploy.cluster.environment import PROCESS_ENVIRONMENT
from deploy.config.application import ServeConfig
from deploy.serve.actors import ReplicaProcesses, WorkerActor
from deploy.serve.application import bundles


async def sights(config: ServeConfig) -> list[list[object]]:
    """Return the GPUs that each rank sees, in rank order."""

    class Witness(WorkerActor):  # in here, so that Ray sends it along
        def load_libraries(self) -> None:
            """Takes seconds."""

        def sight(self) -> tuple[str | None, list[str]]:
            return os.environ.get("CUDA_VISIBLE_DEVICES"), ray.get_runtime_context().get_accelerator_ids()["GPU"]

    class Processes(ReplicaProcesses):
        worker_class = Witness

    processes = Processes(config, ray.util.placement_group(bundles(config)), {})
    try:
        await processes.start()
        seen = await asyncio.gather(*[worker.sight.remote() for worker in processes._workers])
        return [
            [visible, *gpus, placement.device]
            for (visible, gpus), placement in zip(seen, processes.placements, strict=True)
        ]
    finally:
        processes.kill()


def main() -> None:
    """Nodes are processes of this machine and have none of our settings: a replica brings what its ranks need."""
    for name in (*PROCESS_ENVIRONMENT, "CUDA_VISIBLE_DEVICES"):
        os.environ.pop(name, None)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    engine = {"model": "demo", "device": "cpu", "tensor_parallel": 4}
    config = ServeConfig.model_validate({"engine": engine, "gpus_per_rank": 1})
    node = {"num_cpus": 8, "num_gpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    try:
        os.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
        cluster.add_node(**node)
        del os.environ["CUDA_VISIBLE_DEVICES"]
        ray.init(cluster.address, log_to_driver=False)
        Path(sys.argv[1]).write_text(json.dumps(asyncio.run(sights(config))))
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
