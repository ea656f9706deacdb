"""Tensors that attention of every layer has for itself, as a pass tells the one who repeats a layer's launches for the
next."""

from __future__ import annotations

import torch
from paged import CPU, Paged
from random_model import V2_LITE_HEADS, random_model
from tiny_models import random_tokens
from torch.multiprocessing.reductions import StorageWeakRef

from kernels.runtime.repeat import Layers
from workers.cache.paged import PagedCache
from workers.models.segments import Segments


def test_a_cache_that_is_given_other_tensors_is_not_taken_for_the_former_one() -> None:
    """If a cache had tensors that are unknown, a layer would be launched with those of the first."""
    told: list[Layers] = []
    model = random_model(V2_LITE_HEADS | {"num_hidden_layers": 3}, torch.float32, CPU)
    paged, segments = Paged(model, [random_tokens(9, 1, 160)]), model.segments
    assert isinstance(segments, Segments)

    def step() -> list[bool]:
        paged.forward(paged.plan([], 1, [(0, 3)]))
        told.append(segments.own_tensors(paged.cache))
        return [own[0] is layer for own, layer in zip(told[-1].own, paged.cache.layers, strict=True)]

    assert step() == [True] * 3
    paged.cache.layers[:] = [layer.clone() for layer in paged.cache.layers]
    assert step() == [True] * 3
    assert step() == [True] * 3
    assert [one is told[-1] for one in told] == [False, True, True]  # found out anew where it must be


def test_a_cache_that_is_gone_leaves_no_memory_behind() -> None:
    """A rank tries itself out with a cache of few pages before it allocates the one that it serves from."""
    model = random_model(V2_LITE_HEADS | {"num_hidden_layers": 3}, torch.float32, CPU)
    segments, caches = model.segments, [PagedCache.allocate(model.caches, 4, CPU) for _ in range(2)]
    assert isinstance(segments, Segments)
    for cache in caches:
        segments.own_tensors(cache)
    kept, gone = ([StorageWeakRef(layer.untyped_storage()) for layer in cache.layers] for cache in caches)
    del caches[1], cache
    assert [one.expired() for one in gone] == [True] * 3
    assert [one.expired() for one in kept] == [False] * 3
