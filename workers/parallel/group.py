"""The ranks of one replica as they communicate: the few collectives the model and the runner use."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch
import torch.distributed as dist

from kernels.ordered_sum import ordered_sum
from kernels.pending_norm import PendingNorm
from kernels.shard_exchange import merge_parts
from kernels.strands import merge_tree
from workers.parallel.mesh import Axis, Mesh
from workers.parallel.rendezvous import rendezvous
from workers.parallel.shard_exchange import ShardExchange
from workers.parallel.symmetric import SymmetricSum, fits
from workers.parallel.symmetric import connect as connect_symmetric


class PeerLost(RuntimeError):
    """A collective failed: another rank is gone, or the link to it."""


_GLOO_LOST = re.compile(r"^\[(?!enforce)[^]]*/gloo/transport/|caused pair closure|connectFullMesh failed")
_NCCL_OURS = re.compile(r"ncclUnhandledCudaError|ncclInvalid(Argument|Usage)")


@contextmanager
def _peers() -> Iterator[None]:
    """PeerLost for errors of the link to the other ranks. What is wrong with this rank stays what it is: arguments that
    do not fit, too little memory, or the fault of a kernel, which CUDA tells whoever calls it next."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError):  # NCCL, the rendezvous
            lost = not _NCCL_OURS.search(str(error))
        else:  # gloo has no type of its own
            lost = type(error) is RuntimeError and _GLOO_LOST.search(str(error)) is not None
        if not lost:
            raise
        raise PeerLost(f"a collective failed ({error})") from error


@dataclass(frozen=True)
class Group:
    """Communication of this rank with the others of its mesh. Each collective names the axis that it runs along; along
    an axis of one rank it is the identity, and in a world of one rank no process group exists.

    A group that was not connected knows its mesh alone, which is enough to load this rank's share of a model.
    """

    mesh: Mesh = field(default_factory=Mesh)
    symmetric: SymmetricSum | None = field(default=None, compare=False)
    """Symmetric memory for sums that are not very large, where all ranks are GPUs of one node."""
    shards: dist.ProcessGroup | None = field(default=None, compare=False)
    """The ranks along `cache`, where there are several and they have no GPUs."""
    exchange: ShardExchange | None = field(default=None, compare=False)
    """Exchange between them, where they are GPUs."""

    @property
    def sharing(self) -> Group | None:
        """This group, if ranks of it share out the cache."""
        return self if self.mesh.cache.size > 1 else None

    @property
    def summed(self) -> Axis:
        """The axis along which the parts of a sum are added up. Attention has sums over `heads`, the feed-forward part
        over `experts`: one group serves both while these are the same ranks. ValueError where they are not."""
        if self.mesh.heads.size != self.mesh.experts.size:
            raise ValueError(
                f"sums over {self.mesh.heads.size} ranks along heads and {self.mesh.experts.size} along experts "
                "need a group each, and there is one"
            )
        return self.mesh.experts

    def part(self, out: torch.Tensor) -> torch.Tensor:
        """Return the place for this rank's part of a sum into `out`: `out` itself, or memory that other ranks read.
        There is one such place, so the sum comes before the next part is written."""
        return self.symmetric.part(out) if self.symmetric is not None and fits(out, self.summed.size) else out

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Sum, over the ranks of `summed`, of what was written to `part`, which `part` gave for `out`."""
        if self.summed.size > 1:
            with _peers():
                if self.symmetric is not None and fits(out, self.summed.size):
                    self.symmetric.all_reduce(part, out)
                else:
                    dist.all_reduce(out)

    def sums_by_kernel(self, out: torch.Tensor) -> bool:
        """Whether the sum of `all_reduce` into `out` is a kernel of ours, behind which another one may be launched
        dependently."""
        return self.symmetric is not None and fits(out, self.summed.size) and self.symmetric.in_one_shot(out)

    def add_sum(self, part_TE: torch.Tensor, residual_TE: torch.Tensor, norm_E: torch.Tensor, out: PendingNorm) -> None:
        """residual += the sum over ranks of `part_TE`, which `sums_by_kernel`; `out` = its pending norm."""
        assert self.symmetric is not None
        self.symmetric.add(part_TE, residual_TE, norm_E, out)

    def gather_columns(self, part_NY: torch.Tensor, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """The columns of the ranks along `heads` side by side, [N, G * Y], in memory from `empty(*shape, dtype=...)`.
        `part_NY` is contiguous."""
        (rows, columns), ranks = part_NY.shape, self.mesh.heads.size
        if ranks == 1:
            return part_NY
        out_NGY = empty(rows, ranks, columns, dtype=part_NY.dtype)
        if self.symmetric is not None and self.symmetric.gathers(part_NY):
            self.symmetric.gather(part_NY, out_NGY)
        else:
            parts_GNY = self.all_gather(part_NY, empty(ranks, rows, columns, dtype=part_NY.dtype))
            out_NGY.copy_(parts_GNY.transpose(0, 1))
        return out_NGY.flatten(1)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """The `x` of every rank of the world, in rank order: `x` is contiguous, `out` [ranks, *x.shape]; returns
        `out`."""
        with _peers():
            dist.all_gather_into_tensor(out.flatten(0, 1), x)
        return out

    def gather_shards(self, part_TY: torch.Tensor, out_TDY: torch.Tensor) -> None:
        """The rows of every rank along `cache` side by side; both are contiguous."""
        if self.exchange is not None:
            self.exchange.gather(part_TY, out_TDY)
            return
        part_DTY = part_TY.new_empty(self.mesh.cache.size, *part_TY.shape)
        with _peers():
            dist.all_gather_into_tensor(part_DTY.flatten(0, 1), part_TY, group=self.shards)
        out_TDY.copy_(part_DTY.transpose(0, 1))

    def merge_shards(
        self,
        part_TDHL: torch.Tensor,
        lse_TDH: torch.Tensor,
        out_THL: torch.Tensor,
        out_lse_TH: torch.Tensor,
        *,
        tree: bool = False,
    ) -> None:
        """out, out_lse = attention of this rank's heads to the entries of all ranks along `cache`, and its log-sum-exp.
        `part_TDHL`, `lse_TDH`: those of the heads of all ranks and this rank's entries. All are contiguous. `tree`:
        parts and result are in fp32, and the parts those of `kernels.strands`, which merges them."""
        if self.exchange is not None:
            self.exchange.merge(part_TDHL, lse_TDH, out_THL, out_lse_TH, tree=tree)
            return
        sent = part_TDHL.transpose(0, 1).contiguous(), lse_TDH.transpose(0, 1).contiguous()
        part_DTHL, lse_DTH = torch.empty_like(sent[0]), torch.empty_like(sent[1])
        with _peers():
            dist.all_to_all_single(part_DTHL, sent[0], group=self.shards)
            dist.all_to_all_single(lse_DTH, sent[1], group=self.shards)
        if tree:
            merged_THL, lse_TH = merge_tree(list(zip(part_DTHL, lse_DTH, strict=True)))
            out_THL.copy_(merged_THL)
            out_lse_TH.copy_(lse_TH * math.log(2))
        else:
            out_lse_TH.copy_(merge_parts(part_DTHL, lse_DTH, out_THL))

    def gather_bytes(self, payload: bytes, device: torch.device) -> list[bytes]:
        """The `payload` of every rank of the world, in rank order, of whatever length; for start-up, not for steps.
        `device`: the ranks' own."""
        ranks = self.mesh.world.size
        if ranks == 1:
            return [payload]
        size_1 = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        sizes = self.all_gather(size_1, size_1.new_empty(ranks, 1)).flatten().tolist()
        width = max(*sizes, 1)  # no collective takes an empty buffer
        padded = bytearray(payload.ljust(width, b"\0"))
        own_B = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        all_GB = self.all_gather(own_B, own_B.new_empty(ranks, width)).cpu()
        return [row_B.numpy().tobytes()[:size] for row_B, size in zip(all_GB, sizes, strict=True)]

    def ordered_sum(self, part_TE: torch.Tensor, part_RTE: torch.Tensor, out_TE: torch.Tensor) -> None:
        """Sum over the ranks of `summed` as a balanced binary tree in rank order, in fp32, rounded once to the dtype of
        `out_TE`.

        An all-reduce may add up in any order. `part_TE` is fp32 and contiguous, `part_RTE` room for every rank's; the
        number of ranks is a power of two.
        """
        row_1Y, ranks = part_TE.view(1, -1), self.summed.size
        if self.symmetric is not None and self.symmetric.gathers(row_1Y):
            self.symmetric.gather(row_1Y, part_RTE.view(1, ranks, -1))
        else:
            self.all_gather(part_TE, part_RTE)
        ordered_sum(part_RTE, out_TE)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank along `heads` the first one's `x`, in place; returns `x`."""
        if self.mesh.heads.size > 1:
            with _peers():
                dist.broadcast(x, src=0)
        return x

    def minimum(self, x: torch.Tensor) -> torch.Tensor:
        """Least value over the ranks of the world, in place; returns `x`."""
        if self.mesh.world.size > 1:
            with _peers():
                dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return x

    @staticmethod
    def connect(mesh: Mesh, init_method: str, device: torch.device, timeout_s: float) -> Group:
        """Join the others (NCCL on GPUs, gloo on CPU); `init_method` is a URL such as tcp://host:port.

        Rank 0 of the world listens at that address alone, and where it is 127.0.0.1 no rank listens to other machines.
        PeerLost when that fails. ValueError where heads or experts are not shared by the whole world: all collectives
        go over one process group, which has every rank. And where GPUs are to share out a cache and cannot write each
        other's memory.
        """
        rank, size, symmetric = mesh.world.rank, mesh.world.size, None
        if not mesh.heads.size == mesh.experts.size == size:
            raise ValueError(
                f"all {size} ranks communicate as one group: they cannot share heads by {mesh.heads.size} and experts "
                f"by {mesh.experts.size}"
            )
        if size > 1:
            with _peers():  # it fails where a rank that was through first has ended meanwhile
                dist.init_process_group(
                    "nccl" if device.type == "cuda" else "gloo",
                    store=rendezvous(rank, size, init_method, timeout_s),
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=device if device.type == "cuda" else None,
                )
                symmetric = connect_symmetric(rank, size, device) if device.type == "cuda" else None
        return Group(replace(mesh, cache=Axis("cache")), symmetric).sharing_out(mesh.cache.size, device, timeout_s)

    def sharing_out(self, shards: int, device: torch.device, timeout_s: float) -> Group:
        """This group, in which nobody shares out a cache yet, with so many neighbours that do. All ranks together.
        ValueError where GPUs cannot write each other's memory."""
        rank, size = self.mesh.world.rank, self.mesh.world.size
        if shards == 1:
            return self
        mesh = replace(self.mesh, cache=Axis("cache", rank % shards, shards))
        with _peers():
            if device.type == "cuda":
                if self.symmetric is None:
                    raise ValueError(
                        f"cache_shards = {shards}, but these ranks cannot write each other's memory, over which they "
                        "would exchange queries: give 1"
                    )
                return replace(self, mesh=mesh, exchange=ShardExchange(mesh, device))
            neighbours = [list(range(begin, begin + shards)) for begin in range(0, size, shards)]
            # Everybody makes all of these groups, in one order.
            groups = [dist.new_group(ranks, timeout=timedelta(seconds=timeout_s)) for ranks in neighbours]
        return replace(self, mesh=mesh, shards=groups[rank // shards])

    @staticmethod
    def close(abort: bool = False) -> None:
        """Leave the group, if there is one. That waits for collectives under way, which may be for ever where a peer is
        lost; `abort` breaks them off."""
        group = dist.group.WORLD
        if group is not None:
            if abort:
                group.abort()
            else:
                dist.destroy_process_group()
