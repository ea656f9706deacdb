"""Help of the command, and how fast it comes."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kernels

COMMANDS = [("serve",), ("generate",), ("selftest",), ("bench", "latency"), ("bench", "http"), ("bench", "compare")]


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_shows_examples(command, path):
    ran = command(*path, "--help")
    assert ran.code == 0
    assert "Examples:" in ran.out
    assert f"latentserve {' '.join(path)} " in ran.out.partition("Examples:")[2]


def test_version(command):
    assert command("--version").out == f"latentserve {kernels.__version__}\n"


def test_an_unknown_command(command):
    ran = command("sevre")
    assert ran.code == 2
    assert "sevre" in ran.err


def test_help_needs_nothing_heavy():
    # What makes a start slow is imports; their absence is what can be tested on a busy machine.
    script = (
        "import sys\nfrom deploy.cli import main\nsys.argv[1:] = ['generate', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'transformers', 'zmq', 'numpy', 'fastapi'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


def test_the_end_of_a_command_searches_nothing_for_garbage():
    script = (
        "import atexit, gc, sys\nfrom deploy.cli import main\nsys.argv[1:] = ['--version']\n"
        "atexit.register(lambda: print(len(gc.get_objects()) < 1000 < gc.get_freeze_count()))\nmain()"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert ran.stdout.splitlines()[-1] == "True"
