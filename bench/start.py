"""Timeline of a start: what each process does, and the seconds from the command to the first token.

    python bench/start.py
    python bench/start.py --repeats 3 --json starts.json
    python bench/start.py --model ./DeepSeek-V2-Lite -- --tensor-parallel 2 --host 127.0.0.1

Runs `latentserve serve` with the model, and with the options behind `--`, asks for one token as soon as it serves, and
ends it. Prints each line that the command said, with the seconds since it was run, and then every process: when it was
there first, the seconds of processor time that it has had until the first token, what it is, and when the large
libraries were imported in it, and for how long. The last line is the one to compare: seconds to the first token, and
processor time of all processes. On a machine with few cores, or with other work, compare the latter.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

HOOKS = Path(__file__).resolve().parent / "start_hooks"
NOTES = "LATENTSERVE_BENCH_START"
COMMAND = "from deploy.cli import main; main()"
LOOK_S = 0.1
END_S = 120.0
SERVES = re.compile(r"serving (\S+) at (http://\S+)/v1")


@dataclass
class Import:
    """Import of a module."""

    module: str
    begin: float
    """Seconds since the command was run."""
    wall_s: float = 0.0
    cpu_s: float = 0.0


@dataclass
class Process:
    """What was seen of a process."""

    pid: int
    first: float
    """Seconds since the command was run when it was started."""
    name: str
    cpu_s: float = 0.0
    imports: list[Import] = field(default_factory=list)


@dataclass
class Start:
    """A start and what was seen of it."""

    lines: list[tuple[float, str]]
    processes: list[Process]
    token_s: float

    @property
    def cpu_s(self) -> float:
        """Seconds of processor time of all processes until the first token."""
        return sum(process.cpu_s for process in self.processes)


def name_of(process: psutil.Process) -> str:
    """What a process is, in a few words, by its command line, which Ray's workers change."""
    command = process.cmdline()
    if not command:
        return process.name()
    if "::" in command[0]:
        return command[0]
    words = [word for word in command if not word.startswith("-")]
    program = Path(words[0]).name
    if program.startswith("python") and len(words) > 1:
        module = command[command.index("-m") + 1] if "-m" in command else Path(words[1]).name
        return f"python {module if len(module) < 60 else module[:60]}"
    return program


class Observer(threading.Thread):
    """Looks at a process and all that come from it, again and again."""

    def __init__(self, pid: int) -> None:
        """`pid`: of the command."""
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self._begin = self._root.create_time()  # by the clock of the others, which is not quite that of time.time()
        self.found: dict[tuple[int, float], Process] = {}
        self._over = threading.Event()

    def run(self) -> None:
        """Look until told to stop."""
        while not self._over.wait(LOOK_S):
            self.look()

    def look(self) -> None:
        """Look once."""
        try:
            all_of_them = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in all_of_them:
            try:
                key = process.pid, process.create_time()
                times, name = process.cpu_times(), name_of(process)
            except psutil.Error:
                continue
            if key not in self.found:
                self.found[key] = Process(process.pid, key[1] - self._begin, name)
            self.found[key].name = name
            self.found[key].cpu_s = times.user + times.system

    def stop(self) -> list[Process]:
        """Stop, and return the processes in the order of their starts."""
        self._over.set()
        self.join()
        self.look()
        return sorted(self.found.values(), key=lambda process: process.first)


def imports_in(file: Path, begin: float) -> list[Import]:
    """Read what a process noted of its imports."""
    found: list[Import] = []
    open_ones: dict[str, tuple[Import, float]] = {}
    for line in file.read_text().splitlines():
        at, cpu, event, module = line.split()
        if event == "begin":
            one = Import(module, float(at) - begin)
            open_ones[module] = one, float(cpu)
            found.append(one)
        elif module in open_ones:
            one, before = open_ones.pop(module)
            one.wall_s, one.cpu_s = float(at) - begin - one.begin, float(cpu) - before
    return found


def run(model: str, options: list[str]) -> Start:
    """Start, ask for a token, end."""
    with tempfile.TemporaryDirectory(prefix="ls-start-") as notes:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        paths = [str(HOOKS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment |= {"PYTHONPATH": os.pathsep.join(paths), NOTES: notes, "RAY_AUTH_TOKEN": secrets.token_hex(16)}
        command = [sys.executable, "-c", COMMAND, "serve", "--model", model, "--port", "0", *options]
        begin = time.time()
        server = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        observer = Observer(server.pid)
        observer.start()
        lines: list[tuple[float, str]] = []
        answered = 0.0
        try:
            assert server.stdout is not None
            for line in server.stdout:
                lines.append((time.time() - begin, line.rstrip()))
                if found := SERVES.search(line):
                    ask(found[2])
                    answered = time.time() - begin
                    break
            processes = observer.stop()
            for process in processes:
                if (file := Path(notes) / str(process.pid)).exists():
                    process.imports = imports_in(file, begin)
        finally:
            server.send_signal(signal.SIGTERM)
            rest = threading.Thread(target=lambda: [None for _ in server.stdout or ()], daemon=True)
            rest.start()
            try:
                server.wait(END_S)
            except subprocess.TimeoutExpired:
                server.kill()
    if not answered:
        raise SystemExit("the start failed:\n" + "\n".join(line for _, line in lines))
    return Start(lines, processes, answered)


def ask(url: str) -> None:
    """Ask for one token."""
    name = httpx.get(f"{url}/v1/models", trust_env=False, timeout=60).json()["data"][0]["id"]
    body = {"model": name, "prompt": "def", "max_tokens": 1}
    httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).raise_for_status()


def show(start: Start) -> None:
    """Print the timeline."""
    print("  at s  line")
    for at, line in start.lines:
        print(f"{at:6.1f}  {line}")
    print("\n  at s  CPU s  process, and when it imported what: seconds of it, of which processor time")
    for process in start.processes:
        print(f"{process.first:6.1f} {process.cpu_s:6.2f}  {process.name}")
        for one in process.imports:
            if one.module == "process" or one.wall_s >= 0.05:
                print(f"{one.begin:14.1f}    {one.module} {one.wall_s:.2f} ({one.cpu_s:.2f})")


def summary(start: Start) -> str:
    """The line to compare."""
    all_of_them = f"{start.cpu_s:.1f} s of processor time in {len(start.processes)} processes"
    return f"first token after {start.token_s:.1f} s; {all_of_them}"


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--quiet", action="store_true", help="the last line of each start alone")
    parser.add_argument("--json", type=Path, help="file for what was seen")
    parser.add_argument("options", nargs="*", help="of `latentserve serve`, behind --")
    arguments = parser.parse_args()
    seen: list[dict[str, Any]] = []
    for _ in range(arguments.repeats):
        start = run(arguments.model, arguments.options)
        if not arguments.quiet:
            show(start)
        print(summary(start), flush=True)
        seen.append(asdict(start))
    if arguments.json:
        arguments.json.write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
