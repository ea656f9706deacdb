"""All-reduce over memory that every rank of a node maps (torch symmetric memory).

Every rank writes its part where the others can read it. Small sums take one shot: every rank sums all parts itself, one
exchange instead of a ring's 2 (n - 1), which is what counts for the few rows of a decode step. Larger ones take two:
every rank sums its share of the elements, then reads the others' sums, which is less to read (`bench/all_reduce.py`).
Whoever computes a part writes it there (`part`), which saves a copy. torch's kernel that copies a part there itself is
not used: it tells the others before all of its warps have copied. NVLink multicast is not used and stays off.

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

from kernels.private_ground import PrivateGround

logger = logging.getLogger(__name__)

MOST_BYTES = 1 << 24
"""Largest part that is summed this way: beyond, NCCL's ring is little slower, and the memory better used."""

_ONE_SHOT_BYTES = {2: 1 << 20}
"""Largest part that is summed in one shot, by the number of ranks."""
_ONE_SHOT_BYTES_OF_MANY = 1 << 19
_TWO_SHOT_RANKS = (2, 4, 8)
"""What torch's kernel is compiled for."""

_ALIGNMENT = 16
"""Bytes a part must be a multiple of, and begin at a multiple of."""

_DTYPES = (torch.bfloat16, torch.float32)

_GROUND: Final = PrivateGround(
    "torch",
    (
        "torch.distributed._symmetric_memory.empty",
        "torch.distributed._symmetric_memory.rendezvous",
        "torch.ops.symm_mem.one_shot_all_reduce_out",
        "torch.ops.symm_mem.two_shot_all_reduce_out",
    ),
    "ranks cannot read each other's memory",
)


def one_shot_bytes(ranks: int) -> int:
    """Largest part of which every rank reads everyone's whole."""
    return _ONE_SHOT_BYTES.get(ranks, _ONE_SHOT_BYTES_OF_MANY)


def fits(x: torch.Tensor, ranks: int) -> bool:
    """Whether `SymmetricSum` of so many ranks can sum into tensors like `x`."""
    aligned = x.nbytes % _ALIGNMENT == 0 and x.data_ptr() % _ALIGNMENT == 0
    most = MOST_BYTES if ranks in _TWO_SHOT_RANKS else one_shot_bytes(ranks)
    return x.dtype in _DTYPES and x.is_contiguous() and 0 < x.nbytes <= most and aligned


class SymmetricSum:
    """The shared buffer of one group. Calls are ordered by one stream, captured or not."""

    def __init__(self, device: torch.device, most_bytes: int = MOST_BYTES) -> None:
        """All ranks together. `most_bytes`: room for a part. RuntimeError where the GPUs cannot map each other's
        memory, or torch has no way to."""
        # Its set-up is the one part of symmetric memory that can fail for the whole host, and nothing here needs it.
        os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
        _GROUND.require()
        import torch.distributed._symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None
        self._name, self._one_shot_bytes = group.group_name, one_shot_bytes(group.size())
        self._buffer = symmetric_memory.empty(most_bytes, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric_memory.rendezvous(self._buffer, self._name)

    def part(self, out: torch.Tensor) -> torch.Tensor:
        """Where this rank's part of a sum into `out` has to be; the next sum's will be there, too."""
        return self._buffer[: out.nbytes].view(out.dtype).view(out.shape)

    def all_reduce(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """Sum what every rank wrote to its `part`; all add in the order of ranks and get the same bits.

        It begins when every rank is here, and ends when every rank has read `part`, whose contents are arbitrary then.
        """
        if part.nbytes <= self._one_shot_bytes:
            self.one_shot(part, out)
        else:
            self.two_shots(part, out)

    def one_shot(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """`all_reduce` in which every rank reads every `part` whole."""
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._name, out)

    def two_shots(self, part: torch.Tensor, out: torch.Tensor) -> None:
        """`all_reduce` in which every rank sums a share of the elements, and reads the sums of the others."""
        torch.ops.symm_mem.two_shot_all_reduce_out(part, "sum", self._name, out)


def connect(rank: int, size: int, device: torch.device) -> SymmetricSum | None:
    """What the ranks share, or None, with the reason logged by rank 0, where one of them cannot: all decide alike."""
    hosts: list[str | None] = [None] * size
    dist.all_gather_object(hosts, socket.gethostname())
    if len(set(hosts)) > 1:
        if rank == 0:
            logger.info("all-reduce over NCCL: the ranks are on %d nodes", len(set(hosts)))
        return None
    shared, problem = None, ""
    try:
        shared = SymmetricSum(device)
        # In one shot, and in two.
        for nbytes in (_ALIGNMENT, one_shot_bytes(size) + _ALIGNMENT):
            probe = torch.empty(nbytes // 4, device=device)
            if fits(probe, size):
                shared.all_reduce(shared.part(probe).fill_(rank + 1.0), probe)
                wrong = probe[probe != size * (size + 1) / 2].tolist()
                if wrong and not problem:
                    problem = f"a sum of {nbytes} bytes over {size} ranks came out as {wrong[0]}"
    except (RuntimeError, ImportError) as error:
        problem = f"{type(error).__name__}: {error}"
    problems: list[str | None] = [None] * size
    dist.all_gather_object(problems, problem)
    found = next((f"rank {index}: {text}" for index, text in enumerate(problems) if text), "")
    if found and rank == 0:
        logger.warning("all-reduce over NCCL alone, which is slower for small batches; symmetric memory: %s", found)
    return None if found else shared
