"""The OpenAI-compatible HTTP front of a replica."""

from deploy.api.app import create_app
from deploy.api.config import ApiConfig
from deploy.api.logs import configure_logging

__all__ = ["ApiConfig", "configure_logging", "create_app"]
