"""Lets every Python process that has this folder on its PYTHONPATH do for benchmarks what replicas do not do: read the
checkpoints of `bench/generated.py`, and accept drafts as `bench/synthetic_acceptance.py` says.

The processes of a replica are started by others, Ray among them, and know nothing of benchmarks. Python imports a
module of this name when it starts. Nothing more happens until a process imports one of the modules below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MARK = "generated.json"
ACCEPTANCE = "LATENTSERVE_BENCH_ACCEPTANCE"
BENCH = str(Path(__file__).resolve().parent.parent)


def generated_checkpoints(module: ModuleType) -> None:
    """Checkpoints whose folder has a mark are generated as they are read."""
    plain, plain_files = module.Checkpoint.open, module.weight_files

    def opened(folder: str | Path) -> Any:
        if not (Path(folder) / MARK).exists():
            return plain(folder)
        # Not sooner: it imports what imports this module.
        sys.path.append(BENCH)
        import generated

        return generated.opened(folder, plain)

    def files(folder: Path) -> Any:
        mark = folder / MARK
        return [mark] if mark.exists() else plain_files(folder)

    module.Checkpoint.open = staticmethod(opened)
    module.weight_files = files


def synthetic_acceptance(module: ModuleType) -> None:
    """Steps accept as many drafts as a file says, where the environment names one."""
    if ACCEPTANCE in os.environ:
        sys.path.append(BENCH)
        from synthetic_acceptance import Agreement

        module.accept_drafts = Agreement.of(Path(os.environ[ACCEPTANCE])).before(module.accept_drafts)


def synthetic_drafts(module: ModuleType) -> None:
    """Steps make random drafts while that file says how many are accepted."""
    if ACCEPTANCE in os.environ:
        sys.path.append(BENCH)
        from synthetic_acceptance import Agreement

        module.StepParts.draft = Agreement.of(Path(os.environ[ACCEPTANCE])).behind(module.StepParts.draft)


HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "workers.weights.checkpoint": generated_checkpoints,
    "workers.step.decode": synthetic_acceptance,
    "workers.step.mixed": synthetic_acceptance,
    "workers.step.parts": synthetic_drafts,
}
"""Hooks that change a module after it was executed, by its name."""


class _Hooked(Loader):
    """Loads a module, then changes it."""

    def __init__(self, plain: Loader, hook: Callable[[ModuleType], None]) -> None:
        self._plain, self._hook = plain, hook

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as usual."""
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module as usual, then run the hook."""
        self._plain.exec_module(module)
        self._hook(module)


class _Finder(MetaPathFinder):
    """Finds those modules where anybody would, and nothing else."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """Find what is to be changed as it is imported."""
        spec = PathFinder.find_spec(name, path) if name in HOOKS else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Hooked(spec.loader, HOOKS[name])
        return spec


sys.meta_path.insert(0, _Finder())
