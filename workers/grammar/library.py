"""xgrammar, imported without transformers: it names three of transformers' classes, and uses none of them here.

Importing transformers takes a second, during which a rank that starts, or serves, could do little else.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from typing_extensions import override

if TYPE_CHECKING:
    import xgrammar as xgr

__all__ = ["xgr"]

_UNUSED = "transformers"


class _NamesAlone(ModuleType):
    """Module that has an empty class for every name."""

    @override
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def _load() -> ModuleType:
    """Import xgrammar; where transformers has been imported already, as it is."""
    if _UNUSED in sys.modules:
        import xgrammar

        return xgrammar
    sys.modules[_UNUSED] = _NamesAlone(_UNUSED)
    try:
        import xgrammar
    finally:
        del sys.modules[_UNUSED]
    return xgrammar


if not TYPE_CHECKING:
    xgr = _load()
