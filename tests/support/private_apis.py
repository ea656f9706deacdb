"""Removal of another project's private parts, to see what is told of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType

import pytest

from kernels.private_api import PrivateApi, logger


@contextmanager
def untouched(*modules: ModuleType) -> Iterator[list[str]]:
    """Let these modules, within this context, know nothing of what they lean on, as in a process that has just begun.
    Yields the list that fills with what they log of it, whatever other tests made of the logger."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    level = logger.level
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if isinstance(value, PrivateApi):
                    patch.setattr(module, name, replace(value))
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
        try:
            yield lines
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)
