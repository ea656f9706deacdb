"""When processes for ranks are started ahead of ranks, what they import, and what happens where Ray starts none."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated import node_manager_pb2_grpc

from deploy.config.application import ServeConfig
from deploy.serve import early_imports


def config(**settings: Any) -> ServeConfig:
    engine = {"model": "demo", "device": "cpu", "tensor_parallel": settings.pop("tensor_parallel", 2)}
    return ServeConfig.model_validate({"engine": engine, **settings})


def test_a_machine_with_few_cores_imports_in_the_order_in_which_it_is_needed() -> None:
    fewest = next(cores for cores in range(1, 100) if early_imports.environment(config(), cores))
    assert fewest > 2 * (2 + 1)
    assert not early_imports.environment(config(replicas=2), fewest)
    assert not early_imports.environment(config(tensor_parallel=4), fewest)


@pytest.mark.long
@pytest.mark.parametrize(("process", "loaded"), [("rank", True), ("", False)])
def test_processes_for_ranks_alone_import(process: str, loaded: bool) -> None:
    program = "import sys, deploy.serve.preload; print({'torch', 'workers.rank.worker_process'} <= set(sys.modules))"
    environment = {**os.environ, early_imports.PROCESS: process}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(loaded)


def test_a_ray_that_starts_none_costs_time_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = []

    class Refused(grpc.RpcError):
        pass

    class Stub:
        def __init__(self, channel: Any) -> None:
            pass

        def PrestartWorkers(self, request: Any, timeout: float) -> None:
            asked.append(request)
            raise Refused("unknown method")

    context = SimpleNamespace(get_job_id=lambda: "01000000")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(
        "ray._private.worker._global_node", SimpleNamespace(node_ip_address="127.0.0.1", node_manager_port=1)
    )
    monkeypatch.setattr(node_manager_pb2_grpc, "NodeManagerServiceStub", Stub)
    early_imports.begin(config())
    assert not asked  # as this Ray has not the environment for it
    monkeypatch.setenv(early_imports.EARLY, "1")
    early_imports.begin(config(replicas=2))
    [request] = asked
    assert request.num_workers == 4
    assert "unknown method" in caplog.text
