"""A pytest plugin for a run of all gates: it fails when a launcher launches a kernel whose resources no test has read.

    python -m pytest -p tests.gated -m gate

So a new kernel cannot be left out. A kernel counts however few of its variants are read.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from triton.runtime.jit import JITFunction

import kernels
from tests.support import hopper

_by_workers: set[str] = set()


def launched() -> set[str]:
    """Names, as `hopper.read` has them, of the kernels that the package launches: `module.kernel[grid](...)`."""
    found: set[str] = set()
    for info in pkgutil.walk_packages(kernels.__path__, "kernels."):
        module = importlib.import_module(info.name)
        found.update(hopper.qualified(function) for function in _launches(module))
    return found


def _launches(module: ModuleType) -> Iterator[JITFunction[Any]]:
    nodes = list(ast.walk(ast.parse(inspect.getsource(module))))
    names = dict(vars(module))
    for node in nodes:
        # Some are imported where they are launched, by a function.
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kernels"):
            for alias in node.names:
                names[alias.asname or alias.name] = pkgutil.resolve_name(f"{node.module}.{alias.name}")
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
            first, *rest = ast.unparse(node.func.value).split(".")
            value = names.get(first)
            for name in rest:
                value = getattr(value, name, None)
            if isinstance(value, JITFunction):
                yield value


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist tells what it has read; the others' process, or the only one, judges."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["read"] = sorted(hopper.read)
    elif session.exitstatus == pytest.ExitCode.OK and _missing():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Collect the reads that a process of pytest-xdist has told; one that crashed told nothing."""
    _by_workers.update(getattr(node, "workeroutput", {}).get("read", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the kernels."""
    for name in sorted(_missing()):
        terminalreporter.write_line(f"FAILED {name} is launched, but no gate has read what the compiler made of it")


def _missing() -> set[str]:
    return launched() - hopper.read - _by_workers
