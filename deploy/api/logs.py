"""Structured logs: one JSON object a line, with request ids and without a word of any prompt."""

from __future__ import annotations

import datetime
import logging
import sys
from typing import TextIO

import orjson

FIELDS = "fields"
"""Log calls give structured fields as `extra={FIELDS: {...}}`."""


class JsonFormatter(logging.Formatter):
    """time, level, logger, message, then the record's fields; a traceback as `exception`."""

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


def configure_logging(level: int | str = logging.INFO, stream: TextIO | None = None) -> None:
    """Send the loggers under `latentserve` to `stream` (stderr) as JSON. Calling it again replaces the first call's."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("latentserve")
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(level)
