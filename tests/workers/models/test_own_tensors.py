"""Tensors that attention of every layer has for itself, as a pass tells the one who repeats a layer's launches for the
next."""

from __future__ import annotations

import pytest
import torch
from paged import CPU, Paged
from random_model import V2_LITE_HEADS, random_model
from tiny_models import random_tokens

from kernels.runtime.repeat import Layers, Repeat
from workers.models import segments


def test_a_cache_that_is_given_other_tensors_is_not_taken_for_the_former_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a cache had tensors that are unknown, a layer would be launched with those of the first."""
    told: list[Layers] = []

    class Told(Repeat):
        def __init__(self, layers: Layers) -> None:
            super().__init__(layers)
            told.append(layers)

    monkeypatch.setattr(segments, "Repeat", Told)
    model = random_model(V2_LITE_HEADS | {"num_hidden_layers": 3}, torch.float32, CPU)
    paged = Paged(model, [random_tokens(9, 1, 160)])

    def step() -> list[bool]:
        paged.forward(paged.plan([], 1, [(0, 3)]))
        return [own[0] is layer for own, layer in zip(told[-1].own, paged.cache.layers, strict=True)]

    assert step() == [True] * 3
    paged.cache.layers[:] = [layer.clone() for layer in paged.cache.layers]
    assert step() == [True] * 3
    assert step() == [True] * 3
    assert [one is told[-1] for one in told] == [False, True, True]  # found out anew where it must be
