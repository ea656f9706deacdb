"""Exchanges between ranks that share out one latent cache, over memory that all of them write (torch symmetric memory;
see `symmetric` for what that needs)."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from kernels.runtime.dependent import launches_dependently
from kernels.shard_exchange import Inbox, gather_shards, merge_shards
from workers.parallel.mesh import Mesh


class ShardExchange:
    """The inbox of this rank, among those along `cache`. Calls are ordered by one stream, captured or not; all of these
    ranks make the same ones."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """All ranks of the world together; nobody exchanges before all of them are through. RuntimeError where the GPUs
        cannot map each other's memory."""
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        import torch.distributed._symmetric_memory as symmetric_memory

        world, count = dist.group.WORLD, mesh.cache.size
        assert world is not None
        memory = symmetric_memory.empty(Inbox.nbytes(count), dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(memory, world.group_name)
        first = mesh.world.rank - mesh.cache.rank
        addresses = list(self._handle.buffer_ptrs)[first : first + count]
        self._inbox = Inbox.of(memory, addresses, mesh.cache.rank)
        self._dependent = launches_dependently(device)
        torch.cuda.synchronize(device)  # the inbox is empty
        dist.barrier()

    def gather(self, part_TY: torch.Tensor, out_TDY: torch.Tensor) -> None:
        """out[t, d] = row t of shard d's part."""
        gather_shards(part_TY, self._inbox, out_TDY, dependent=self._dependent)

    def merge(
        self, part_TDHL: torch.Tensor, lse_TDH: torch.Tensor, out_THL: torch.Tensor, out_lse_TH: torch.Tensor
    ) -> None:
        """out, out_lse = attention of this rank's heads to the entries of all shards, of which each has its part."""
        merge_shards(part_TDHL, lse_TDH, self._inbox, out_THL, out_lse_TH, dependent=self._dependent)
