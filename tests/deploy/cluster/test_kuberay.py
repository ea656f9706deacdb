"""The files for Kubernetes: held to KubeRay's published schema, to Ray Serve's, and to our own settings."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.config.application import ServeConfig
from tests.reduced_schema import MANIFEST, ROOT, SCHEMA

DOCKERFILE = (ROOT / "deploy" / "kuberay" / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()


@pytest.fixture
def manifest() -> dict[str, Any]:
    # Aliases are spelled out, as kubectl does.
    data: dict[str, Any] = copy.deepcopy(yaml.safe_load(MANIFEST.read_text()))
    return data


def application(manifest: dict[str, Any], folder: Path) -> tuple[dict[str, Any], ServeConfig]:
    """Serve's part of the manifest, and the settings in it; keys are where a test can read them."""
    data = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    keys = folder / "keys.yaml"
    keys.write_text("- name: ann\n  key: sk-0123456789abcdef\n")
    arguments = copy.deepcopy(data["applications"][0]["args"])
    arguments["api"]["api_keys_file"] = str(keys)
    return data, ServeConfig.model_validate(arguments)


def groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = manifest["spec"]["rayClusterConfig"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def containers(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for group in groups(manifest) for container in group["template"]["spec"]["containers"]]


def test_kuberay_knows_every_field(manifest: dict[str, Any]) -> None:
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text()))
    validator.validate(manifest)
    manifest["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"][0]["imagee"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="imagee"):
        validator.validate(manifest)


def test_serve_and_we_know_every_setting(manifest: dict[str, Any], tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema

    data, config = application(manifest, tmp_path)
    (served,) = ServeDeploySchema(**data).applications
    assert served.import_path == "deploy.serve.app:build"
    assert (config.host, config.port) == (data["http_options"]["host"], data["http_options"]["port"])
    assert [deployment.name for deployment in served.deployments] == ["engine"]
    # Pods outlive the streams that they let end.
    for group in [
        manifest["spec"]["rayClusterConfig"]["headGroupSpec"],
        *manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"],
    ]:
        assert group["template"]["spec"]["terminationGracePeriodSeconds"] > config.drain.timeout_s
    assert manifest["spec"]["rayClusterDeletionDelaySeconds"] > config.drain.timeout_s


def test_sizes_agree(manifest: dict[str, Any], tmp_path: Path) -> None:
    _, config = application(manifest, tmp_path)
    _, worker = containers(manifest)
    limits = worker["resources"]["limits"]
    assert limits == worker["resources"]["requests"], "Ray takes the limits for what there is"
    assert int(limits["nvidia.com/gpu"]) == config.engine.tensor_parallel
    assert int(limits["memory"].removesuffix("Gi")) << 30 > 1.3 * config.engine.host_cache_bytes
    processes = config.engine.tensor_parallel + 2
    assert int(limits["cpu"]) >= processes * config.cpus_per_process


def test_nodes_come_and_go_with_replicas(manifest: dict[str, Any], tmp_path: Path) -> None:
    """As many nodes as replicas may come, and an idle one stays for as long as one of cluster.yaml."""
    data, config = application(manifest, tmp_path)
    cluster = manifest["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    (engine,) = data["applications"][0]["deployments"]
    assert cluster["enableInTreeAutoscaling"]
    assert workers["minReplicas"] <= engine["num_replicas"] <= workers["maxReplicas"]
    assert workers["minReplicas"] == config.least_replicas
    cloud = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    assert cluster["autoscalerOptions"]["idleTimeoutSeconds"] == 60 * cloud["idle_timeout_minutes"]


def test_versions_are_those_of_the_project(manifest: dict[str, Any]) -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] == pinned["ray"]
    assert all(container["image"].startswith("latentserve") for container in containers(manifest))


def test_the_start_commands_give_ray_its_environment(manifest: dict[str, Any], tmp_path: Path) -> None:
    """The commands as they are, in a shell, with KubeRay's own part replaced by one that shows its environment."""
    assert manifest["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@" --folder {tmp_path}/haproxy\n')
    (tmp_path / "python").chmod(0o755)
    environment = {"HOME": str(tmp_path), "PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    for container in containers(manifest):
        command = [*container["command"], *container["args"]]
        done = subprocess.run(
            command,
            env={**environment, "KUBERAY_GEN_RAY_START_CMD": "env"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        variables = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
        assert variables["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        assert variables["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"] == "1"


def test_what_is_mounted_is_there(manifest: dict[str, Any]) -> None:
    arguments = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"]
    for group in groups(manifest):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts.keys() == volumes
        assert arguments["engine"]["model"].startswith(mounts["models"] + "/")
        assert arguments["api"]["api_keys_file"].startswith(mounts["keys"] + "/")
        assert mounts["shared-memory"] == "/dev/shm"


def test_the_image_has_what_is_there_and_runs_as_a_user() -> None:
    copied = re.findall(r"^COPY --chown=ray (.+) \S+$", DOCKERFILE, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
    assert re.findall(r"^FROM (\S+)$", DOCKERFILE, re.MULTILINE) == ["python:3.12-slim-bookworm"]
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE)[-1] == "ray"


def test_the_page_names_files_that_exist() -> None:
    for name in re.findall(r"deploy/kuberay/\w+(?:\.yaml)?", PAGE):
        assert (ROOT / name).exists(), name
