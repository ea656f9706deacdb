"""Processes for ranks that import what these need while Ray Serve still starts, in a Ray of our own.

Ray starts idle processes ahead for whoever asks for one. Those that this module asks for have an environment of their
own, by which they know what to import (`preload`), and by which ranks, and nobody else, get them.

Written for Ray 2.60.0: what starts processes ahead is a private part of it. Without it ranks import what they need once
they have been asked for, some seconds later.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Final

from deploy.config.application import ServeConfig
from kernels.private_api import PrivateApi

logger = logging.getLogger("latentserve.early_imports")

PROCESS: Final = "LATENTSERVE_PROCESS"
"""Environment variable that tells a process for ranks from others that wait."""
RANK_ENVIRONMENT: Final = {PROCESS: "rank"}
EARLY: Final = "LATENTSERVE_EARLY_RANKS"
"""Environment variable of all processes of a Ray in which the ranks of a start find such processes: until when they
do, in seconds of Unix time."""
PRELOADED: Final = "RAY_preload_python_modules"
"""Environment variable with which Ray is told what all of its processes import."""
KEPT_S: Final = 120
"""Seconds for which Ray keeps them, while nobody asks for them."""
CALL_S: Final = 5.0
"""Seconds within which Ray says that it starts them."""
OTHERS: Final = 6
"""Processes beside ranks and fronts that import while an application starts: Serve's controller and proxies, the
router, and Ray's agents."""

_AHEAD: Final = PrivateApi(
    "ray",
    (
        "ray._private.grpc_utils.init_grpc_channel(address, options)",
        "ray._private.ray_constants.GLOBAL_GRPC_OPTIONS",
        "ray._private.worker._global_node",
        "ray.core.generated.node_manager_pb2.PrestartWorkersRequest",
        "ray.core.generated.node_manager_pb2_grpc.NodeManagerServiceStub",
    ),
    "ranks import what they need some seconds later",
)


def enough(cores: int, config: ServeConfig) -> bool:
    """Whether a node of so many cores can do now what is needed later: where they are fewer, what is needed first would
    wait for that."""
    return cores >= 2 * (_ranks(config) + config.least_replicas + OTHERS)


def preloaded() -> dict[str, str]:
    """Return the variable by which all processes of a Ray of our own import `preload`."""
    modules = [*filter(None, [os.environ.get(PRELOADED)]), "deploy.serve.preload"]
    return {PRELOADED: ",".join(modules)}


def environment(config: ServeConfig, cores: int) -> dict[str, str]:
    """Return the variables that all processes of a Ray of our own need for it, on a node of so many cores: none where
    these are not `enough`."""
    return {EARLY: str(time.time() + KEPT_S)} if enough(cores, config) else {}


def waiting() -> bool:
    """Whether ranks that are started now may find such processes. Later Ray has ended those that nobody took, and would
    begin others for who asks, which takes longer than to give one of those that wait for anybody."""
    return time.time() < float(os.environ.get(EARLY, 0))


def begin(config: ServeConfig) -> None:
    """Have the Ray that this process started begin them, if it has the `environment`."""
    if EARLY not in os.environ or not _AHEAD.there():
        return
    import grpc
    import ray
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray._private.worker import _global_node
    from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

    request = node_manager_pb2.PrestartWorkersRequest(
        num_workers=_ranks(config),
        keep_alive_duration_secs=KEPT_S,
        job_id=bytes.fromhex(ray.get_runtime_context().get_job_id()),
    )
    request.runtime_env_info.serialized_runtime_env = json.dumps({"env_vars": RANK_ENVIRONMENT})
    address = f"{_global_node.node_ip_address}:{_global_node.node_manager_port}"
    channel = init_grpc_channel(address, GLOBAL_GRPC_OPTIONS)  # past `http_proxy`, as Ray's own channels
    try:
        node_manager_pb2_grpc.NodeManagerServiceStub(channel).PrestartWorkers(request, timeout=CALL_S)
    except grpc.RpcError as error:
        logger.warning("Ray starts no processes ahead for ranks, which takes them some seconds more: %s", error)
    finally:
        channel.close()


def _ranks(config: ServeConfig) -> int:
    return config.least_replicas * config.engine.mesh().world.size
