"""Matrices that a checkpoint stores twice, and whether both are the same."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Final

import torch
from torch import Tensor

from workers.parallel.group import Group
from workers.parallel.mesh import Axis
from workers.weights.checkpoint import Checkpoint
from workers.weights.formats import FORMATS

_AT_ONCE: Final = 1 << 23
"""Numbers of a tensor that are read at once."""


def differing(checkpoint: Checkpoint, copies: Mapping[str, str], group: Group, device: torch.device) -> frozenset[str]:
    """Return those of `copies`, each with the matrix that it may repeat, that exist and differ from it in content or in
    storage: both by the checkpoint's names. Collective: each rank compares its share of the rows."""
    suffixes = ["", *{suffix: None for format in FORMATS for suffix in format.suffixes if suffix}]
    there = [name for name in copies if any(name + suffix in checkpoint.entries for suffix in suffixes)]
    if not there:
        return frozenset()
    world = group.mesh.world
    same = [
        all(_same(checkpoint, name + suffix, copies[name] + suffix, world) for suffix in suffixes) for name in there
    ]
    agreed = group.minimum(torch.tensor(same, dtype=torch.int64, device=device)).tolist()
    return frozenset(name for name, equal in zip(there, agreed, strict=True) if not equal)


def _same(checkpoint: Checkpoint, name: str, other: str, world: Axis) -> bool:
    """Whether this rank's rows of two tensors are equal byte for byte; also where there is neither."""
    one, two = checkpoint.entries.get(name), checkpoint.entries.get(other)
    if one is None or two is None:
        return one is two
    if (one.shape, one.dtype) != (two.shape, two.dtype) or not one.shape:
        return False
    rows = one.shape[0]
    _, own = world.padded_share(rows)
    step = max(1, _AT_ONCE // max(1, prod(one.shape[1:])))
    for first in range(own.start, own.stop, step):
        index = (slice(first, min(first + step, own.stop)),)
        if not _equal(checkpoint.read(name, index), checkpoint.read(other, index)):
            return False
    return True


def _equal(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors of one shape and dtype have the same bytes, NaN and the sign of zero included."""
    a, b = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (one, two))
    if a.numel() % 8 == a.storage_offset() % 8 == b.storage_offset() % 8 == 0:
        a, b = a.view(torch.int64), b.view(torch.int64)  # takes a quarter of the time
    return torch.equal(a, b)
