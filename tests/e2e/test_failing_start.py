"""A model that cannot be served: `latentserve serve` says why at once, ends with an error, and leaves nothing behind.

What it does follows from a fault that lasts; tests/workers/processes/test_replica_processes.py says what makes one.
"""

import contextlib
import json
import shutil
import time
from pathlib import Path

import psutil
import pytest
from induced_failures import socket_folders
from safetensors.torch import load_file, save_file
from served_application import START_TIMEOUT_S, Server, wait_gone

from workers.config import DEMO_MODEL

pytestmark = [pytest.mark.cluster, pytest.mark.long]

CODE = """
import sys
from deploy.cli import main
sys.argv = ["latentserve", "serve", "--config", sys.argv[1]]
main()
"""


@pytest.mark.soak
def test_more_gpus_than_there_are(launch, tmp_path: Path) -> None:
    """Waiting would be in vain for GPUs that this machine will never have."""
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    shared = ("num_attention_heads", "intermediate_size", "moe_intermediate_size")
    (tmp_path / "config.json").write_text(json.dumps(config | dict.fromkeys(shared, 4096)))
    engine = {"model": str(tmp_path), "tensor_parallel": 4096}
    settings = {"engine": engine, "port": 0, "ingress": "direct", "dashboard": False}
    server: Server = launch({**settings, "gpus_per_rank": 1, "cpus_per_process": 0.001}, CODE)
    server.process.wait(START_TIMEOUT_S)
    server._reader.join(60)
    assert server.process.returncode == 1
    [error] = [line for line in server.lines if line.startswith("error: ")]
    assert error.startswith("error: replicas = 1, tensor_parallel = 4096 take 4096 GPUs where there are ")
    assert "--tensor-parallel" in error


@pytest.mark.parametrize("ahead", ["0", pytest.param("1", marks=pytest.mark.soak)])
def test_a_model_that_cannot_be_loaded_is_tried_once(launch, tmp_path: Path, ahead: str) -> None:
    """Ranks that start ahead of Ray and fail change nothing in what is said in the end."""
    folder = tmp_path / "spoilt"
    shutil.copytree(DEMO_MODEL, folder)
    tensors = load_file(folder / "model.safetensors")
    cause = next(name for name in sorted(tensors) if ".layers.2." in name)
    del tensors[cause]
    save_file(tensors, folder / "model.safetensors")
    engine = {"model": str(folder), "tensor_parallel": 2, "device": "cpu"}
    switched = f"import os\nos.environ['LATENTSERVE_PRESTARTED_RANKS'] = '{ahead}'\n{CODE}"
    server: Server = launch({"engine": engine, "port": 0, "ingress": "direct", "dashboard": False}, switched)
    pids: set[int] = set()
    folders: set[Path] = set()
    while server.process.poll() is None:
        pids |= set(server.pids())
        with contextlib.suppress(psutil.Error):  # it may end just now
            folders |= set(socket_folders(server))
        time.sleep(0.2)
    server.ended()
    text = "\n".join(server.lines)
    assert server.process.returncode == 1
    assert text.count("starting 2 ranks") == 1, text
    # The error is the last that is said, and said once.
    error = text[text.index("\nerror: ") :]
    assert text.count(error.partition(":")[2].splitlines()[0]) == 1, text
    assert cause in error
    assert "Traceback" not in text
    assert "raylet" not in text
    wait_gone(sorted(pids))
    assert folders
    assert not [folder for folder in folders if folder.exists()]
