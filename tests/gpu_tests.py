"""Runs every test that needs a GPU and prints one line per file.

    python tests/gpu_tests.py                              # all, one after the other
    python tests/gpu_tests.py --jobs 8 --workers 4         # most of their time is compilation

Each file runs in processes of its own, so that a kernel that hangs or crashes the device costs one line, not the run.
Exit status 0 when all passed that the GPUs here are enough for; the last line says how many were skipped. Test files
are found by their marker, `pytest.mark.gpu`; none is listed here. A file sees one GPU, the one with the fewest files;
if it also has the marker `pytest.mark.gpus` it sees all that this program does. A file waits while the processes of the
others may take the GPU's memory. Some take more for a moment: a file that found too little runs once more at the end,
when it is alone. So do files with the marker `pytest.mark.alone`, whose tests measure how fast something happens, or
what of a GPU is free.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from threading import Condition

import torch

ROOT = Path(__file__).resolve().parent.parent
VISIBLE = "CUDA_VISIBLE_DEVICES"
PROCESS_BYTES = 3 << 30
"""Bytes of a GPU's memory for each process that shares a file's tests. A few take several times as much for a
moment."""
NO_MEMORY = "OutOfMemoryError"
"""Name of the error in a failure of a test that found too little GPU memory."""
MOST_ERRORS = 80
"""Lines of a file's failures that are printed."""
_live: set[int] = set()
"""Process groups of the files that run."""


def gpu_test_files() -> list[Path]:
    """Test files that use the `gpu` marker."""
    return sorted(path for path in (ROOT / "tests").rglob("test_*.py") if has_marker(path, "gpu"))


def has_marker(path: Path, name: str) -> bool:
    """Whether a test file uses the marker."""
    return re.search(rf"\bmark\.{name}\b", path.read_text()) is not None


class Gpus:
    """The GPUs that this program sees, and how many files run on each."""

    def __init__(self, count: int, files: int) -> None:
        """`files`: most files on one GPU."""
        visible = os.environ.get(VISIBLE)
        names = [str(gpu) for gpu in range(count)] if visible is None else visible.split(",")[:count]
        self._files, self._most = {name.strip(): 0 for name in names}, files
        self._changed, self._closed = Condition(), False

    def close(self) -> None:
        """Let no further file begin."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def for_file(self, path: Path) -> Iterator[dict[str, str]]:
        """The environment of a file's tests while they run: one GPU, or all. Waits until there is room; CancelledError
        after `close`."""
        environment = {**os.environ}
        several = has_marker(path, "gpus")
        most_or_least = max if several else min
        with self._changed:
            self._changed.wait_for(lambda: self._closed or most_or_least(self._files.values()) < self._most)
            if self._closed:
                raise CancelledError
            names = tuple(self._files)
            if not several:
                names = (environment[VISIBLE],) = (min(self._files, key=lambda name: self._files[name]),)
            for name in names:
                self._files[name] += 1
        try:
            yield environment
        finally:
            with self._changed:
                for name in names:
                    self._files[name] -= 1
                self._changed.notify_all()


def files_at_once(workers: int) -> int:
    """Files whose tests, shared by so many processes each, find memory on the smallest GPU here together."""
    least = min(torch.cuda.get_device_properties(gpu).total_memory for gpu in range(torch.cuda.device_count()))
    return max(1, least // (workers * PROCESS_BYTES))


def run(path: Path, timeout_s: float, workers: int, gpus: Gpus) -> tuple[str, str, float]:
    """(outcome, pytest's summary or the last lines of output, seconds) of one file's GPU tests."""
    with gpus.for_file(path) as environment:
        return run_in(environment, path, timeout_s, workers)


def run_in(environment: dict[str, str], path: Path, timeout_s: float, workers: int) -> tuple[str, str, float]:
    """`run`, with these environment variables."""
    options = ["-m", "gpu", "-p", "no:cacheprovider", "--tb=short", "--disable-warnings"]
    command = [sys.executable, "-m", "pytest", *options, str(path)]
    if workers > 1:
        command += ["-n", str(workers), "--dist", "load"]
    start = time.monotonic()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        _live.add(process.pid)
        try:
            stdout, stderr = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            # With its ranks, which would go on waiting for each other on the GPUs.
            os.killpg(process.pid, signal.SIGKILL)
            stdout, stderr = process.communicate()
            tail = "\n".join([*stdout.splitlines()[-25:], *stderr.splitlines()[-5:]])
            return "TIMEOUT", f"after {timeout_s:.0f} s\n{tail}", time.monotonic() - start
        finally:
            _live.discard(process.pid)
    seconds = time.monotonic() - start
    lines = [line for line in stdout.splitlines() if line.strip()]
    counts = r"\d+ (passed|failed|error|skipped)"
    summary = next((line.strip("= ") for line in reversed(lines) if re.search(counts, line)), "")
    if process.returncode == 0:
        return "ok", summary, seconds
    # Of every failure its name and what went wrong, then how the last one came about.
    errors = [line for line in lines if re.match(r"E  |_{3,} ", line)][:MOST_ERRORS]
    return "FAILED", "\n".join([summary, *errors, *lines[-25:], *stderr.splitlines()[-5:]]), seconds


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="run files whose path contains this, or one of several with commas")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a file may take")
    parser.add_argument("--jobs", type=int, default=1, help="files that run side by side")
    parser.add_argument("--workers", type=int, default=1, help="processes that share a file's tests")
    arguments = parser.parse_args()
    gpus = torch.cuda.device_count()
    if not gpus:
        sys.exit("no GPU here that torch can use: every test would be skipped")
    names = [str(path.relative_to(ROOT)) for path in gpu_test_files()]
    names = [name for name in names if any(part in name for part in arguments.only.split(","))]
    failed, counts = 0, Counter[str]()
    too_little: list[str] = []

    def tell(name: str, outcome: str, text: str, seconds: float) -> None:
        nonlocal failed
        failed += outcome != "ok"
        first, _, rest = text.partition("\n")
        counts.update({what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|skipped)", first)})
        print(f"{outcome:8} {seconds:6.1f} s  {name}  {first}", flush=True)
        if rest:
            print(rest, flush=True)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        lent = Gpus(gpus, files_at_once(arguments.workers))
        options = (arguments.timeout, arguments.workers, lent)
        alone = [name for name in names if has_marker(ROOT / name, "alone")]
        running = {pool.submit(run, ROOT / name, *options): name for name in names if name not in alone}
        try:
            for done in as_completed(running):
                outcome, text, seconds = done.result()
                if arguments.jobs > 1 and outcome == "FAILED" and NO_MEMORY in text:
                    too_little.append(running[done])
                    print(f"again    {seconds:6.1f} s  {running[done]}  found too little memory", flush=True)
                else:
                    tell(running[done], outcome, text, seconds)
            for name in too_little:
                tell(name, *run(ROOT / name, *options))
            for name in alone:
                tell(name, *run(ROOT / name, arguments.timeout, 1, lent))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            lent.close()
            for group in tuple(_live):
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGKILL)
            raise
    total = ", ".join(f"{counts[what]} {what}" for what in ("passed", "failed", "skipped"))
    print(f"{'all passed' if not failed else f'{failed} files failed'} on {gpus} GPU{'s' * (gpus > 1)}: {total}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
