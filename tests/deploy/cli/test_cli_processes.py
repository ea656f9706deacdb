"""The command as the user runs it: in processes of its own, with the demo model."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from workers.config import DEMO_MODEL

LATENTSERVE = [sys.executable, "-c", "from deploy.cli import main; main()"]


def generate(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LATENTSERVE, "generate", *args],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.long
def test_width_changes_drafts_and_not_the_text():
    prompt = ("--prompt", "def read_lines(path):", "--max-tokens", "60")
    one = generate(*prompt, "--width", "1")
    assert (one.returncode, one.stdout[-1:]) == (0, "\n")
    assert "rank 0" in one.stderr
    three = json.loads(generate(*prompt, "--width", "3", "--json", "--quiet").stdout)
    assert three["text"] == one.stdout[:-1]
    assert three["usage"]["completion_tokens"] == 60
    assert 0 < three["drafts"]["accepted"] <= three["drafts"]["offered"]


@pytest.mark.long
def test_the_first_cause_is_said_without_a_traceback(tmp_path):
    """The cause is printed as it is written, without the name of a Python class."""
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "model.safetensors").unlink()
    ran = generate("--model", str(model), "--prompt", "x", "--quiet")
    assert (ran.returncode, ran.stdout) == (1, "")
    (line,) = ran.stderr.splitlines()
    assert re.match(r"error: rank 0: (?!\w*Error)", line)
    assert str(model) in line


QUIET = [
    "fit demo -q",
    pytest.param("generate demo --prompt-ids 3,14 --max-tokens 3 --device cpu -q", marks=pytest.mark.long),
    pytest.param(
        "selftest demo --device cpu --tensor-parallel 1 --max-rows 1 --token-budget 64 -q", marks=pytest.mark.long
    ),
]


@pytest.mark.parametrize("command", QUIET)
def test_a_quiet_command_says_nothing_on_stderr(command):
    """Libraries say nothing on stderr either."""
    ran = subprocess.run([*LATENTSERVE, *command.split()], capture_output=True, text=True, timeout=300, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.mark.parametrize("command", ["generate --prompt x", "serve --port 0", "selftest", "bench latency"])
def test_what_config_json_alone_decides_is_said_before_anything_starts(command, tmp_path):
    started = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}  # where Ray and sockets would leave something
    ran = subprocess.run(
        [*LATENTSERVE, *command.split(), "--tensor-parallel", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **started},
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    (line,) = ran.stderr.splitlines()
    assert line.startswith("error: tensor_parallel = 3 (--tensor-parallel): ")
    assert line.endswith("values that work: 1, 2, 4, 8")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("number", "moment", "background"),
    [
        pytest.param(signal.SIGINT, "loading", False, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "generating", False, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "generating", True, marks=pytest.mark.long),
    ],
)
def test_an_interrupt_ends_everything_in_order(number, moment, background):
    """Shells start what runs in the background with SIGINT ignored."""
    disposition = signal.SIG_IGN if background else signal.SIG_DFL
    command = subprocess.Popen(
        [*LATENTSERVE, "generate", "--prompt", "x", "--max-tokens", "1900", "--ignore-eos", "--width", "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    (command.stderr if moment == "loading" else command.stdout).read(1)
    children = psutil.Process(command.pid).children(recursive=True)
    assert len(children) >= 2
    if number == signal.SIGINT:
        os.killpg(command.pid, number)  # as a terminal does
    else:
        command.send_signal(number)
    _, said = command.communicate(timeout=120)
    assert command.returncode == 130
    assert b"Traceback" not in said
    assert b"is killed" not in said
    _, alive = psutil.wait_procs(children, timeout=60)
    assert not [child for child in alive if child.status() != psutil.STATUS_ZOMBIE]


def session_of(leader: int) -> list[psutil.Process]:
    """Return the processes of a session that are left, once they had time to end."""
    deadline = time.monotonic() + 60
    while True:
        left = []
        for pid in psutil.pids():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == leader and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                    left.append(psutil.Process(pid))
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.long
def test_a_tokenizer_that_cannot_be_read_is_said_before_the_engine_is_up(tmp_path):
    model = shutil.copytree(DEMO_MODEL, tmp_path / "model")
    (model / "tokenizer.json").write_text("{}")
    command = subprocess.Popen(
        [*LATENTSERVE, "generate", "--model", str(model), "--prompt", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    out, said = command.communicate(timeout=300)
    assert (command.returncode, out) == (1, "")
    assert said.startswith(f"error: the tokenizer in {model} cannot be read: ")
    assert "rank 0" not in said
    assert "Traceback" not in said
    assert session_of(command.pid) == []


def test_an_interrupt_while_the_prompt_is_awaited_ends_everything():
    command = subprocess.Popen(
        [*LATENTSERVE, "generate", "--prompt", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # the tests may run in a background
    )
    deadline = time.monotonic() + 60
    # Besides the command and its scheduler and rank there is Python's resource tracker.
    while len(psutil.Process(command.pid).children(recursive=True)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    os.killpg(command.pid, signal.SIGINT)
    command.wait(timeout=120)
    assert command.stderr is not None
    assert (command.returncode, command.stderr.read()) == (130, b"")
    assert session_of(command.pid) == []


@pytest.mark.long
def test_latency_of_a_context_of_one_page():
    ran = subprocess.run(
        [*LATENTSERVE, "bench", "latency", "--input", "8", "--output", "2,6", "--repeats", "1", "--json", "--quiet"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    (result,) = json.loads(ran.stdout)["results"]
    # Tokens a second are a figure, not a test; a step that takes seconds is a wrong unit.
    assert 0 < result["prefill_time"] < 5
