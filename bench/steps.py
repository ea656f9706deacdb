"""What benchmarks of many commands share: these run one after the other, each with a limit, and each gets a line."""

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
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
LATENTSERVE = (PYTHON, "-c", "from deploy.cli import main; main()")
STARTED_S = 120.0
"""Seconds in which an endpoint must answer; one with generated weights, which are many, in twice as many."""


@dataclass(frozen=True)
class Step:
    """A command, or several whose results have to be equal, perhaps beside a server."""

    name: str
    commands: tuple[tuple[str, ...], ...]
    limit_s: float = 150.0
    equal: bool = False
    """Whether the commands have to print the same tokens."""
    server: tuple[str, ...] = ()
    """Of an endpoint that runs meanwhile; --port and --url are added."""
    generated: bool = False
    """Whether the model's weights are made as they are read."""


def run_step(step: Step, out: Path, patience: float = 1.0) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took. Limits are multiplied by `patience`."""
    begin = time.monotonic()
    until = begin + step.limit_s * patience
    with (out / f"{step.name}.txt").open("w") as log:
        try:
            with _serving(step, log.fileno(), until, patience) as url:
                results = [_run((*command, *url), log, until, step.generated) for command in step.commands]
        except (subprocess.TimeoutExpired, RuntimeError) as error:
            log.write(f"{error}\n")
            return False, time.monotonic() - begin
    passed = all(status == 0 for status, _ in results)
    if step.equal:
        tokens = [re.findall(r'"token_ids": \[([^\]]*)\]', printed) for _, printed in results]
        passed = passed and all(own and own == tokens[0] for own in tokens)
    return passed, time.monotonic() - begin


def _run(command: tuple[str, ...], log: IO[str], until: float, generated: bool) -> tuple[int, str]:
    """Exit status and output of a command. Its progress is in the log at once: of one that hangs it says where."""
    with _process(command, generated, stdout=subprocess.PIPE, stderr=log.fileno()) as process:
        printed, _ = process.communicate(timeout=max(until - time.monotonic(), 1.0))
        log.write(f"{printed}\nexit status {process.returncode}\n")
        log.flush()
        return process.returncode, printed


@contextlib.contextmanager
def _process(command: tuple[str, ...], generated: bool, **streams: int) -> Iterator[subprocess.Popen[str]]:
    """In a session of its own, of which nothing outlives this context."""
    own = [str(ROOT), str(ROOT / "tests"), *([str(ROOT / "bench" / "replica_hooks")] if generated else [])]
    path = os.pathsep.join([*own, os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, start_new_session=True, text=True, **streams
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextlib.contextmanager
def _serving(step: Step, log: int, until: float, patience: float) -> Iterator[tuple[str, ...]]:
    """The options that lead to the step's endpoint, once it answers; none without one."""
    if not step.server:
        yield ()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with _process((*step.server, "--port", str(port)), step.generated, stdout=log, stderr=log) as process:
        starts = STARTED_S * (2 if step.generated else 1) * patience
        wait_until(lambda: _answers(url), lambda: process.poll() is None, min(until, time.monotonic() + starts))
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
    """Those of `run_steps`."""
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--folder", type=Path, help="for the weights, kept; default: one that is deleted")
    parser.add_argument("--out", type=Path, default=Path(out), help="for what the steps print")
    parser.add_argument("--patience", type=float, default=1.0, help="what limits are multiplied by")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")


def chosen_steps(parser: argparse.ArgumentParser, given: argparse.Namespace, every: Sequence[Step]) -> list[Step]:
    """Those of `--only`, or all."""
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


def run_steps(steps: Sequence[Step], given: argparse.Namespace) -> None:
    """Run them, and print a line each. Exits with status 1 where one has failed."""
    given.out.mkdir(parents=True, exist_ok=True)
    failed = 0
    for step in steps:
        passed, seconds = run_step(step, given.out, given.patience)
        failed += not passed
        print(f"{'ok' if passed else 'FAILED':8}{seconds:7.1f} s  {step.name}", flush=True)
    sys.exit(f"{failed} of {len(steps)} failed: see {given.out}" if failed else 0)
