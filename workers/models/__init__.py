"""The models: what a checkpoint folder becomes on one rank.

Imported only when it is asked for: what a config.json says can be known without torch, which takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.models.config import ConfigError, ModelConfig
    from workers.models.deepseek import DeepseekModel
    from workers.models.loading import load_model
    from workers.weights.checkpoint import WeightsError

__all__ = ["ConfigError", "DeepseekModel", "ModelConfig", "WeightsError", "load_model"]

_FROM = {
    "ConfigError": "workers.models.config",
    "DeepseekModel": "workers.models.deepseek",
    "ModelConfig": "workers.models.config",
    "WeightsError": "workers.weights.checkpoint",
    "load_model": "workers.models.loading",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
