"""The tensor-parallel group of one replica: the few collectives the model and the runner use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist

from kernels.ordered_sum import ordered_sum
from kernels.pending_norm import PendingNorm
from workers.parallel.rendezvous import rendezvous
from workers.parallel.symmetric import SymmetricSum, fits
from workers.parallel.symmetric import connect as connect_symmetric

INVARIANT_RANKS: Final = (1, 2, 4, 8)
"""Numbers of ranks on which invariant mode computes the same bits."""


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
class TensorParallel:
    """Rank `rank` of `size`; with `size` 1 every collective is the identity and no process group exists."""

    rank: int = 0
    size: int = 1
    symmetric: SymmetricSum | None = field(default=None, compare=False)
    """For sums that are not very large, where all ranks are GPUs of one node."""

    def part(self, out: torch.Tensor) -> torch.Tensor:
        """Where this rank's part of a sum into `out` is to be written: `out` itself, or memory that other ranks read.
        There is one such place, so the sum comes before the next part is written."""
        return self.symmetric.part(out) if self.symmetric is not None and fits(out, self.size) else out

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Sum over ranks of what was written to `part`, which `part` gave for `out`."""
        if self.size > 1:
            with _peers():
                if self.symmetric is not None and fits(out, self.size):
                    self.symmetric.all_reduce(part, out)
                else:
                    dist.all_reduce(out)

    def sums_by_kernel(self, out: torch.Tensor) -> bool:
        """Whether the sum of `all_reduce` into `out` is a kernel of ours, behind which another one may be launched
        dependently."""
        return self.symmetric is not None and fits(out, self.size) and self.symmetric.in_one_shot(out)

    def add_sum(self, part_TE: torch.Tensor, residual_TE: torch.Tensor, norm_E: torch.Tensor, out: PendingNorm) -> None:
        """residual += the sum over ranks of `part_TE`, which `sums_by_kernel`; `out` = its pending norm."""
        assert self.symmetric is not None
        self.symmetric.add(part_TE, residual_TE, norm_E, out)

    def gather_columns(self, part_NY: torch.Tensor, empty: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Every rank's columns side by side, [N, size * Y], in memory from `empty(*shape, dtype=...)`. `part_NY` is
        contiguous."""
        rows, columns = part_NY.shape
        if self.size == 1:
            return part_NY
        out_NGY = empty(rows, self.size, columns, dtype=part_NY.dtype)
        if self.symmetric is not None and self.symmetric.gathers(part_NY):
            self.symmetric.gather(part_NY, out_NGY)
        else:
            parts_GNY = self.all_gather(part_NY, empty(self.size, rows, columns, dtype=part_NY.dtype))
            out_NGY.copy_(parts_GNY.transpose(0, 1))
        return out_NGY.flatten(1)

    def all_gather(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Every rank's `x`, in rank order: `x` is contiguous, `out` [size, *x.shape]; returns `out`."""
        with _peers():
            dist.all_gather_into_tensor(out.flatten(0, 1), x)
        return out

    def gather_bytes(self, payload: bytes, device: torch.device) -> list[bytes]:
        """Every rank's `payload`, in rank order, of whatever length; for start-up, not for steps. `device`: the
        ranks' own."""
        if self.size == 1:
            return [payload]
        size_1 = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        sizes = self.all_gather(size_1, size_1.new_empty(self.size, 1)).flatten().tolist()
        padded = bytearray(payload.ljust(max(sizes), b"\0"))
        own_B = torch.frombuffer(padded, dtype=torch.uint8).to(device)
        all_GB = self.all_gather(own_B, own_B.new_empty(self.size, max(sizes))).cpu()
        return [row_B.numpy().tobytes()[:size] for row_B, size in zip(all_GB, sizes, strict=True)]

    def ordered_sum(self, part_TE: torch.Tensor, part_RTE: torch.Tensor, out_TE: torch.Tensor) -> None:
        """Sum over ranks as a balanced binary tree in rank order, in fp32, rounded once to the dtype of `out_TE`.

        An all-reduce may add up in any order. `part_TE` is fp32 and contiguous, `part_RTE` room for every rank's; the
        number of ranks is a power of two.
        """
        row_1Y = part_TE.view(1, -1)
        if self.symmetric is not None and self.symmetric.gathers(row_1Y):
            self.symmetric.gather(row_1Y, part_RTE.view(1, self.size, -1))
        else:
            self.all_gather(part_TE, part_RTE)
        ordered_sum(part_RTE, out_TE)

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        """Give every rank rank 0's `x`, in place; returns `x`."""
        if self.size > 1:
            with _peers():
                dist.broadcast(x, src=0)
        return x

    def minimum(self, x: torch.Tensor) -> torch.Tensor:
        """Least value over ranks, in place; returns `x`."""
        if self.size > 1:
            with _peers():
                dist.all_reduce(x, op=dist.ReduceOp.MIN)
        return x

    def shard(self, length: int, what: str) -> slice:
        """This rank's part of `length` equal shares; ValueError, naming `what`, when it does not divide."""
        if length % self.size:
            raise ValueError(f"{what} = {length} is not divisible by tensor_parallel = {self.size}")
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    @staticmethod
    def connect(rank: int, size: int, init_method: str, device: torch.device, timeout_s: float) -> TensorParallel:
        """Join the group (NCCL on GPUs, gloo on CPU); `init_method` is a URL such as tcp://host:port.

        Rank 0 listens at that address alone, and where it is 127.0.0.1 no rank listens to other machines. PeerLost when
        that fails.
        """
        symmetric = None
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
        return TensorParallel(rank, size, symmetric)

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
