"""A Ray that was joined and that somebody ends while the command drains: with a second signal, and without."""

import asyncio
import re
import signal
import time

import pytest
from served_application import Server
from timed_client import begin, client

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CODE = "from ended_ray_program import main; main()"
CONFIG = {
    "engine": {"model": "demo", "device": "cpu", "tensor_parallel": 1, "max_rows": 4, "token_budget": 128},
    "ingress": "direct",
    "drain": {"deregister_s": 0.2, "timeout_s": 60},
}
WITHIN_S = 30.0
"""Ray itself ends who asks it for anything after a minute, with a line of its own."""


@pytest.mark.parametrize("again", [False, True])
async def test_the_command_ends_with_one_line_and_starts_no_other_ray(launch, again: bool) -> None:
    server: Server = launch(CONFIG, CODE).wait()
    async with client() as http:
        (stream,) = await begin(http, server.url, 1, max_tokens=2000, ignore_eos=True)
        server.process.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        while not server.find(r"(\(Ray is killed\))"):
            assert time.monotonic() - begun < WITHIN_S, server.lines
            await asyncio.sleep(0.05)
        begun = time.monotonic()
        if again:
            await asyncio.sleep(1.0)  # two SIGTERMs at once are one
            server.process.send_signal(signal.SIGTERM)
        while not server.find(r"exit code (\d+)"):
            assert time.monotonic() - begun < WITHIN_S, server.lines
            await asyncio.sleep(0.05)
        await stream
    await asyncio.to_thread(server.ended)
    assert server.find(r"exit code (\d+)") == "0"
    (said,) = [line for line in server.lines if line.startswith("stopped")]
    assert said == "stopped; Ray was ended by somebody else, so streams that still ran were broken off"
    assert not [line for line in server.lines if re.search("Traceback|Started a local Ray|Failed to connect", line)]
