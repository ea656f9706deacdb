"""Common parts of benchmarks of many commands: these run in turn, side by side where each takes a part of the GPUs.
Each has a limit, and gets a line."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Event
from typing import IO

import torch

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
LATENTSERVE = (PYTHON, "-c", "from deploy.cli import main; main()")
STEADY = ("--graphs-at-start", "all")
"""Of a server whose steps are timed: it captures nothing meanwhile."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
_live: set[int] = set()
"""Process groups of what runs."""
_over = Event()
"""Set when nothing else may begin."""
STARTED_S = 120.0
"""Seconds in which an endpoint must answer; one with generated weights, which are many, in twice as many."""


@dataclass(frozen=True)
class Step:
    """A command, or several in turn, perhaps beside a server."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    limit_s: float = 150.0
    gpus: int = 0
    """Number of GPUs that it takes; 0: all, so that nothing runs beside it."""
    tokens_of: str = ""
    """The step whose tokens it has to print."""
    server: tuple[str, ...] = ()
    """Command of an endpoint that runs meanwhile; --port and --url are added."""
    generated: bool = False
    """Whether the model's weights are made as they are read."""


class Gpus:
    """GPUs that are shared among steps. They are given in the order of asking, or a step that takes all would
    starve."""

    def __init__(self, names: Sequence[str]) -> None:
        """`names`: the GPUs as in `CUDA_VISIBLE_DEVICES`."""
        self._all, self._free, self._changed = list(names), list(names), Condition()

    def take(self, count: int) -> list[str]:
        """Take `count` GPUs, all of them for 0, once they are free."""
        wanted = min(count, len(self._all)) or len(self._all)
        with self._changed:
            self._changed.wait_for(lambda: len(self._free) >= wanted)
            taken, self._free = self._free[:wanted], self._free[wanted:]
        return taken

    def give_back(self, taken: Sequence[str]) -> None:
        """Give back GPUs that `take` returned."""
        with self._changed:
            self._free = sorted([*self._free, *taken], key=self._all.index)
            self._changed.notify_all()


def run_step(step: Step, out: Path, patience: float = 1.0, gpus: Sequence[str] = ()) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took. Limits are multiplied by `patience`; `gpus` are those it sees, all
    where none is named."""
    begin = time.monotonic()
    until = begin + step.limit_s * patience
    with (out / f"{step.name}.txt").open("w") as log:
        try:
            with _serving(step, gpus, log.fileno(), until, patience) as url:
                passed = [_run(step, (*command, *url), gpus, log, until) for command in step.commands]
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            log.write(f"{error}\n")
            return False, time.monotonic() - begin
    return all(passed), time.monotonic() - begin


def same_tokens(out: Path, one: str, other: str) -> bool:
    """Whether two steps printed the same tokens, and any."""
    printed = [(out / f"{name}.txt").read_text() for name in (one, other)]
    tokens = [re.findall(r'"token_ids": \[([^\]]*)\]', text) for text in printed]
    return bool(tokens[0]) and tokens[0] == tokens[1]


def _run(step: Step, command: tuple[str, ...], gpus: Sequence[str], log: IO[str], until: float) -> bool:
    """Whether a command passed. Its progress is in the log at once: of one that hangs it says where."""
    with _process(step, command, gpus, stdout=subprocess.PIPE, stderr=log.fileno()) as process:
        printed, _ = process.communicate(timeout=max(until - time.monotonic(), 1.0))
        log.write(f"{printed}\nexit status {process.returncode}\n")
        log.flush()
        return process.returncode == 0


@contextmanager
def _process(
    step: Step, command: tuple[str, ...], gpus: Sequence[str], stdout: int, stderr: int
) -> Iterator[subprocess.Popen[str]]:
    """Run a command in a session of its own, of which nothing outlives this context."""
    own = [str(ROOT), str(ROOT / "tests"), *([str(ROOT / "bench" / "replica_hooks")] if step.generated else [])]
    around = {**os.environ, "PYTHONPATH": os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])}
    if gpus:
        around[VISIBLE] = ",".join(gpus)
    if _over.is_set():
        raise RuntimeError("interrupted")
    process = subprocess.Popen(
        command, cwd=ROOT, env=around, start_new_session=True, text=True, stdout=stdout, stderr=stderr
    )
    _live.add(process.pid)
    try:
        yield process
    finally:
        _live.discard(process.pid)
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _serving(step: Step, gpus: Sequence[str], log: int, until: float, patience: float) -> Iterator[tuple[str, ...]]:
    """The options that lead to the step's endpoint, once it answers; none without one."""
    if not step.server:
        yield ()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url, begin = f"http://127.0.0.1:{port}", time.monotonic()
    with _process(step, (*step.server, "--port", str(port)), gpus, stdout=log, stderr=log) as process:
        starts = STARTED_S * (2 if step.generated else 1) * patience
        wait_until(lambda: _answers(url), lambda: process.poll() is None, min(until, begin + starts))
        os.write(log, f"the endpoint answered after {time.monotonic() - begin:.1f} s\n".encode())
        yield "--url", url


def wait_until(done: Callable[[], bool], alive: Callable[[], bool], until: float) -> None:
    """RuntimeError when whoever should do it has ended, or the time has passed."""
    while not done():
        if not alive():
            raise RuntimeError("the server ended before it answered")
        if time.monotonic() > until:
            raise RuntimeError("the server did not answer in time")
        time.sleep(0.3)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def add_options(parser: argparse.ArgumentParser, out: str) -> None:
    """Add the options of `run_steps`."""
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--folder", type=Path, help="for the weights, kept; default: one that is deleted")
    parser.add_argument("--out", type=Path, default=Path(out), help="for what the steps print")
    parser.add_argument("--patience", type=float, default=1.0, help="what limits are multiplied by")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")


def chosen_steps(parser: argparse.ArgumentParser, given: argparse.Namespace, every: Sequence[Step]) -> list[Step]:
    """Return the steps of `--only`, or all."""
    wanted = given.only.split(",") if given.only else []
    if unknown := {*wanted} - {step.name for step in every}:
        parser.error(f"no step is called {', '.join(sorted(unknown))}: {', '.join(step.name for step in every)}")
    return [step for step in every if not wanted or step.name in wanted]


def list_steps(steps: Sequence[Step]) -> None:
    """Print their commands."""
    for step in steps:
        for command in (step.server, *step.commands):
            if command:
                print(f"{step.name:14}", *command)


def visible_gpus() -> list[str]:
    """Return the GPUs that this program sees, as in `CUDA_VISIBLE_DEVICES`."""
    named = os.environ.get(VISIBLE)
    return [str(index) for index in range(torch.cuda.device_count())] if named is None else named.split(",")


def run_steps(steps: Sequence[Step], given: argparse.Namespace) -> None:
    """Run them, and print a line each. Exits with status 1 where one has failed."""
    given.out.mkdir(parents=True, exist_ok=True)
    gpus, passed = Gpus(visible_gpus()), dict[str, bool]()

    def run(step: Step, own: Sequence[str]) -> None:
        try:
            done, seconds = run_step(step, given.out, given.patience, own)
        finally:
            gpus.give_back(own)
        print(f"{'ok' if done else 'FAILED':8}{seconds:7.1f} s  {step.name}", flush=True)
        passed[step.name] = done

    with ThreadPoolExecutor(max(len(steps), 1)) as threads:
        try:
            for running in [threads.submit(run, step, gpus.take(step.gpus)) for step in steps]:
                running.result()
        except BaseException:  # Ctrl-C, which processes in sessions of their own do not get
            _over.set()
            for group in list(_live):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGTERM)
            raise
    for step in steps:
        if step.tokens_of in passed and not same_tokens(given.out, step.name, step.tokens_of):
            print(f"FAILED  {step.name}: its tokens are not those of {step.tokens_of}")
            passed[step.name] = False
    failed = len(passed) - sum(passed.values())
    sys.exit(f"{failed} of {len(steps)} failed: see {given.out}" if failed else 0)
