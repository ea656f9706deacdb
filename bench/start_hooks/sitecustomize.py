"""Lets every Python process that has this folder on its PYTHONPATH note when it begins, and when it imports the large
libraries, for `bench/start.py`.

Python imports a module of this name when it starts. Where the environment names no folder for the notes, nothing
happens.
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NOTES = "LATENTSERVE_BENCH_START"
NOTED = {
    "aiohttp",
    "fastapi",
    "numpy",
    "pandas",
    "ray",
    "ray.dashboard",
    "ray.serve",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "xgrammar",
}
"""Modules whose imports are noted; those within another one of them count for both."""


def note(event: str, module: str) -> None:
    """Write a line: wall time, processor time of this process, what, and of which module."""
    with open(os.path.join(os.environ[NOTES], str(os.getpid())), "a") as file:
        file.write(f"{time.time()} {time.process_time()} {event} {module}\n")


class _Noting(Loader):
    """Loads a module, and notes begin and end."""

    def __init__(self, plain: Any) -> None:
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as usual."""
        module: ModuleType | None = self._plain.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as usual."""
        spec = module.__spec__
        module.__loader__ = self._plain
        if spec is not None:
            spec.loader = self._plain
        note("begin", module.__name__)
        try:
            self._plain.exec_module(module)
        finally:
            note("end", module.__name__)


class _Finder(MetaPathFinder):
    """Finds those modules where anybody would, and nothing else."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find what is to be timed as it is imported."""
        spec = PathFinder.find_spec(name, path) if name in NOTED else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Noting(spec.loader)
        return spec


if NOTES in os.environ:
    note("begin", "process")
    sys.meta_path.insert(0, _Finder())
