"""Memory of a GPU that a second engine takes, which stands by for the one that serves."""

from __future__ import annotations

from typing import Final

from kernels.page import Shards, pages_for
from workers.config import EngineConfig

DRIVER_BYTES: Final = 1 << 30
"""Bytes that a process takes for the driver, cuBLAS and NCCL, before anything of ours: more than was seen."""
GRANULE: Final = 2 << 20
"""Bytes at whose multiples a GPU's memory can be mapped: each layer of a cache begins at one of them."""


def fewest_pages(config: EngineConfig, shards: Shards, selecting: int) -> int:
    """Pages of a rank that stands by, the null page included: as many as the self-test and a rehearsal need.
    `selecting`: see `workers.models.selecting.pages_to_select`; a row has so many beside those of the others."""
    needed = max(config.max_rows, pages_for(config.token_budget)) + selecting + 2
    return -(-needed // shards.count) + 1


def standby_bytes(own: int, cache: int, layers: int) -> int:
    """Bytes that a rank takes which stands by: all that the one that serves takes beside weights and pages (`own`), the
    `cache` of its few pages in so many layers, and what a process takes of itself. Weights and pages are there once.
    The layers of both caches end at multiples of `GRANULE`."""
    return DRIVER_BYTES + own + cache + 2 * layers * GRANULE
