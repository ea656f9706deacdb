"""A quiet start under a low limit of open files, of which Ray and HAProxy would speak: it serves and says nothing."""

import time

import httpx
import pytest
from served_application import START_TIMEOUT_S, Server, wait_gone

from deploy.cli.console import INTERRUPTED
from workers.channel.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CODE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))
sys.argv = ["latentserve", "serve", "-q", "--config", sys.argv[1]]
from deploy.cli import main
main()
"""
ENGINE = {"model": "demo", "device": "cpu", "tensor_parallel": 1, "width": 1, "max_rows": 4, "token_budget": 256}


def test_nothing_is_said_of_few_files(launch) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    server: Server = launch({"engine": ENGINE, "name": "demo", "port": port, "ingress": "direct"}, CODE)
    deadline = time.monotonic() + START_TIMEOUT_S
    with httpx.Client(timeout=30.0, trust_env=False) as http:
        while True:
            assert server.process.poll() is None, server.lines
            assert time.monotonic() < deadline, server.lines
            try:
                if http.get(f"{url}/health").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        body = {"model": "demo", "prompt": "def f(", "max_tokens": 4}
        assert http.post(f"{url}/v1/completions", json=body).status_code == 200
    pids = server.pids()
    # A replica may answer before the command that started it has heard so; that is interrupted in a start then.
    assert server.stop() in (0, INTERRUPTED)
    wait_gone(pids)
    assert server.lines == []
