"""Parts: the rows and columns of a checkpoint's tensors that make up a rank's matrix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from workers.parallel.mesh import AxisName, Mesh


@dataclass(frozen=True)
class RopeRows:
    """The last (or first) `rope` of every `head` rows are rotated and are to be kept in pairs (2i, 2i + 1), whatever
    rows a checkpoint has in their place: products of queries and keys that are both kept so do not change."""

    head: int
    rope: int
    first: bool = False
    """Whether they are a head's first rows."""
    stored_last: bool = False
    """Whether the checkpoint has them as a head's last rows all the same."""
    paired: bool = False
    """Whether the checkpoint has them in those pairs already; else in pairs (i, i + rope / 2)."""

    @property
    def begin(self) -> int:
        """The first of them within a head."""
        return 0 if self.first else self.head - self.rope

    def order(self, rows: int, device: torch.device) -> Tensor:
        """Return the source row of each of a matrix's rows, int64."""
        order_HR = torch.arange(rows, device=device).view(-1, self.head)
        if self.first and self.stored_last:
            order_HR = order_HR.roll(self.rope, 1)
        if not self.paired:
            roped = order_HR[:, self.begin : self.begin + self.rope]
            roped.copy_(roped.reshape(-1, 2, self.rope // 2).transpose(1, 2).flatten(1))
        return order_HR.flatten()

    def stay_within(self, block: int, rows: int) -> bool:
        """Whether no row of `rows` changes its block of so many rows."""
        if self.first and self.stored_last:
            return block % self.head == 0
        firsts = range(self.begin, rows, self.head)
        return all(first // block == (first + self.rope - 1) // block for first in firsts)


class Shard(NamedTuple):
    """Dimension of a matrix that ranks share equally among themselves, and the mesh axis along which they do."""

    dimension: int
    """0: rows, 1: columns."""
    axis: AxisName


@dataclass(frozen=True)
class Part:
    """A matrix of the checkpoint, or what a rank reads of it."""

    name: str
    """Name in DeepSeek V3's checkpoints."""
    rows: int
    columns: int
    """Columns of the whole matrix: those that the files must have."""
    shard: Shard | None = None
    """Dimension that ranks share equally among themselves; None: each has all of it."""
    unit: int = 0
    units: int = 1
    """Number of equal parts of the shared dimension, of which not all but the unit-th is taken."""
    own: slice | None = None
    """The rows that this rank reads, where the ranks do not share equally."""
    rope: RopeRows | None = None
    """Rows that are kept in another order."""

    def __post_init__(self) -> None:
        if not 0 <= self.unit < self.units or (self.units > 1 and self.shard is None):
            shared = None if self.shard is None else self.shard.dimension
            raise ValueError(f"{self.name}: part {self.unit} of {self.units} of dimension {shared} does not exist")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix."""
        return self.rows, self.columns

    @property
    def place(self) -> tuple[object, ...]:
        """Return all but the name: what it shares with the same part of another expert."""
        own = None if self.own is None else (self.own.start, self.own.stop)  # slices have no hash
        return self.rows, self.columns, self.shard, self.unit, self.units, own, self.rope

    @property
    def shared_length(self) -> int:
        """Rows or columns that the ranks share; ValueError where there are no such parts of the dimension."""
        assert self.shard is not None
        length, rest = divmod(self.shape[self.shard.dimension], self.units)
        if rest:
            raise ValueError(
                f"{self.name}: {self.units} parts cannot share dimension {self.shard.dimension} of {self.shape}"
            )
        return length

    def index(self, mesh: Mesh) -> tuple[slice, slice]:
        """The rows and the columns that this rank reads; ValueError when ranks cannot share."""
        index = [self.own or slice(0, self.rows), slice(0, self.columns)]
        if self.shard is not None:
            length = self.shared_length
            own, begin = mesh.axis(self.shard.axis).share(length, self.name), self.unit * length
            index[self.shard.dimension] = slice(begin + own.start, begin + own.stop)
        return index[0], index[1]

    def steps(self, mesh: Mesh) -> tuple[int, int]:
        """The greatest numbers that divide the first row, and the first column, of whatever rank; 0 where all begin
        at 0."""
        steps = [self.own.start if self.own else 0, 0]
        if self.shard is not None:
            length, ranks = self.shared_length, mesh.axis(self.shard.axis).size
            steps[self.shard.dimension] = gcd(self.unit * length, length // ranks if ranks > 1 else 0)
        return steps[0], steps[1]


def sharing(stacks: Sequence[Sequence[Part]], mesh: Mesh) -> int:
    """Return the number of ranks that share these; ValueError if some are shared along one axis and some along
    another."""
    axes = {part.shard.axis for parts in stacks for part in parts if part.shard is not None}
    if len(axes) > 1:
        raise ValueError(
            f"{kind_of(stacks)}: a matrix is shared along one axis, not along {' and '.join(sorted(axes))}"
        )
    return max((mesh.axis(axis).size for axis in axes), default=1)


def kind_of(stacks: Sequence[Sequence[Part]]) -> str:
    """Return the name of the parts in every layer, such as `experts.gate_proj and experts.up_proj`."""
    names = [re.sub(r"\.\d+(?=\.)", "", part.name.removesuffix(".weight")) for parts in stacks for part in parts]
    return " and ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))
