"""How long a row must be before sparse attention selects entries, which shorter rows attend to altogether."""

from __future__ import annotations

from typing import Final

from kernels.page import PAGE_TOKENS, pages_for
from workers.models.config import ModelConfig

BEYOND: Final = 2 * PAGE_TOKENS
"""Tokens by which rows of a self-test are longer than that, at the most."""


def selects_from(config: ModelConfig) -> int:
    """The shortest row of which attention does not select all entries; 0 where it does so of every row."""
    if (compression := config.compression) is not None:
        return max(((compression.top_k + 1) * layer.ratio for layer in compression.layers if layer.indexed), default=0)
    return 0 if config.indexing is None else config.indexing.top_k + 1


def pages_to_select(config: ModelConfig, width: int) -> int:
    """Pages of a row that is `BEYOND` tokens longer than that, and what a step of `width` feeds and drafts for it; 0
    where attention never selects."""
    least = selects_from(config)
    return pages_for(least + BEYOND + 4 * width) if least else 0
