"""The models: what a checkpoint folder becomes on one rank.

Imported only when it is asked for: what a config.json says can be known without torch, which takes seconds to import.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.models.config import ModelConfig
    from workers.models.fields import ConfigError
    from workers.models.loading import load_model
    from workers.models.model import Model
    from workers.models.registry import load_config, parse_config
    from workers.weights.checkpoint import WeightsError

__all__ = ["ConfigError", "Model", "ModelConfig", "WeightsError", "load_config", "load_model", "parse_config"]

_FROM = {
    "ConfigError": "workers.models.fields",
    "Model": "workers.models.model",
    "ModelConfig": "workers.models.config",
    "WeightsError": "workers.weights.checkpoint",
    "load_config": "workers.models.registry",
    "load_model": "workers.models.loading",
    "parse_config": "workers.models.registry",
}


def __getattr__(name: str) -> Any:
    if name not in _FROM:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_FROM[name]), name)
