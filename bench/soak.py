"""A whole application on this machine under clients of every bad habit, for minutes: does a neighbour notice, does
anything grow, is anything left?

    python bench/soak.py --minutes 25
    python bench/soak.py --minutes 60 --clients 2 --small 4 --pause 0.2 --limit 5    # an hour of little load

Serves the demo model, told that it has room for long prompts, through Ray. One well-behaved client streams all the
time and notes the longest gap between two events; another asks `/health` twice a second; the crowd of
`bench/hostile_clients.py` does what it does, requests of 4,000 tokens for 128 choices among them. Prints a line a
minute and the figures at the end. Exits with 1 if one of them is over its limit: a gap or a `/health` of more than a
second, an answer with a status that nobody expects, a process that grew by more than 100 MiB once it was warm, a page,
process or file that is left. The memory of every process of the application and of its Ray is told by name, with what
it grew by in a thousand requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.hostile_clients import Habits  # noqa: E402

CONTEXT = 4096
MIB = 2**20
WARM_SHARE = 0.25
"""Share of the time after which the memory that processes hold is taken for what they may not outgrow."""


def settings(model: Path) -> dict[str, object]:
    """Few pages, so that requests are preempted; a short queue, so that some are refused."""
    engine = {
        "model": str(model),
        "device": "cpu",
        "tensor_parallel": 1,
        "max_rows": 16,
        "token_budget": 128,
        "cache_pages": 256,
        "queue_limit": 160,
    }
    return {"engine": engine, "name": "demo", "port": 0, "drain": {"deregister_s": 0.5, "timeout_s": 30}}


def long_model(folder: Path) -> Path:
    """The demo model with a longer context; what it says at those lengths is nonsense."""
    model = folder / "model"
    shutil.copytree(ROOT / "assets" / "demo", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return model


def named(command: list[str]) -> str:
    """Return a short name for a process."""
    title = command[0]
    if title.startswith("ray::"):
        return title.removeprefix("ray::").split(":latentserve:")[-1].split(".")[0]
    module = next((word for flag, word in pairwise(command) if flag == "-m"), "")
    script = next((word for word in command[1:] if word.endswith(".py")), "")
    return module or Path(script or title).name


class Application:
    """`latentserve serve` as a child."""

    def __init__(self, folder: Path, settings: dict[str, object]) -> None:
        """Returns once it serves. `folder`: for its files, an empty one."""
        temporary = folder / "tmp"
        temporary.mkdir()
        self.temporary = temporary
        file = folder / "serve.yaml"
        file.write_text(json.dumps(settings))  # JSON is YAML
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from deploy.cli import main; main()", "serve", "--config", str(file)],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        while not (found := self._find(r"serving .* at (http://\S+)/v1")):
            if self.process.poll() is not None:
                raise SystemExit("it did not start:\n" + "\n".join(self.lines))
            time.sleep(0.2)
        self.url = found
        self.logs = Path(self._find(r"logs in (\S+)"))

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())

    def _find(self, pattern: str) -> str:
        return next((found[1] for line in list(self.lines) if (found := re.search(pattern, line))), "")

    def processes(self) -> dict[str, psutil.Process]:
        """Front, scheduler and rank, by name."""
        named = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            title = " ".join(process.cmdline())
            for name in ("ServeReplica:latentserve:engine", "SchedulerActor", "WorkerActor"):
                if title.startswith(f"ray::{name}"):
                    named[name] = process
        return named

    def memory(self) -> dict[str, int]:
        """Bytes that the processes hold for themselves, Ray's own among them, by name; those of one name together."""
        held: Counter[str] = Counter()
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error, IndexError):  # it may have ended
                held[named(process.cmdline())] += process.memory_full_info().uss
        return dict(held)

    def stop(self) -> list[str]:
        """End it; returns what is wrong with how it ended."""
        wrong = []
        descendants = psutil.Process(self.process.pid).children(recursive=True)
        begin = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        print(f"ended in {time.monotonic() - begin:.1f} s with code {code}")
        _, alive = psutil.wait_procs(descendants, 10)
        wrong += [f"left behind: {process}" for process in alive]
        wrong += [f"left behind: {path}" for path in self.temporary.iterdir() if path.name != "ray"]
        return wrong


@dataclass
class Neighbour:
    """Observations of the well-behaved clients. They have a process of their own, so that the crowd's work is not
    measured."""

    gap_s: float = 0.0
    """Longest time between two events of a stream."""
    first_s: float = 0.0
    """Longest time to the first one, waiting for a row included."""
    health_s: float = 0.0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)

    def expect(self, good: bool, what: str) -> None:
        """Note what should not have been."""
        if not good:
            self.wrong.append(what)

    async def stream(self, http: httpx.AsyncClient, url: str, until: float) -> None:
        """Stream, request after request."""
        body = {"model": "demo", "prompt": "import os\n", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while time.monotonic() < until:
            asked, times = time.monotonic(), []
            async with http.stream("POST", f"{url}/v1/completions", json=body | {"priority": -1}) as answer:
                if answer.status_code == 429:
                    await answer.aread()
                    await asyncio.sleep(0.1)
                    continue
                self.expect(answer.status_code == 200, f"the neighbour was answered {answer.status_code}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        self.expect(not line.startswith('data: {"error"'), f"the neighbour's stream ended: {line}")
                        times.append(time.monotonic())
            self.tokens += len(times)
            self.gap_s = max([self.gap_s, *(b - a for a, b in pairwise(times))])
            self.first_s = max(self.first_s, times[0] - asked if times else 0.0)

    async def health(self, http: httpx.AsyncClient, url: str, until: float) -> None:
        """Ask `/health`."""
        while time.monotonic() < until:
            begin = time.monotonic()
            answer = await http.get(f"{url}/health")
            self.health_s = max(self.health_s, time.monotonic() - begin)
            self.expect(answer.status_code == 200, f"/health: {answer.status_code} {answer.text}")
            await asyncio.sleep(0.5)


async def watch(url: str, seconds: float, told: Connection) -> None:
    """Be a neighbour for `seconds` seconds; `told` gets what was seen, now and then and at the end."""
    seen, until = Neighbour(), time.monotonic() + seconds
    async with httpx.AsyncClient(timeout=60, trust_env=False) as http, asyncio.TaskGroup() as group:
        group.create_task(seen.stream(http, url, until))
        group.create_task(seen.health(http, url, until))
        while time.monotonic() < until:
            await asyncio.sleep(1)
            told.send(seen)
    told.send(seen)
    told.close()


def run_watch(url: str, seconds: float, told: Connection) -> None:
    """`watch`, as a process."""
    asyncio.run(watch(url, seconds, told))


def newest(told: Connection, before: Neighbour) -> Neighbour:
    """Return the newest observations that were sent."""
    with suppress(EOFError):
        while told.poll():
            before = told.recv()
    return before


def ways(habits: Habits) -> list[Callable[[], Awaitable[None]]]:
    """Return the habits among which a client of the crowd chooses its next action."""
    return [
        *[habits.reads_to_the_end] * 4,
        *[habits.leaves] * 4,
        *[habits.mixes_samplers] * 3,
        habits.leaves_in_the_middle_of_its_body,
        habits.stops_reading_for_a_while,
        habits.talks_nonsense,
        habits.comes_from_a_form,
        habits.asks_for_what_there_is_not,
        habits.dribbles_its_head,
        habits.sends_bodies_of_many_parts,
        habits.tokenizes_a_book,
        lambda: habits.asks_for_much(CONTEXT - 8, 128),
        lambda: habits.asks_for_much(CONTEXT - 8, 1),
    ]


async def crowd(app: Application, options: argparse.Namespace) -> list[str]:
    """The minutes; returns what was wrong."""
    neighbour, habits = Neighbour(), Habits(app.url)
    context = multiprocessing.get_context("spawn")
    told, tell = context.Pipe(duplex=False)
    watcher = context.Process(target=run_watch, args=(app.url, options.minutes * 60, tell), daemon=True)
    watcher.start()
    tell.close()
    begin = time.monotonic()
    until = begin + options.minutes * 60
    processes = app.processes()
    warm: dict[str, int] = {}
    asked = 0
    """Requests that were answered until it was warm."""
    failures: Counter[str] = Counter()

    async def misbehave() -> None:
        choices = ways(habits)
        # Each once at first, so that memory that is kept for the largest requests is there before it counts as warm.
        first = [*dict.fromkeys(choices)]
        while time.monotonic() < until:
            way = first.pop() if first else habits.draw.choice(choices)
            try:
                await asyncio.wait_for(way(), 120)
                await asyncio.sleep(options.pause)
            except Exception as error:  # whatever it is, the crowd goes on, and the end tells
                name = getattr(way, "__name__", "asks_for_much")
                failures[f"{name}: {type(error).__name__}: {str(error)[:60]}"] += 1

    async def ask_for_little(http: httpx.AsyncClient) -> None:
        """Ask for a few tokens, again and again."""
        body = {"model": "demo", "prompt": "def f(", "max_tokens": 4}
        while time.monotonic() < until:
            try:
                answer = await http.post(f"{app.url}/v1/completions", json=body, timeout=600)
                habits.seen[str(answer.status_code)] += 1
            except httpx.HTTPError as error:
                failures[f"asks for little: {type(error).__name__}: {str(error)[:60]}"] += 1
            await asyncio.sleep(options.pause)

    async def report() -> None:
        nonlocal neighbour, asked
        while time.monotonic() < until:
            await asyncio.sleep(min(60.0, max(until - time.monotonic(), 0.1)))
            held, neighbour = app.memory(), newest(told, neighbour)
            if not warm and time.monotonic() - begin > WARM_SHARE * options.minutes * 60:
                warm.update(held)
                asked = sum(habits.seen.values())
            sizes = ", ".join(f"{name} {size // MIB} MiB" for name, size in held.items())
            minutes, gap_s, health_s = (time.monotonic() - begin) / 60, neighbour.gap_s, neighbour.health_s
            print(
                f"{minutes:5.1f} min: gap {gap_s:.2f} s, /health {health_s:.2f} s, first token "
                f"{neighbour.first_s:.2f} s, {neighbour.tokens} tokens, "
                f"answers {dict(sorted(habits.seen.items()))}, {sizes}",
                flush=True,
            )

    async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
        async with asyncio.TaskGroup() as group:
            group.create_task(report())
            for _ in range(options.clients):
                group.create_task(misbehave())
            for _ in range(options.small):
                group.create_task(ask_for_little(http))
        while watcher.is_alive():  # its last request, and what it has to tell
            neighbour = newest(told, neighbour)
            await asyncio.sleep(0.1)
        neighbour = newest(told, neighbour)
        wrong = neighbour.wrong + [f"{count} x {what}" for what, count in failures.items()]
        wrong += await left_over(http, app.url)
    if processes.keys() != app.processes().keys() or app.processes() != processes:
        wrong.append("a process of the replica was replaced")
    else:
        grown = {name: size - warm.get(name, size) for name, size in app.memory().items()}
        requests = max(sum(habits.seen.values()) - asked, 1)
        slopes = [f"{name} {size / MIB:.1f} MiB ({size / requests * 1000 / MIB:.2f})" for name, size in grown.items()]
        print(f"grown since warm, within {requests} requests (in a thousand of them):", ", ".join(slopes))
        wrong += [
            f"{name} grew by {size // MIB} MiB" for name, size in grown.items() if size > options.growth_mib * MIB
        ]
    for name, seconds in (("gap of the neighbour's stream", neighbour.gap_s), ("/health", neighbour.health_s)):
        print(f"longest {name}: {seconds:.2f} s")
        if seconds > options.limit:
            wrong.append(f"{name}: {seconds:.2f} s")
    return wrong


async def left_over(http: httpx.AsyncClient, url: str, patience_s: float = 60.0) -> list[str]:
    """Return what requests hold although all clients have gone."""
    deadline = time.monotonic() + patience_s
    while True:
        text = (await http.get(f"{url}/metrics")).text
        now = {name: float(value) for name, value in re.findall(r"^latentserve_(\w+) (\S+)$", text, re.M)}
        held = {name: now[name] for name in ("requests_in_flight", "engine_running", "engine_waiting") if now[name]}
        if now["engine_pages_free"] != now["engine_pages_total"]:
            held["pages"] = now["engine_pages_total"] - now["engine_pages_free"]
        if not held:
            return []
        if time.monotonic() > deadline:
            return [f"still held after {patience_s:.0f} s: {held}"]
        await asyncio.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=25)
    parser.add_argument("--clients", type=int, default=16, help="clients of bad habits at any moment")
    parser.add_argument("--small", type=int, default=0, help="clients beside them that ask for a few tokens each time")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a client waits between its actions")
    parser.add_argument("--limit", type=float, default=1.0, help="seconds of the longest gap and the slowest /health")
    parser.add_argument("--growth-mib", type=int, default=100, help="MiB that a process may grow once it is warm")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))  # and with it the application
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        app = Application(Path(folder), settings(long_model(Path(folder))))
        try:
            wrong = asyncio.run(crowd(app, options))
            errors = [log for log in app.logs.glob("worker-*.err") if "Traceback" in log.read_text()]
            wrong += [f"{log.name}: {log.read_text()[-2000:]}" for log in errors]
            wrong += app.stop()
        finally:
            if app.process.poll() is None:
                app.process.send_signal(signal.SIGTERM)
                app.process.wait(120)
    print("\n".join(f"WRONG: {what}" for what in wrong) or "nobody noticed, nothing is left")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
