"""Sharing out of a latent cache by a number of ranks that is chosen at the start."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch

from workers.config import EngineConfig
from workers.fit.shard_choice import ShardChoice, choose_shards
from workers.parallel.group import Group


def cpu_cache_bytes(config: EngineConfig, memory: int) -> int:
    """Bytes that a rank on a CPU takes for its cache, of so many bytes of memory."""
    return min(config.cpu_cache_bytes, memory // 2)


def share_out(
    config: EngineConfig,
    group: Group,
    device: torch.device,
    timeout_s: float,
    progress: Callable[[str], None] | None = None,
    *,
    standby: bool = False,
) -> Group:
    """`group` with as many shards as the settings have, which the ranks choose together where these say auto. Rank 0
    says in a line what they have chosen. `standby`: one of two engines stands by. Raises what `memory_plan` raises."""
    if config.cache_shards != "auto":
        return group
    choice = choose_together(config, group, device, standby=standby)
    if progress is not None and group.mesh.world.first:
        progress(choice.words)
    return group.sharing_out(choice.shards, device, timeout_s)


def choose_together(config: EngineConfig, group: Group, device: torch.device, *, standby: bool = False) -> ShardChoice:
    """The choice for the rank that has least, which is equal on all ranks, and in every start on such machines: it goes
    by memory as a whole, however much of it others use at the time."""
    cuda = device.type == "cuda"
    if cuda and group.symmetric is None and group.mesh.world.size > 1:
        return ShardChoice(1, "cache_shards = 1 (auto): these ranks cannot write each other's memory")
    own = torch.cuda.mem_get_info(device)[1] if cuda else cpu_cache_bytes(config, psutil.virtual_memory().total)
    least = min(int(size) for size in group.gather_bytes(b"%d" % own, device))
    if cuda:
        return choose_shards(config, least, standby=standby)
    as_here = config.model_copy(
        update={"graphs": False, "dtype": "float32" if config.dtype == "auto" else config.dtype}
    )
    return choose_shards(as_here, least, cache_bytes=least)
