"""A container's /dev/shm of 64 MiB, and a disk that fills up while the application serves: no client notices."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import confined_program
import pytest
from served_application import Server, wait_gone
from timed_client import begin, client, stream

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.soak]

CODE = "from confined_program import main; main()"
CONFIG = {
    "engine": {"model": "demo", "max_rows": 16, "token_budget": 512, "tensor_parallel": 2},
    "log": {"access": True},
    "port": 0,
    "dashboard": False,
    "drain": {"timeout_s": 300},
}


@pytest.fixture(scope="module")
def server(launch) -> Server:
    if subprocess.run([sys.executable, confined_program.__file__], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount file systems in a namespace of its own")
    return launch(CONFIG, CODE).wait()


def seen_by(server: Server, path: str) -> Path:
    return Path(f"/proc/{server.process.pid}/root{path}")


def fill(filler: Path) -> None:
    """Take all the room that there is, to the last byte."""
    for size in (1 << 16, 1):
        try:
            with filler.open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(size))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise


async def test_it_serves_with_a_small_shared_memory(server: Server) -> None:
    there = os.statvfs(seen_by(server, "/dev/shm"))
    assert there.f_blocks * there.f_frsize == confined_program.SHARED_MIB << 20
    async with client(300.0) as http:
        answer = await stream(http, server.url, max_tokens=20)
    assert answer.done, answer.error or answer.broken


async def test_a_disk_that_fills_up_cuts_no_stream_and_keeps_nobody_out(server: Server) -> None:
    async with client(300.0) as http:
        before = await stream(http, server.url, max_tokens=300, ignore_eos=True)
        streams = await begin(http, server.url, 4, max_tokens=1500, ignore_eos=True)
        filler = seen_by(server, confined_program.RAY_FOLDER) / "filler"
        fill(filler)
        during = [await stream(http, server.url, max_tokens=300, ignore_eos=True) for _ in range(3)]
        results = [await task for task in streams]
        health = await http.get(f"{server.url}/health")
    assert all(each.done for each in (*results, *during)), [each.error or each.broken for each in (*results, *during)]
    assert {each.text for each in during} == {before.text}
    assert health.status_code == 200
    left = os.statvfs(filler.parent)
    assert left.f_bavail == 0, "there is room again"


def test_it_ends_in_order_on_a_full_disk(server: Server) -> None:
    """Last in this module: the application is gone afterwards."""
    pids = server.pids()
    assert server.stop() == 0
    wait_gone(pids)
