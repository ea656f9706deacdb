"""Lets every Python process that has this folder on its PYTHONPATH read checkpoints of `bench/generated.py`.

The processes of a replica are started by others, Ray among them, and know nothing of benchmarks. Python imports a
module of this name when it starts. Nothing more happens until a process imports the loader: most never do.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

LOADER = "workers.weights.checkpoint"


class _Installing(Loader):
    """Loads the module, then has it open generated checkpoints, too."""

    def __init__(self, plain: Loader) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._plain.exec_module(module)
        # As `generated` imports the loader, it comes after.
        sys.path.append(str(Path(__file__).resolve().parent.parent))
        from generated import install

        install()


class _Finder(MetaPathFinder):
    """Finds the loader where anybody would, and nothing else."""

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != LOADER:
            return None
        spec = PathFinder.find_spec(name, path)  # type: ignore[arg-type]
        if spec is not None and spec.loader is not None:
            spec.loader = _Installing(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
