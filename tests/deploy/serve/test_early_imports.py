"""When processes for ranks are started ahead of ranks, what they import, and what happens where Ray starts none."""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import ray
from ray.core.generated import node_manager_pb2, node_manager_pb2_grpc

from deploy.config.application import ServeConfig
from deploy.serve import app, early_imports, prestarted

ROOT = Path(__file__).resolve().parents[3]


def config(**settings: Any) -> ServeConfig:
    engine = {"model": "demo", "device": "cpu", "tensor_parallel": settings.pop("tensor_parallel", 2)}
    return ServeConfig.model_validate({"engine": engine, **settings})


def test_a_machine_with_few_cores_imports_in_the_order_in_which_it_is_needed() -> None:
    fewest = next(cores for cores in range(1, 100) if early_imports.environment(config(), cores))
    assert fewest > 2 * (2 + 1)
    assert not early_imports.environment(config(replicas=2), fewest)
    assert not early_imports.environment(config(tensor_parallel=4), fewest)


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine with many cores, a batch system may give it two."""

    class Started(Exception):
        pass

    def start(*given: Any) -> None:
        raise Started(given[-1])

    monkeypatch.setenv(prestarted.SWITCH, "0")  # those ranks would import everything themselves
    monkeypatch.setattr(os, "cpu_count", lambda: 1000)
    monkeypatch.setattr(app, "RayConnection", start)
    for cores, early in ((2, False), (1000, True)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda process, cores=cores: set(range(cores)))
        with pytest.raises(Started) as started:
            app.launch(config(port=0), lambda line: None)
        variables = started.value.args[0]
        assert (early_imports.EARLY in variables) == early
        assert variables[early_imports.PRELOADED].split(",")[-1] == "deploy.serve.preload"


def test_modules_that_somebody_else_wants_loaded_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_preload_python_modules", "json,colorsys")
    modules = early_imports.preloaded()["RAY_preload_python_modules"]
    assert modules.split(",") == ["json", "colorsys", "deploy.serve.preload"]


def test_replicas_that_start_later_wait_for_no_such_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray has ended those that nobody took, and would begin others, which takes longer than to give one that waits."""
    assert not early_imports.waiting()
    begun = time.time()
    for name, value in early_imports.environment(config(), 1000).items():
        monkeypatch.setenv(name, value)
    assert early_imports.waiting()
    monkeypatch.setattr(time, "time", lambda: begun + early_imports.KEPT_S + 60)
    assert not early_imports.waiting()


@pytest.mark.long
@pytest.mark.parametrize(("process", "loaded"), [("rank", True), ("", False)])
def test_processes_for_ranks_alone_import(process: str, loaded: bool) -> None:
    program = "import sys, deploy.serve.preload; print({'torch', 'workers.rank.worker_process'} <= set(sys.modules))"
    environment = {**os.environ, early_imports.PROCESS: process}
    ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == str(loaded)


def test_a_library_that_cannot_be_loaded_ends_no_process(tmp_path: Path) -> None:
    """The rank that takes the process says what is wrong; of a process that ended, Ray says no more than that."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.0: cannot open shared object file')")
    environment = {**os.environ, early_imports.PROCESS: "rank", "PYTHONPATH": str(tmp_path)}
    program = [sys.executable, "-c", "import deploy.serve.preload; print('lives')"]
    ran = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ran.stdout.strip() == "lives", ran.stderr
    assert "libcudart.so.0" in ran.stderr


def test_a_proxy_of_the_web_is_not_asked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """gRPC takes `http_proxy` for its own, also to reach this machine; Ray's other processes do not."""
    asked = []

    class NodeManager(node_manager_pb2_grpc.NodeManagerServiceServicer):
        def PrestartWorkers(self, request: Any, context: Any) -> Any:
            asked.append(request)
            return node_manager_pb2.PrestartWorkersReply()

    with ThreadPoolExecutor(1) as threads:
        server = grpc.server(threads)
        node_manager_pb2_grpc.add_NodeManagerServiceServicer_to_server(NodeManager(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        for name in ("grpc_proxy", "https_proxy", "no_grpc_proxy", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # nobody listens there
        monkeypatch.setattr(early_imports, "CALL_S", 60.0)
        monkeypatch.setenv(early_imports.EARLY, str(time.time() + 60))
        monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_job_id=lambda: "01000000"))
        node = SimpleNamespace(node_ip_address="127.0.0.1", node_manager_port=port)
        monkeypatch.setattr("ray._private.worker._global_node", node)
        try:
            early_imports.begin(config())
        finally:
            server.stop(None).wait()
    assert [request.num_workers for request in asked] == [2], caplog.text


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
    monkeypatch.setenv(early_imports.EARLY, str(time.time() + 60))
    early_imports.begin(config(replicas=2))
    [request] = asked
    assert request.num_workers == 4
    assert "unknown method" in caplog.text
