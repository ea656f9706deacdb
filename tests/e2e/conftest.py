"""The fixture that starts whole applications."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator

import pytest
from served_application import SERVE, Server


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Start applications; whatever a test leaves is ended, down to the last process."""
    servers: list[Server] = []

    def start(config: dict, code: str = SERVE) -> Server:
        server = Server(config, tmp_path_factory.mktemp("serve"), code)
        servers.append(server)
        return server

    yield start
    left = [(server, server.pids()) for server in servers if server.process.poll() is None]
    for server, _ in left:  # several end side by side
        server.process.send_signal(signal.SIGTERM)
    for server, pids in left:
        try:
            server.ended()
        except subprocess.TimeoutExpired:
            server.process.kill()
            server.process.wait()
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
