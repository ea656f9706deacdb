"""The mesh of a replica's ranks, with one axis for each thing that they share.

There is no number of ranks as such. Attention asks how many ranks share its heads, the feed-forward part how many share
its experts, who waits for every process asks for the whole world; today these happen to be the same ranks. Without
torch, for the scheduler and for `deploy`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from kernels.page import Shards

AxisName = Literal["world", "experts", "heads", "cache"]

CACHE_SHARDS: Final = (1, 2, 4, 8)
"""Numbers of ranks that may share out a cache. An exchange on GPUs has as much room for each of them."""
INVARIANT_RANKS: Final = (1, 2, 4, 8)
"""Numbers of ranks, along any axis, on which invariant mode computes the same bits."""


@dataclass(frozen=True)
class Axis:
    """`size` neighbouring ranks that share something among themselves; this process is number `rank` of them."""

    name: AxisName
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"there is no rank {self.rank} of {self.size} along the axis {self.name}")

    @property
    def first(self) -> bool:
        """Whether this is the rank that speaks, or decides, for all of them."""
        return self.rank == 0

    def share(self, length: int, what: str) -> slice:
        """Return this rank's part of `length` in equal shares; ValueError, naming `what`, when it is not divisible."""
        if length % self.size:
            raise ValueError(
                f"{what} = {length} is not divisible by the {self.size} ranks of the axis {self.name} (tensor_parallel)"
            )
        share = length // self.size
        return slice(self.rank * share, (self.rank + 1) * share)

    def padded_share(self, length: int) -> tuple[int, slice]:
        """Return the room that each rank has, and this rank's part: the last ranks have less than that, or nothing,
        where `length` is not divisible."""
        room = -(-length // self.size)
        begin = min(self.rank * room, length)
        return room, slice(begin, min(begin + room, length))


@dataclass(frozen=True)
class Mesh:
    """The axes of one rank. Each divides the one before, and the ranks along it are neighbours: those that share along
    one axis are all among those that share along the one before."""

    world: Axis = Axis("world")
    """All ranks of the replica: processes to start and to wait for, memory of a machine, agreement."""
    experts: Axis = Axis("experts")
    """Ranks that share every feed-forward network: dense ones, routed experts and shared ones."""
    heads: Axis = Axis("heads")
    """Ranks that share the attention heads of the same tokens (tensor parallelism), and the vocabulary of the output
    head: all of them have the tokens' hidden states, and the first of them samples for all. Where they are fewer than
    `experts`, each group of them attends to tokens of its own (data-parallel attention)."""
    cache: Axis = Axis("cache")
    """Ranks that share the pages of one latent cache. With one, every rank has the whole cache."""

    def __post_init__(self) -> None:
        axes = {"world": self.world, "experts": self.experts, "heads": self.heads, "cache": self.cache}
        for name, axis in axes.items():
            if axis.name != name:
                raise ValueError(f"the axis {axis.name} stands where a mesh has the axis {name}")
        for outer, inner in pairwise(axes.values()):
            if outer.size % inner.size:
                raise ValueError(
                    f"{inner.size} ranks along the axis {inner.name} do not divide the {outer.size} along {outer.name}"
                )
            if inner.rank != outer.rank % inner.size:
                raise ValueError(
                    f"rank {outer.rank} along the axis {outer.name} is rank {outer.rank % inner.size} of {inner.size} "
                    f"along {inner.name}, not {inner.rank}"
                )

    @staticmethod
    def of(rank: int, world: int, *, experts: int | None = None, heads: int | None = None, cache: int = 1) -> Mesh:
        """The mesh of rank `rank` of `world`. Unless told otherwise all of them share experts and heads, and each has
        the whole cache. ValueError for sizes that do not divide."""
        experts = world if experts is None else experts
        heads = experts if heads is None else heads
        whole = Axis("world", rank, world)
        smallest = min(experts, heads, cache)
        if smallest < 1:
            raise ValueError(f"an axis has at least one rank, not {smallest}")
        return Mesh(
            whole,
            Axis("experts", rank % experts, experts),
            Axis("heads", rank % heads, heads),
            Axis("cache", rank % cache, cache),
        )

    @property
    def shards(self) -> Shards:
        """The shard of the latent cache that this rank holds."""
        return Shards(self.cache.size, self.cache.rank)

    def axis(self, name: AxisName) -> Axis:
        """The axis of that name."""
        axis: Axis = getattr(self, name)
        return axis
