"""All-reduce over memory that every rank of a node maps (torch symmetric memory).

Small sums take one shot (`kernels.one_shot`): every rank writes its part to all others and adds up what it gets, one
exchange instead of a ring's 2 (n - 1), which is what counts for the few rows of a decode step. Larger ones take two:
every rank sums its share of the elements of all parts, then reads the others' sums, which is less to move
(`bench/all_reduce.py`). The others read parts of these where whoever computes a part writes it (`part`), which saves a
copy. torch's kernel that copies a part there itself is not used: it tells the others before all of its warps have
copied. NVLink multicast is not used and stays off.

Written for torch 2.11 to 2.13, whose symmetric memory is private. Without it, or where it does not work, a line is
logged, and sums go over NCCL.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any, Final

import torch
import torch.distributed as dist

from kernels.one_shot import PIECE_BYTES, Inbox, one_shot_add, one_shot_gather, one_shot_sum
from kernels.pending_norm import PendingNorm
from kernels.private_api import PrivateApi
from kernels.runtime.dependent import launches_dependently

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 24
"""Largest part that is summed this way: beyond, NCCL's ring is little slower, and the memory better used."""

ONE_SHOT_BYTES = 1 << 20
"""Largest part that up to 4 ranks sum in one shot: on H200s two shots took longer at this size, on 2 GPUs twice."""
ONE_SHOT_BYTES_OF_MANY = 1 << 19
"""Largest part that more ranks sum in one shot, each of which sends its part to all: not measured."""
_MOST_RANKS = 8
"""Most ranks of which a thread can hold a piece each."""
_TWO_SHOT_RANKS = (2, 4, 8)
"""Numbers of ranks for which torch's kernel is compiled."""

_DTYPES = (torch.bfloat16, torch.float32)

_PRIVATE: Final = PrivateApi(
    "torch",
    (
        "torch.distributed._symmetric_memory.empty",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch._C._distributed_c10d._SymmetricMemory.buffer_ptrs",
        "torch.ops.symm_mem.two_shot_all_reduce_out",
    ),
    "ranks cannot read each other's memory",
)


def one_shot_bytes(ranks: int) -> int:
    """Largest part that every rank gets whole from everyone; 0: none."""
    return ONE_SHOT_BYTES if ranks <= 4 else ONE_SHOT_BYTES_OF_MANY if ranks <= _MOST_RANKS else 0


def fits(x: torch.Tensor, ranks: int) -> bool:
    """Whether `SymmetricSum` of so many ranks can sum into tensors like `x`."""
    aligned = x.nbytes % PIECE_BYTES == 0 and x.data_ptr() % PIECE_BYTES == 0
    most = MOST_BYTES if ranks in _TWO_SHOT_RANKS else one_shot_bytes(ranks)
    return x.dtype in _DTYPES and x.is_contiguous() and 0 < x.nbytes <= most and aligned


class SymmetricMemory:
    """Memory of this rank, uint8, that every rank of the world maps, and where each rank's lies as this one reaches
    it."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        """All ranks together. RuntimeError where the GPUs cannot map each other's memory, or torch has no way to."""
        # Its set-up is the one part of symmetric memory that can fail for the whole host, and nothing here needs it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        _PRIVATE.require()
        import torch.distributed._symmetric_memory as symmetric_memory

        world = dist.group.WORLD
        assert world is not None
        self.own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self.own, world.group_name)
        self.addresses: list[int] = list(self._handle.buffer_ptrs)


class SymmetricSum:
    """The shared memory of one group. Calls are ordered by one stream, captured or not."""

    def __init__(self, device: torch.device, most_bytes: int = MOST_BYTES) -> None:
        """All ranks together; nobody sums before all of them are through. `most_bytes`: room for a part that is summed
        in two shots. RuntimeError where the GPUs cannot map each other's memory, or torch has no way to."""
        _PRIVATE.require()
        world = dist.group.WORLD
        assert world is not None
        self._name, self._one_shot_bytes = world.group_name, one_shot_bytes(world.size())
        self._memory = SymmetricMemory(most_bytes + Inbox.nbytes(world.size()), device)
        self._buffer, inbox = self._memory.own[:most_bytes], self._memory.own[most_bytes:]
        self._inbox = Inbox.of(inbox, [begin + most_bytes for begin in self._memory.addresses], world.rank())
        self._dependent = launches_dependently(device)
        torch.cuda.synchronize(device)  # the inbox is empty

    def in_one_shot(self, out: torch.Tensor) -> bool:
        """Whether a sum into `out` takes one shot. Its kernel is ours, behind which any may be launched dependently."""
        return out.nbytes <= self._one_shot_bytes

    def part(self, out: torch.Tensor) -> torch.Tensor:
        """Return the place for this rank's part of a sum into `out`; the next sum may have the same one."""
        return out if self.in_one_shot(out) else self.shared_part(out)

    def shared_part(self, out: torch.Tensor) -> torch.Tensor:
        """Memory for a part like `out` that the other ranks can read."""
        return self._buffer[: out.nbytes].view(out.dtype).view(out.shape)

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Sum what every rank wrote to its `part`; all get the same bits. What `part` holds then is arbitrary."""
        if self.in_one_shot(out):
            self.one_shot(part, out)
        else:
            self.two_shots(part, out)

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """`all_reduce` in which every rank gets every `part` whole, wherever that lies."""
        one_shot_sum(part, self._inbox, out, dependent=self._dependent)

    def add(self, part_TE: torch.Tensor, residual_TE: torch.Tensor, norm_E: torch.Tensor, out: PendingNorm) -> None:
        """The sum of every `part_TE`, in one shot, to the residual; `out` = its pending norm."""
        one_shot_add(part_TE, self._inbox, residual_TE, norm_E, out, dependent=self._dependent)

    def gathers(self, part_NY: torch.Tensor) -> bool:
        """Whether `gather` takes such parts."""
        in_pieces = part_NY.shape[1] * part_NY.itemsize % PIECE_BYTES == 0 and part_NY.data_ptr() % PIECE_BYTES == 0
        takes = part_NY.dtype in _DTYPES and part_NY.is_contiguous() and in_pieces
        return takes and 0 < part_NY.nbytes <= self._one_shot_bytes

    def gather(self, part_NY: torch.Tensor, out_NGY: torch.Tensor) -> None:
        """out[n, g] = row n of rank g's part, in one shot."""
        one_shot_gather(part_NY, self._inbox, out_NGY, dependent=self._dependent)

    def two_shots(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """`all_reduce` in which every rank sums a share of the elements, and reads the sums of the others; `part` is a
        `shared_part`."""
        torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", self._name, out)


def connect(rank: int, size: int, device: torch.device) -> SymmetricSum | None:
    """Connect the ranks' shared memory. None, with the reason logged by rank 0, if one of them cannot: all decide
    alike."""
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        if rank == 0:
            logger.info("all-reduce over NCCL: the ranks are on %d nodes", len(set(hosts)))
        return None
    shared, problem = None, ""
    try:
        shared = SymmetricSum(device)
    except (RuntimeError, ImportError) as error:
        problem = f"{type(error).__name__}: {error}"
    found = _first_problem(problem, size)
    if shared is not None and not found:
        found = _first_problem(_tried(shared, rank, size, device), size)
    if found and rank == 0:
        logger.warning("all-reduce over NCCL alone, which is slower for small batches; symmetric memory: %s", found)
    return None if found else shared


def _first_problem(own: str, size: int) -> str:
    """The first rank's that has one, with its name; every rank is here by then."""
    problems: list[str | None] = [None] * size
    dist.all_gather_object(problems, own)
    return next((f"rank {index}: {text}" for index, text in enumerate(problems) if text), "")


def _tried(shared: SymmetricSum, rank: int, size: int, device: torch.device) -> str:
    """Return what is wrong with sums in one shot or in two; empty if nothing is. All ranks try all sums, or the others
    would wait."""
    problem = ""
    try:
        for nbytes in (PIECE_BYTES, one_shot_bytes(size) + PIECE_BYTES):
            probe = torch.empty(nbytes // 2, dtype=torch.bfloat16, device=device)
            if fits(probe, size):
                shared.all_reduce(shared.part(probe).fill_(rank + 1.0), probe)
                wrong = probe[probe != size * (size + 1) / 2].tolist()
                if wrong and not problem:
                    problem = f"a sum of {nbytes} bytes over {size} ranks came out as {wrong[0]}"
    except RuntimeError as error:
        problem = f"{type(error).__name__}: {error}"
    return problem
