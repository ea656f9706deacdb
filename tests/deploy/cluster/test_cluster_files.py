"""Files with which users start clusters and applications, checked without a cloud."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.config.application import ServeConfig
from deploy.serve.application import bundles

ROOT = Path(__file__).resolve().parents[3]
CLUSTERS = ["cluster.yaml", "deploy/cluster/on-premise.yaml"]


def load(name: str) -> dict:
    return yaml.safe_load((ROOT / name).read_text())


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))  # where the provider for one's own machines keeps its state
    prepared = prepare_config(load(name))
    validate_config(prepared)
    assert prepared["max_workers"] >= 2


def test_a_wrong_field_would_be_noticed() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    wrong = load("cluster.yaml") | {"worker_start_commands": []}
    with pytest.raises(Exception, match="worker_start_commands"):
        validate_config(prepare_config(wrong))


def test_the_cloud_s_nodes_are_a_head_without_gpu_and_eight_h200() -> None:
    config = load("cluster.yaml")
    assert config["provider"]["type"] == "aws"
    types = config["available_node_types"]
    head = types[config["head_node_type"]]
    assert not head["node_config"]["InstanceType"].startswith(("p", "g"))
    assert head["resources"] == {"CPU": 0}
    (workers,) = [kind for name, kind in types.items() if name != config["head_node_type"]]
    assert workers["node_config"]["InstanceType"] == "p5en.48xlarge"
    assert workers["resources"]["GPU"] == 8
    assert workers["max_workers"] <= config["max_workers"]


def of_eight_gpus() -> ServeConfig:
    """Settings of deploy/serve.yaml for replicas of eight GPUs, whose number follows the load as its comment says."""
    text = (ROOT / "deploy/serve.yaml").read_text()
    (most,) = re.findall(r"autoscaling: \{max_replicas: (\d+)\}", text)
    args = yaml.safe_load(text)["applications"][0]["args"]
    engine = {**args["engine"], "tensor_parallel": 8, "device": "cuda"}
    return ServeConfig.model_validate(
        {**args, "engine": engine, "autoscaling": {"max_replicas": int(most)}, "gpus_per_rank": 1}
    )


def autoscaler_config() -> Any:
    from ray.autoscaler.v2.instance_manager.config import FileConfigReader

    return FileConfigReader(str(ROOT / "cluster.yaml"), skip_content_hash=True).get_cached_autoscaling_config()


def test_the_cloud_s_nodes_are_as_many_as_the_replicas() -> None:
    """A replica of eight ranks takes a node: one stays for the least replicas, and there may be one for each of the
    most."""
    cluster, config = autoscaler_config(), of_eight_gpus()
    types = cluster.get_node_type_configs()
    assert types["h200"].min_worker_nodes == config.least_replicas
    assert types["h200"].max_worker_nodes == cluster.get_max_num_worker_nodes() == config.most_replicas
    # A node outlasts the time in which Serve makes up its mind to end a replica and to start one.
    assert cluster.get_idle_timeout_s() > config.autoscaling.downscale_delay_s + config.autoscaling.upscale_delay_s


@pytest.mark.parametrize("replicas", [0, 1, 2, 4, 5])
def test_ray_s_autoscaler_starts_a_node_for_each_replica(replicas: int) -> None:
    """Ray's own scheduler, told of replicas that wait for room as Ray tells it: by their placement groups."""
    from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
    from ray.autoscaler.v2.utils import ResourceRequestUtil
    from ray.core.generated.autoscaler_pb2 import GangResourceRequest

    cluster = autoscaler_config()
    waiting = GangResourceRequest(requests=[ResourceRequestUtil.make(each) for each in bundles(of_eight_gpus())])
    reply = ResourceDemandScheduler(None).schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=cluster.get_node_type_configs(),
            max_num_nodes=cluster.get_max_num_nodes(),
            gang_resource_requests=[waiting] * replicas,
        )
    )
    launched = {each.instance_type: each.count for each in reply.to_launch}
    assert launched == {"h200": max(1, min(replicas, 4))}, "one stays, and there are at most four"
    assert len(reply.infeasible_gang_resource_requests) == max(0, replicas - 4)


def test_the_on_premise_variant_starts_all_its_machines() -> None:
    config = load("deploy/cluster/on-premise.yaml")
    assert config["provider"]["type"] == "local"
    assert config["min_workers"] == config["max_workers"] == len(config["provider"]["worker_ips"])
    assert "RAY_enable_autoscaler_v2=0" in config["head_start_ray_commands"][-1]


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("role", ["head", "worker"])
def test_the_start_command_gives_ray_its_environment(name: str, role: str, tmp_path: Path) -> None:
    """The command as it is, in a shell, with a `ray` that shows what it was started with."""
    command = load(name)[f"{role}_start_ray_commands"][-1]
    home = tmp_path / "home"
    (home / "venv" / "bin").mkdir(parents=True)
    (home / "latentserve").symlink_to(ROOT)
    (home / "venv" / "bin" / "python").write_text(
        f'#!/bin/sh\nexec {sys.executable} "$@" --folder {tmp_path}/haproxy\n'
    )
    (home / "venv" / "bin" / "ray").write_text('#!/bin/sh\necho "$@"\nexec env\n')
    for file in (home / "venv" / "bin").iterdir():
        file.chmod(0o755)
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "RAY_HEAD_IP": "10.0.0.1"}
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    arguments, *lines = done.stdout.splitlines()
    variables = dict(line.split("=", 1) for line in lines if "=" in line)
    assert arguments.startswith("start --head " if role == "head" else "start --address=10.0.0.1:6379 ")
    assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert variables["RAY_AUTH_MODE"] == "token"
    assert variables["RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY"] == "1"
    assert variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"
    assert os.access(variables["RAY_SERVE_HAPROXY_BINARY_PATH"], os.X_OK)
    dashboards = Path(variables["RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"])
    assert (dashboards / "latentserve.json").is_file()


def test_the_serve_file_is_what_serve_and_we_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.serve.schema import ServeDeploySchema

    data = load("deploy/serve.yaml")
    schema = ServeDeploySchema(**data)
    (application,) = schema.applications
    assert application.import_path == "deploy.serve.app:build"
    config = ServeConfig.model_validate(application.args)
    # As Serve itself calls it.
    from ray.serve._private.api import call_user_app_builder_with_args_if_necessary

    from deploy.serve import app

    given = []
    monkeypatch.setattr(app, "build_app", given.append)
    with pytest.raises(TypeError, match="must return an `Application`"):
        call_user_app_builder_with_args_if_necessary(app.build, application.args)
    assert given == [config]
    assert (config.host, config.port) == (data["http_options"]["host"], data["http_options"]["port"])
    # Scaling must not touch `args`: Serve replaces every replica when they change.
    assert "replicas" not in application.args
    assert [(d.name, d.num_replicas) for d in application.deployments] == [("engine", 1)]
