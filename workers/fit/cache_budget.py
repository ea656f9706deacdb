"""Number of pages that the latent cache of a rank gets, and the longest request that then fits."""

from __future__ import annotations

from typing import Final

import torch

from kernels.page import PAGE_TOKENS, Shards
from workers.config import EngineConfig
from workers.scheduler import max_entries_per_row, max_pages_per_row

SHORT: Final = 8
"""By this the context is divided that all rows at once are to have room for, where ranks choose how many share out a
cache."""


def fp8_cache(config: EngineConfig, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Whether a model in `dtype` has a cache of FP8 entries. ValueError where it cannot have what is asked for, on
    `device`, if that is known."""
    asked = config.kv_cache_dtype
    if asked == "bf16" and dtype != torch.bfloat16:
        raise ValueError(
            f"kv_cache_dtype = bf16, but the model runs in {str(dtype).removeprefix('torch.')}, and its cache can be "
            "in that or in FP8: give --dtype bfloat16, --kv-cache-dtype auto or --kv-cache-dtype fp8"
        )
    if asked == "fp8" and device is not None and device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            raise ValueError(
                f"kv_cache_dtype = fp8 needs a GPU of compute capability 8.9 or above, and this one has "
                f"{capability[0]}.{capability[1]}: give --kv-cache-dtype auto"
            )
    return asked == "fp8"


def gpu_cache_budget(free: int, total: int, graph_bytes: int, memory_fraction: float) -> int:
    """Bytes that a GPU has left for the cache, of which `free` are free and graphs will take some."""
    return free - graph_bytes - int(total * (1 - memory_fraction))


def pages_within(
    room: int, page_bytes: int, max_rows: int, context: int, width: int, shards: int = 1, *, in_pieces: bool = False
) -> int:
    """Pages of a rank for so many bytes, the null page included: more than every slot at full context is never used.
    `shards`, `in_pieces`: see `longest_request`."""
    full = max_pages_per_row(context, width)
    if in_pieces:
        full = Shards(shards).room_of_a_row(full)
    return min(room // page_bytes, -(-max_rows * full // shards) + 1)


def refuse_rings(config: EngineConfig, *, rings: bool) -> None:
    """ValueError where layers keep something beside their pages in `rings` of slots, and pages are to be kept in host
    memory, where they would be of no use to another request, or to be shared out over ranks."""
    if config.mesh().cache.size > 1 and rings:
        raise ValueError(
            f"cache_shards = {config.cache_shards}, but this model's attention reads a whole cache on every rank: "
            "give 1"
        )
    if config.host_cache_bytes and rings:
        raise ValueError(
            f"host_cache_bytes = {config.host_cache_bytes}, but prompts of this model can begin with pages that others "
            "have computed only where a snapshot of its sliding windows is kept, and host memory keeps none: give 0"
        )


def longest_request(pages: int, context: int, width: int, shards: int = 1, *, in_pieces: bool = False) -> int:
    """Tokens of the longest request, of at most `context`, that fits so many pages, overshoot included. `in_pieces`:
    whether a row's pieces go round the `shards` without exceptions, as in invariant mode."""
    usable = Shards(shards).most_of_a_row(pages - 1) if in_pieces else pages - 1
    return min(context, usable * PAGE_TOKENS - max_entries_per_row(0, width))


def wanted_pages(context: int, max_rows: int, width: int, shards: int = 1, *, in_pieces: bool = False) -> int:
    """Pages of one request of `context` tokens, or of `max_rows` of an eighth of it: whichever takes more. `shards`,
    `in_pieces`: see `longest_request`. That many rows begin on all ranks alike."""
    one = max_pages_per_row(context, width)
    if in_pieces:
        one = Shards(shards).room_of_a_row(one)
    return max(one, max_rows * max_pages_per_row(-(-context // SHORT), width))


def in_words(form: str, pages: int, rows: int, context: int) -> str:
    """Describe the contents of a cache for people: `pages` pages of entries in `form`, the null page included, and the
    number of `rows` of `context` tokens that fit at once."""
    tokens, requests = max(0, pages - 1) * PAGE_TOKENS, f"{rows:,} request{'s' * (rows != 1)}"
    return f"in {form}: {pages:,} pages, {tokens:,} tokens, {requests} of {context:,} tokens at once"


def rows_at(pages: int, max_rows: int, context: int, width: int) -> int:
    """Requests of `context` tokens that so many pages hold at once."""
    return max(0, min(max_rows, (pages - 1) // max_pages_per_row(context, width)))
