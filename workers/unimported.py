"""Modules that a library imports and does not need here: while it is imported, others stand in for them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from typing_extensions import override


class _NamesAlone(ModuleType):
    """Module that has an empty class for every name."""

    @override
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@contextmanager
def unimported(module: str) -> Iterator[None]:
    """Have whoever imports `module` within this context get one that has empty classes alone; where it has been
    imported before, itself. Afterwards everybody gets it as usual."""
    if module in sys.modules:
        yield
        return
    stand_in = sys.modules[module] = _NamesAlone(module)
    try:
        yield
    finally:
        if sys.modules.get(module) is stand_in:
            del sys.modules[module]
