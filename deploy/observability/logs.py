"""Structured logs: one JSON object per line, with request ids and without a word of any prompt. Every process of an
application writes them, and says which application and process it is."""

from __future__ import annotations

import datetime
import logging
import sys
from typing import Any, TextIO

import orjson
from typing_extensions import override

from deploy.config.application import LogConfig

FIELDS = "fields"
"""Log calls give structured fields as `extra={FIELDS: {...}}`."""

LOGGERS = ("latentserve", "deploy", "workers")


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, then the record's fields; a traceback as `exception`."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        """The record as one line of JSON."""
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields = getattr(record, FIELDS, None)
        if isinstance(fields, dict):
            line |= fields
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


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
