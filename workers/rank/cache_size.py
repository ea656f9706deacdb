"""Number of pages that a rank has in its cache: what its memory holds beside all else that is to be there."""

from __future__ import annotations

import psutil
import torch

from workers.config import EngineConfig
from workers.fit.cache_budget import gpu_cache_budget, pages_within
from workers.parallel.group import Group
from workers.rank.role import Role
from workers.rank.sharing import cpu_cache_bytes


def own_pages(
    config: EngineConfig, group: Group, device: torch.device, page_bytes: int, context: int, width: int, taken: int
) -> int:
    """Pages of each rank, the null page included: as many as the rank with the fewest has room for. `taken`: bytes that
    will be taken beside the cache. RuntimeError where there is no room. Collective."""
    pages = _room_for(config, device, page_bytes, context, width, taken)
    return int(group.minimum(torch.tensor([pages], dtype=torch.int64, device=device)).item())


def _room_for(config: EngineConfig, device: torch.device, page_bytes: int, context: int, width: int, taken: int) -> int:
    if config.cache_pages is not None:
        return config.cache_pages
    advice = ""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        room = gpu_cache_budget(free, total, taken, config.memory_fraction)
        advice = (
            f"; {free / 2**20:.0f} of the GPU's {total / 2**20:.0f} MiB are free: give a larger memory_fraction or "
            "more ranks, or end what else uses it"
        )
    else:
        room = cpu_cache_bytes(config, psutil.virtual_memory().available)
    placed = config.mesh().shards.count
    pages = pages_within(room, page_bytes, config.max_rows, context, width, placed, in_pieces=config.invariant)
    if pages < 2:
        raise RuntimeError(
            f"no room for the latent cache: {room / 2**20:.0f} MiB left, a page takes {page_bytes / 2**20:.2f} MiB"
            f"{advice}"
        )
    return pages


def check_standby(config: EngineConfig, role: Role, device: torch.device) -> None:
    """RuntimeError where nobody can say how much memory of `device` a second engine takes."""
    if role != "alone" and device.type == "cuda" and not config.graphs:
        raise RuntimeError(
            "health.standby = hot needs graphs on a GPU, since what a second engine takes is measured where they are "
            "captured, and engine.graphs = false has none: leave that out, or give standby none or imported"
        )


def words_of_standby(config: EngineConfig, device: torch.device, price: int, page_bytes: int, taken: int) -> str:
    """Say what becomes of the room of an engine that stands by, which takes `price` bytes. With `cache_pages` nothing
    is set aside for it; `taken`: bytes that are about to be taken beside the cache."""
    needed = f"{price / 2**30:.2f} GiB"
    if config.cache_pages is None:
        return f"{needed} of each GPU are left for an engine that stands by"
    left = torch.cuda.mem_get_info(device)[0] - taken - config.cache_pages * page_bytes
    if left >= price:
        return f"cache_pages = {config.cache_pages} leave the {needed} of this GPU that an engine that stands by takes"
    return (
        f"an engine that stands by takes {needed} of each GPU, and cache_pages = {config.cache_pages} leave "
        f"{max(0, left) / 2**30:.2f}: give fewer, or leave that out; otherwise none will stand by, or one takes memory "
        "that serving needs"
    )
