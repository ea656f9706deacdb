"""A cluster that is in use: who waits reads for what, and who asks for what cannot be had reads why."""

import httpx
import pytest
from served_application import Server, wait_gone

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CODE = "from busy_cluster_program import main; main()"
CONFIG = {
    "engine": {"model": "demo", "device": "cpu", "max_rows": 8, "token_budget": 256},
    "gpus_per_rank": 1,
    "port": 0,
    "ingress": "direct",
    "drain": {"deregister_s": 0.5, "timeout_s": 30},
}


def test_who_waits_for_a_gpu_reads_so(launch) -> None:
    server: Server = launch(CONFIG, CODE).wait()
    [line] = [line for line in server.lines if "wait for room" in line]
    assert line.startswith("1 of 1 replicas wait for room: one takes 1 GPU and 3 CPUs, free are 0 of 1 GPUs, ")
    assert server.lines.index(line) < server.lines.index("starting 1 ranks of demo")
    # Ray Serve goes on to listen where it was first told to; what runs there is left alone.
    taken, elsewhere, otherwise, nowhere = [line for line in server.lines if line.startswith("exit code ")]
    assert taken.startswith("exit code 1: error: Ray Serve refuses the application: Prefix / is being used by ")
    assert elsewhere.startswith(
        f"exit code 1: error: Ray Serve runs on this cluster and listens on {server.url[7:]}, not "
    )
    assert otherwise.startswith("exit code 1: error: ingress = proxy, but Ray was started with ")
    assert nowhere.startswith("exit code 1: error: cannot join Ray at 127.0.0.1:")
    assert httpx.get(f"{server.url}/health", timeout=30.0, trust_env=False).status_code == 200
    pids = server.pids()
    assert server.stop() == 0
    wait_gone(pids)
