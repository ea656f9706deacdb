"""Host memory for pages of the latent cache, which the ranks of a node share.

A slot holds one page of all caches of a rank. All ranks that have a page have the same bits of it, as heads share
latents: so one copy serves all ranks of a node. Keys and values of a draft model with grouped-query attention are
others on each rank, so that is refused beside host memory (`workers.drafters.eagle3.misfits`). Each rank writes its
part of the slots and reads any. Where ranks share out the pages of one cache, a slot is written and read by those that
have its page. The memory is that of an anonymous file (`memfd_create`), which no limit of `/dev/shm` concerns, and
which is gone when the last process that has it is.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from dataclasses import dataclass
from math import gcd
from pathlib import Path
from typing import Final

import psutil
import torch
from torch import Tensor

from workers.parallel.group import Group
from workers.protocol.tiers import saver_of

LEFT_FREE: Final = 0.05
"""Share of the machine's memory that is left to everybody else."""
_CGROUP: Final = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class HostMemory:
    """Slots of host memory, and this rank's place among those that share them."""

    slot_SB: Tensor
    """uint8 [slots, bytes of a page of all caches]."""
    rank: int = 0
    shard_N: tuple[int, ...] = (0,)
    """Of every rank that shares it, this one among them, the number of its shard of the cache."""
    savers: int = 1
    """Ranks that share the copying of a shard's pages, on each node: the largest number that divides how many there
    are on any node, so that what is dealt out evenly to as many is even everywhere."""

    @property
    def slots(self) -> int:
        """Pages that fit."""
        return self.slot_SB.shape[0]

    def writes(self, slot: int) -> bool:
        """Whether this rank, of those that share the memory and have its page, is the one to write this slot."""
        alike = [rank for rank, shard in enumerate(self.shard_N) if shard == self.shard_N[self.rank]]
        return alike[saver_of(slot, len(set(self.shard_N)), len(alike))] == self.rank

    @staticmethod
    def shared(size: int, record_bytes: int, group: Group, device: torch.device) -> HostMemory:
        """`size` bytes for pages of `record_bytes`; all ranks together. RuntimeError where that is not to be had."""
        slots = size // record_bytes
        if slots == 0:
            raise RuntimeError(
                f"host_cache_bytes = {size} is less than one page of latent cache, which takes {record_bytes}: give "
                "more, or 0 for none"
            )
        nodes = group.gather_bytes(node_name().encode(), device)
        own = group.mesh.world.rank
        peers = [rank for rank, node in enumerate(nodes) if node == nodes[own]]
        shards = group.mesh.shards.count  # of which neighbours have one each
        for name in dict.fromkeys(nodes):  # every rank looks at every node: all of them start, or none
            lacking = set(range(shards)) - {rank % shards for rank, node in enumerate(nodes) if node == name}
            if lacking:
                raise RuntimeError(
                    f"host_cache_bytes = {size} and cache_shards = {shards}: a node of rank {nodes.index(name)} has no "
                    f"rank with shard {min(lacking)} of the cache, so nobody there would write its pages: give "
                    "host_cache_bytes 0, or no more cache_shards than there are ranks on each node"
                )
        descriptor, path = -1, ""
        if own == peers[0]:
            free = available_bytes()
            if slots * record_bytes > free:
                raise RuntimeError(
                    f"host_cache_bytes = {size}, but only {free} bytes of memory are free on this node: give less"
                )
            descriptor = os.memfd_create("latentserve pages", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, slots * record_bytes)
            path = f"/proc/{os.getpid()}/fd/{descriptor}"
        path = group.gather_bytes(path.encode(), device)[peers[0]].decode()
        if descriptor < 0:
            try:
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise RuntimeError(
                    f"rank {own} cannot open the host memory of rank {peers[0]} on the same node ({error.strerror}): "
                    "give host_cache_bytes 0, or run both as the same user"
                ) from None
        mapped = mmap.mmap(descriptor, slots * record_bytes)
        group.gather_bytes(b"mapped", device)  # whoever made the file keeps it open until all have it
        os.close(descriptor)
        slot_SB = torch.frombuffer(mapped, dtype=torch.uint8).view(slots, record_bytes)
        savers = gcd(*Counter((node, rank % shards) for rank, node in enumerate(nodes)).values())
        return HostMemory(slot_SB, peers.index(own), tuple(rank % shards for rank in peers), savers)


def available_bytes() -> int:
    """Bytes of memory that this process may still take without anybody being ended for it."""
    memory = psutil.virtual_memory()
    free = int(memory.available - LEFT_FREE * memory.total)
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit != "max":
            free = min(free, int((1 - LEFT_FREE) * int(limit)) - int(used))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def node_name() -> str:
    """Names the machine, and the space in which its processes see each other."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")
