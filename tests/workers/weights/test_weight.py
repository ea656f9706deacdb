"""A matrix of weights, as models hand it to whoever multiplies."""

from __future__ import annotations

import pytest
import torch

from workers.parallel.group import TensorParallel
from workers.weights.source import Census
from workers.weights.weight import Format, Weight


def test_a_part_lies_in_the_same_memory() -> None:
    weight = Weight(torch.zeros(3, 8, 4))
    weight[1][2:4].plain.fill_(1)
    assert weight.data.sum() == 8
    assert weight.data[1, 2:4].sum() == 8
    assert (weight.shape, weight[1].shape, weight[1][2:4].shape) == ((3, 8, 4), (8, 4), (2, 4))
    assert weight.nbytes == 3 * 8 * 4 * 4


def test_plain_weights_have_no_scales() -> None:
    with pytest.raises(ValueError, match="no scales"):
        Weight(torch.zeros(2, 2), scales=torch.ones(1))


def test_a_product_that_knows_plain_weights_alone_refuses_others() -> None:
    weight = Weight(torch.zeros(2, 2))
    object.__setattr__(weight, "format", type("Other", (), {"value": "fp8"}))
    assert weight.format is not Format.PLAIN
    with pytest.raises(TypeError, match=r"format 'fp8' come to a product that reads plain ones alone"):
        _ = weight.plain


def test_a_census_counts_matrices_and_their_parts() -> None:
    census = Census(TensorParallel(0, 2), torch.bfloat16, lambda name: f"text.{name}")
    weight = census.weight(6, 4)
    census.fill(weight[:2], "a", shard=0)
    census.fill(weight[2:], "b", shard=1)
    assert census.shapes == {"text.a": (4, 4), "text.b": (4, 8)}
    assert census.bytes == 6 * 4 * 2
