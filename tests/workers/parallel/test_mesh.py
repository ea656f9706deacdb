"""A mesh names what ranks share: its axes are nested, and shares along one of them are whole together."""

from __future__ import annotations

import dataclasses
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.parallel.mesh import Axis, AxisName, Mesh

factors = st.lists(st.integers(1, 4), min_size=4, max_size=4)
"""Ranks along cache, and how often each axis fits into the one before it."""


def meshes(sizes: list[int]) -> list[Mesh]:
    """Return the meshes of all ranks, by rank."""
    cache, heads, experts, world = (prod(sizes[: count + 1]) for count in range(4))
    return [Mesh.of(rank, world, experts=experts, heads=heads, cache=cache) for rank in range(world)]


@given(factors)
def test_ranks_that_share_along_an_axis_share_along_the_one_before(sizes: list[int]) -> None:
    every = meshes(sizes)
    assert [mesh.world.rank for mesh in every] == list(range(len(every)))
    names: tuple[AxisName, ...] = ("world", "experts", "heads", "cache")
    outer = [list(range(len(every)))]
    for name in names:
        size = every[0].axis(name).size
        groups = [group[begin : begin + size] for group in outer for begin in range(0, len(group), size)]
        for group in groups:
            assert [every[rank].axis(name).rank for rank in group] == list(range(size))
            assert [every[rank].axis(name).first for rank in group] == [True] + [False] * (size - 1)
        outer = groups


@given(st.integers(1, 64), st.integers(0, 1000))
def test_equal_shares_are_the_whole_in_rank_order(size: int, each: int) -> None:
    shares = [Axis("heads", rank, size).share(size * each, "num_attention_heads") for rank in range(size)]
    assert [index for share in shares for index in range(share.start, share.stop)] == list(range(size * each))
    assert {share.stop - share.start for share in shares} == {each}


@given(st.integers(1, 64), st.integers(0, 1000))
def test_padded_shares_are_the_whole_in_rank_order(size: int, length: int) -> None:
    shares = [Axis("heads", rank, size).padded_share(length) for rank in range(size)]
    assert [index for _, own in shares for index in range(own.start, own.stop)] == list(range(length))
    (room,) = {room for room, _ in shares}
    assert (room - 1) * size < length <= room * size
    counts = [own.stop - own.start for _, own in shares]
    assert counts == sorted(counts, reverse=True)
    assert max(counts) == room


@given(st.integers(2, 64), st.integers(1, 1000))
def test_what_does_not_divide_is_named(size: int, length: int) -> None:
    axis = Axis("experts", 0, size)
    if length % size:
        with pytest.raises(ValueError, match=f"^intermediate_size = {length} is not .* {size} ranks of the axis exper"):
            axis.share(length, "intermediate_size")
    else:
        assert axis.share(length, "intermediate_size") == slice(0, length // size)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_all_ranks_of_a_replica_share_heads_and_experts(size: int) -> None:
    config = EngineConfig(model="demo", tensor_parallel=size)
    for rank in range(size):
        mesh = config.mesh(rank)
        assert mesh == Mesh.of(rank, size)
        axes = mesh.world, mesh.experts, mesh.heads
        assert [(axis.rank, axis.size) for axis in axes] == [(rank, size)] * 3
        assert (mesh.cache.rank, mesh.cache.size) == (0, 1)
    with pytest.raises(ValueError, match=f"there is no rank {size} of {size} along the axis world"):
        config.mesh(size)
    assert Mesh() == Mesh.of(0, 1)


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"cache": 3}, "3 ranks along the axis cache do not divide the 8 along heads"),
        ({"heads": 2, "cache": 4}, "4 ranks along the axis cache do not divide the 2 along heads"),
        ({"heads": 3}, "3 ranks along the axis heads do not divide the 8 along experts"),
        ({"experts": 2, "heads": 4}, "4 ranks along the axis heads do not divide the 2 along experts"),
        ({"experts": 5}, "5 ranks along the axis experts do not divide the 8 along world"),
        ({"experts": 16}, "16 ranks along the axis experts do not divide the 8 along world"),
        ({"cache": 0}, "an axis has at least one rank, not 0"),
        ({"heads": -2}, "an axis has at least one rank, not -2"),
    ],
)
def test_axes_that_do_not_nest_are_refused(sizes: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=f"^{why}$"):
        Mesh.of(5, 8, **sizes)


@pytest.mark.parametrize(("rank", "size"), [(-1, 2), (2, 2), (0, 0), (8, 4)])
def test_ranks_that_there_are_not_are_refused(rank: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"there is no rank {rank} of {size} along the axis cache"):
        Axis("cache", rank, size)
    with pytest.raises(ValueError, match=f"there is no rank {rank} of {size} along the axis world"):
        Mesh.of(rank, size, experts=1)


def test_axes_of_another_rank_or_another_name_are_refused() -> None:
    of_four = Mesh.of(3, 4, heads=2)
    with pytest.raises(ValueError, match="rank 3 along the axis experts is rank 1 of 2 along heads, not 0"):
        dataclasses.replace(of_four, heads=Axis("heads", 0, 2), cache=Axis("cache"))
    with pytest.raises(ValueError, match="the axis cache stands where a mesh has the axis heads"):
        dataclasses.replace(of_four, heads=Axis("cache", 1, 2))


@pytest.mark.parametrize("kind", [Group, Mesh])
def test_nobody_can_ask_for_ranks_without_an_axis(kind: type[Group] | type[Mesh]) -> None:
    asked = {"rank", "size", "ranks", "world_size", "__len__", "__index__", "__int__"}
    assert not asked & {*dir(kind()), *(field.name for field in dataclasses.fields(kind))}


def test_one_group_has_no_sums_over_different_ranks() -> None:
    """The group neither joins the others of such a mesh, nor pretends that a sum over heads is one over experts."""
    mesh = Mesh.of(1, 4, heads=2)
    with pytest.raises(ValueError, match=r"all 4 ranks communicate as one group: .* heads by 2 and experts by 4"):
        Group.connect(mesh, "tcp://127.0.0.1:1", torch.device("cpu"), 1.0)
    x = torch.ones(2)
    for collective in (lambda group: group.all_reduce(x, x), lambda group: group.ordered_sum(x, x, x)):
        with pytest.raises(ValueError, match="2 ranks along heads and 4 along experts need a group each"):
            collective(Group(mesh))
    assert Group(Mesh.of(1, 4, cache=2)).summed == Axis("experts", 1, 4)
