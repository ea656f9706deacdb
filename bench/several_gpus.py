"""Everything that needs several GPUs, on those of this machine, one after the other, and a table of what each did.

    python bench/several_gpus.py                            # all GPUs, the DeepSeek-V2-Lite shape
    python bench/several_gpus.py --ranks 2 --shape v3-slice
    python bench/several_gpus.py --only tests,all-reduce    # some of the steps
    python bench/several_gpus.py --list                     # say the commands and run none
    python bench/several_gpus.py --generated --shape v3     # a model that takes all GPUs, and no disk

The steps: the tests that take several GPUs; the all-reduce of steps, of every size; a folder of random weights; the
self-test with all ranks; time per token and prefill with one rank and with all; greedy tokens in invariant mode, which
have to be equal with one rank, two and all, with the cache in bf16 and in FP8; and 128 streams over HTTP, of one
replica with all ranks and of two with half of them each, through the router.

With `--generated` weights are made as they are read (`bench/generated.py`), and nothing is done with fewer ranks, for
models such as DeepSeek-V3 that only fit all: the all-reduce, the self-test, time per token without drafts and with,
prefill, the cache that a start finds room for and what `latentserve fit` says of it, and over HTTP, through Ray, the
openai client and 128 streams. Random weights accept no draft, so what is printed with drafts is about the time of a
step: divided by the tokens that a step of real weights yields, it is their time per token.

Each step has a limit, and a step that fails ends none of the others. What each printed is written to `--out`, a file a
step. Exit status 0 when all passed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sys.executable
LATENTSERVE = (PYTHON, "-c", "from deploy.cli import main; main()")
PROMPT = "3,14,15,92,65,35,89,79"
LOAD = ("--concurrency", "128", "--requests", "256", "--input", "256", "--output", "128", "--json")
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


def steps(ranks: int, shape: str, folder: Path) -> list[Step]:
    """What is to be done with so many GPUs."""
    model = ("--model", str(folder))
    latency = (*LATENTSERVE, "bench", "latency", *model, "--width", "1", "--batch", "1,16,64,256", "--quiet")
    generate = (*LATENTSERVE, "generate", *model, "--prompt-ids", PROMPT, "--max-tokens", "64")
    invariant = (*generate, "--ignore-eos", "--temperature", "0", "--invariant", "--json")
    serve = (*LATENTSERVE, "serve", *model, "--max-context", "4096", "--max-rows", "128")
    counts = sorted({1, 2, ranks})
    load = ((*LATENTSERVE, "bench", "http", *LOAD),)
    return [
        Step("tests", ((PYTHON, "tests/gpu_tests.py", "--jobs", "4", "--workers", "2", "--only", _files()),), 300.0),
        Step("all-reduce", ((PYTHON, "bench/all_reduce.py", "--ranks", str(ranks)),)),
        Step("weights", ((PYTHON, "bench/checkpoint.py", shape, str(folder)),)),
        Step("selftest", ((*LATENTSERVE, "selftest", *model, "--tensor-parallel", str(ranks)),)),
        *(Step(f"latency-{n}", ((*latency, "--tensor-parallel", str(n)),)) for n in (1, ranks)),
        *(
            Step(name, tuple((*invariant, *cache, "--tensor-parallel", str(n)) for n in counts), 240.0, equal=True)
            for name, cache in (("invariant", ()), ("invariant-fp8", ("--kv-cache-dtype", "fp8")))
        ),
        Step("http-1", load, 240.0, server=(*serve, "--tensor-parallel", str(ranks))),
        Step("http-2", load, 240.0, server=(*serve, "--tensor-parallel", str(ranks // 2), "--replicas", "2")),
    ]


def whole_model_steps(ranks: int, shape: str, folder: Path) -> list[Step]:
    """What is to be done with a model that takes all of so many GPUs, and whose weights are generated."""
    of = ("--model", str(folder), "--tensor-parallel", str(ranks))
    latency = (*LATENTSERVE, "bench", "latency", *of, "--quiet")
    long, few = ("--input", "8192", "--token-budget", "8192"), ("--output", "2,3", "--width", "1")
    eight = ("--input", "1024", "--token-budget", "8192")
    start = (*LATENTSERVE, "generate", *of, "--prompt-ids", PROMPT, "--max-tokens", "8")
    serve = (*LATENTSERVE, "serve", *of, "--max-context", "4096", "--max-rows", "128")
    caches = [("--kv-cache-dtype", form) for form in ("auto", "fp8")]
    every = ("--batch", "1,16,64,256")

    def step(name: str, *commands: tuple[str, ...], server: tuple[str, ...] = ()) -> Step:
        return Step(name, commands, 300.0, server=server, generated=True)

    return [
        step("all-reduce", (PYTHON, "bench/all_reduce.py", "--ranks", str(ranks))),
        step("weights", (PYTHON, "bench/generated.py", shape, str(folder))),
        step("fit", *((*LATENTSERVE, "fit", *of, *form) for form in caches)),
        step("selftest", (*LATENTSERVE, "selftest", *of)),
        step("latency-1", (*latency, *every, "--width", "1")),
        step("latency-2", (*latency, *every, "--width", "2")),
        step("prefill", (*latency, "--batch", "8", *eight, *few), (*latency, "--batch", "1", *long, *few)),
        step("starts", *((*start, *form) for form in caches)),
        step("openai", (PYTHON, "bench/openai_client.py"), server=serve),
        step("http", (*LATENTSERVE, "bench", "http", *LOAD), server=serve),
    ]


def _files() -> str:
    """The test files that take several GPUs, for `--only`."""
    found = sorted((ROOT / "tests").rglob("test_*.py"))
    return ",".join(str(path.relative_to(ROOT)) for path in found if re.search(r"\bmark\.gpus\b", path.read_text()))


def run_step(step: Step, out: Path) -> tuple[bool, float]:
    """Whether it passed, and the seconds it took."""
    begin = time.monotonic()
    until = begin + step.limit_s
    with (out / f"{step.name}.txt").open("w") as log:
        try:
            with _serving(step, log.fileno(), until) as url:
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
def _serving(step: Step, log: int, until: float) -> Iterator[tuple[str, ...]]:
    """The options that lead to the step's endpoint, once it answers; none without one."""
    if not step.server:
        yield ()
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with _process((*step.server, "--port", str(port)), step.generated, stdout=log, stderr=log) as process:
        starts = STARTED_S * (2 if step.generated else 1)
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


def main() -> None:
    """Run them, and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count(), help="default: every GPU")
    parser.add_argument("--shape", default="v2-lite", help="of bench/checkpoint.py, or bench/generated.py")
    parser.add_argument("--generated", action="store_true", help="a model that takes all GPUs, without files")
    parser.add_argument("--only", default="", help="names of steps, with commas")
    parser.add_argument("--folder", type=Path, help="for the weights, kept; default: one that is deleted")
    parser.add_argument("--out", type=Path, default=Path("several_gpus"), help="for what the steps print")
    parser.add_argument("--list", action="store_true", help="print the commands and run none")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        wanted = given.only.split(",") if given.only else []
        listed = whole_model_steps if given.generated else steps
        every = listed(max(given.ranks, 2), given.shape, given.folder or Path(made) / "model")
        if unknown := {*wanted} - {step.name for step in every}:
            parser.error(f"no step is called {', '.join(sorted(unknown))}: {', '.join(step.name for step in every)}")
        chosen = [step for step in every if not wanted or step.name in wanted]
        if given.list:
            for step in chosen:
                for command in (step.server, *step.commands):
                    if command:
                        print(f"{step.name:12}", *command)
            return
        if not 2 <= given.ranks <= torch.cuda.device_count():
            parser.error(f"{given.ranks} ranks on {torch.cuda.device_count()} GPUs: needs at least 2 of each")
        given.out.mkdir(parents=True, exist_ok=True)
        failed = 0
        for step in chosen:
            passed, seconds = run_step(step, given.out)
            failed += not passed
            print(f"{'ok' if passed else 'FAILED':8}{seconds:7.1f} s  {step.name}", flush=True)
    sys.exit(f"{failed} of {len(chosen)} failed: see {given.out}" if failed else 0)


if __name__ == "__main__":
    main()
