"""Exchanges between ranks that share out one latent cache, over memory that all of them write (`SymmetricMemory`)."""

from __future__ import annotations

import torch
import torch.distributed as dist

from kernels.runtime.dependent import launches_dependently
from kernels.shard_exchange import Inbox, gather_shards, merge_shards
from workers.parallel.mesh import Mesh
from workers.parallel.symmetric import SymmetricMemory


class ShardExchange:
    """The inbox of this rank, among those along `cache`. Calls are ordered by one stream, captured or not; all of these
    ranks make the same ones."""

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        """All ranks of the world together; nobody exchanges before all of them are through. RuntimeError where the GPUs
        cannot map each other's memory."""
        count, first = mesh.cache.size, mesh.world.rank - mesh.cache.rank
        self._memory = SymmetricMemory(Inbox.nbytes(count), device)
        addresses = self._memory.addresses[first : first + count]
        self._inbox = Inbox.of(self._memory.own, addresses, mesh.cache.rank)
        self._dependent = launches_dependently(device)
        torch.cuda.synchronize(device)  # the inbox is empty
        dist.barrier()

    def gather(self, part_TY: torch.Tensor, out_TDY: torch.Tensor) -> None:
        """out[t, d] = row t of shard d's part."""
        gather_shards(part_TY, self._inbox, out_TDY, dependent=self._dependent)

    def merge(
        self,
        part_TDHL: torch.Tensor,
        lse_TDH: torch.Tensor,
        out_THL: torch.Tensor,
        out_lse_TH: torch.Tensor,
        *,
        tree: bool = False,
    ) -> None:
        """out, out_lse = attention of this rank's heads to the entries of all shards, of which each has its part.
        `tree`: see `kernels.shard_exchange.merge_shards`."""
        merge_shards(part_TDHL, lse_TDH, self._inbox, out_THL, out_lse_TH, tree=tree, dependent=self._dependent)
