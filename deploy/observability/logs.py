"""Structured logs of every process of an application: JSON lines that say which application and process wrote them."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

from deploy.api.logs import FIELDS, JsonFormatter
from deploy.config import LogConfig

LOGGERS = ("latentserve", "deploy", "workers")


def configure(config: LogConfig, stream: TextIO | None = None, **context: Any) -> None:
    """Send the project's loggers to `stream` (default: stderr, which Ray keeps in a file per process).

    `context` becomes part of every line, beside the fields of the log call (request ids among them).
    """

    def add_context(record: logging.LogRecord) -> bool:
        record.__dict__[FIELDS] = context | (getattr(record, FIELDS, None) or {})
        return True

    # Not sys.stderr: Serve wraps that of its replicas into log lines of its own.
    handler = logging.StreamHandler(stream or sys.__stderr__)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(add_context)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(config.level)
        logger.propagate = False
    logging.getLogger("latentserve.access").setLevel(config.level if config.access else "WARNING")
