"""Signals as `timeout` and supervisors send them: to the whole process group, twice, and to every single process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from induced_failures import socket_folders
from served_application import Server, wait_gone
from timed_client import begin, client, until

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

CODE = """
import sys
from deploy.cli import main
sys.argv = ["latentserve", "serve", "--config", sys.argv[1]]
main()
"""
CONFIG = {
    "engine": {"model": "demo", "device": "cpu", "max_rows": 4, "token_budget": 128},
    "port": 0,
    "ingress": "direct",
    "dashboard": False,
    "drain": {"deregister_s": 0.2, "timeout_s": 60},
}
WITHIN_S = 45.0
"""Ray itself ends who asks it for anything after a minute."""


async def test_streams_go_on_when_the_group_is_signalled_and_nothing_is_left_when_everybody_is(launch) -> None:
    """The group: this process ends Ray, which did not hear it, once the streams are through. Everybody: Ray is gone,
    and nobody waits for what it will never answer."""
    server: Server = launch(CONFIG, CODE).wait()
    (channel,) = socket_folders(server)
    folder = Path(psutil.Process(server.pids("ray::SchedulerActor")[0]).environ()["TMPDIR"])
    assert channel.parent == folder
    async with client() as http:
        (long,) = await begin(http, server.url, 1, max_tokens=2000, ignore_eos=True)
        (short,) = await begin(http, server.url, 1, max_tokens=200, ignore_eos=True)
        # What `timeout` does: a second one that counted would break the streams off.
        server.process.send_signal(signal.SIGTERM)
        os.killpg(server.process.pid, signal.SIGTERM)
        result = await short
        assert result.done, result.broken or result.error

        async def draining() -> str:
            return server.find("(draining)")

        await until(draining, 60.0)
        assert not long.done()
        pids = [server.process.pid, *server.pids()]
        begun = time.monotonic()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        code = await asyncio.to_thread(server.ended, WITHIN_S)
        assert time.monotonic() - begun < WITHIN_S
        assert not (await long).done
    assert code == 0
    wait_gone(pids)
    assert not folder.exists()
    # Ray's libraries would tell what they miss, line by line.
    assert not [line for line in server.lines if re.match(r"\[20\d\d-|\(raylet|Traceback", line)], server.lines
