"""Families of models: what a checkpoint says, what it calls its tensors, and what it becomes on one rank.

Imported only when it is asked for: what a config.json says can be known without torch, which takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.families.loading import load_model
    from workers.families.registry import load_config, parse_config

__all__ = ["load_config", "load_model", "parse_config"]

_FROM = {
    "load_config": "workers.families.registry",
    "load_model": "workers.families.loading",
    "parse_config": "workers.families.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
