"""Lets every Python process that has this folder on its PYTHONPATH read the checkpoints of `bench/generated.py`.

The processes of a replica are started by others, Ray among them, and know nothing of benchmarks. Python imports a
module of this name when it starts. Nothing more happens until a process opens such a checkpoint: most never do.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

MODULE = "workers.weights.checkpoint"
MARK = "generated.json"


class _Opening(Loader):
    """Loads the module, then has it open generated checkpoints, too."""

    def __init__(self, plain: Loader) -> None:
        self._plain = plain

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As ever."""
        return self._plain.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As ever, but for one function."""
        self._plain.exec_module(module)
        plain = module.Checkpoint.open

        def opened(folder: str | Path) -> Any:
            if not (Path(folder) / MARK).exists():
                return plain(folder)
            # Not sooner: it imports what imports this module.
            sys.path.append(str(Path(__file__).resolve().parent.parent))
            import generated

            return generated.opened(folder, plain)

        module.Checkpoint.open = staticmethod(opened)


class _Finder(MetaPathFinder):
    """Finds that module where anybody would, and nothing else."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """See `importlib`."""
        spec = PathFinder.find_spec(name, path) if name == MODULE else None
        if spec is not None and spec.loader is not None:
            spec.loader = _Opening(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
