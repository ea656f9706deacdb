"""xgrammar, imported without transformers: it names three of transformers' classes, and uses none of them here.

Importing transformers takes a second, during which a rank that starts, or serves, could do little else.
"""

from __future__ import annotations

from workers.unimported import unimported

with unimported("transformers"):
    import xgrammar as xgr

__all__ = ["xgr"]
