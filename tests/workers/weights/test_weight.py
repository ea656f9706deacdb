"""A matrix of weights, as models hand it to whoever multiplies."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import fp8, int4, mxfp8

from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP8
from workers.weights.weight import Weight


def fp8_weight(rows: int, columns: int, block: tuple[int, int], experts: int = 0) -> Weight:
    outer = (experts,) if experts else ()
    data = torch.randn(*outer, rows, columns).to(torch.float8_e4m3fn)
    scales = torch.rand(*outer, -(-rows // block[0]), -(-columns // block[1])) + 0.5
    return Weight(data, FP8_BLOCKS, scales, block)


def int4_weight(rows: int, columns: int, experts: int = 0) -> Weight:
    outer = (experts,) if experts else ()
    data = torch.randint(0, 256, (*outer, rows, columns // 2), dtype=torch.uint8)
    return Weight(data, INT4_GROUPS, torch.rand(*outer, rows, columns // 32).bfloat16())


def test_a_part_lies_in_the_same_memory() -> None:
    weight = Weight(torch.zeros(3, 8, 4))
    weight[1][2:4].plain.fill_(1)
    assert weight.data.sum() == 8
    assert weight.data[1, 2:4].sum() == 8
    assert (weight.shape, weight[1].shape, weight[1][2:4].shape) == ((3, 8, 4), (8, 4), (2, 4))
    assert weight.nbytes == 3 * 8 * 4 * 4


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_parts_of_quantized_weights_are_parts_of_their_numbers(data: st.DataObject) -> None:
    rows, experts = data.draw(st.integers(1, 200), label="rows"), data.draw(st.integers(1, 3), label="experts")
    height = 1
    if data.draw(st.booleans(), label="FP8"):
        height = data.draw(st.sampled_from([16, 64, 128]), label="height")
        weight = fp8_weight(rows, data.draw(st.integers(1, 300), label="columns"), (height, 32), experts)
    else:
        weight = int4_weight(rows, 32 * data.draw(st.integers(1, 5), label="groups"), experts)
    numbers = weight.dequantized(torch.float32)
    assert weight.shape == numbers.shape
    assert weight.nbytes == weight.data.nbytes + weight.scales.nbytes
    expert = data.draw(st.integers(0, experts - 1), label="expert")
    assert torch.equal(weight[expert].dequantized(torch.float32), numbers[expert])
    assert torch.equal(weight[expert:].dequantized(torch.float32), numbers[expert:])
    blocks = -(-rows // height)
    first = data.draw(st.integers(0, blocks - 1), label="first block")
    begin, end = first * height, min(data.draw(st.integers(first + 1, blocks), label="last block") * height, rows)
    part = weight[expert][begin:end]
    assert torch.equal(part.dequantized(torch.float32), numbers[expert, begin:end])
    assert part.data.untyped_storage().data_ptr() == weight.data.untyped_storage().data_ptr()
    assert torch.equal(part.dequantized(torch.bfloat16), numbers[expert, begin:end].bfloat16())


@pytest.mark.parametrize("part", [slice(8, 32), slice(0, 8), slice(0, 32, 2), 3])
def test_output_features_begin_and_end_with_blocks(part: int | slice) -> None:
    with pytest.raises(ValueError, match="row"):
        _ = fp8_weight(64, 64, (16, 32))[part]


@pytest.mark.parametrize("kind", ["fp8", "int4", "mxfp8"])
def test_dequantized_means_what_the_published_tensors_mean(kind: str) -> None:
    if kind == "fp8":
        tensors, want = fp8("w", 200, 300, seed=1)
        weight = Weight(tensors["w"], FP8_BLOCKS, tensors["w_scale_inv"], (128, 128))
    elif kind == "mxfp8":
        tensors, want = mxfp8("w", 20, 96, seed=1)
        weight = Weight(tensors["w"], MXFP8, tensors["w_scale"])
    else:
        tensors, want = int4("w", 20, 96, seed=1)
        weight = Weight(tensors["w_packed"].view(torch.uint8), INT4_GROUPS, tensors["w_scale"])
    assert weight.shape == want.shape
    assert torch.equal(weight.dequantized(torch.float32), torch.from_numpy(want))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Weight(torch.zeros(2, 2), scales=torch.ones(1)),
        lambda: Weight(torch.zeros(2, 2), FP8_BLOCKS, torch.ones(1, 1), (128, 128)),
        lambda: Weight(torch.zeros(2, 2).to(torch.float8_e4m3fn), FP8_BLOCKS, torch.ones(2, 1), (128, 128)),
        lambda: Weight(torch.zeros(2, 2).to(torch.float8_e4m3fn), FP8_BLOCKS, torch.ones(1, 1), (100, 128)),
        lambda: Weight(torch.zeros(2, 2).to(torch.float8_e4m3fn), FP8_BLOCKS, torch.ones(1, 1)),
        lambda: Weight(torch.zeros(2, 16, dtype=torch.uint8), INT4_GROUPS, torch.ones(2, 1)),
        lambda: Weight(torch.zeros(2, 8, dtype=torch.uint8), INT4_GROUPS, torch.ones(2, 1).bfloat16()),
        lambda: Weight(torch.zeros(2, 16, dtype=torch.uint8), INT4_GROUPS),
        lambda: Weight(torch.zeros(2, 32).to(torch.float8_e4m3fn), MXFP8, torch.ones(2, 1)),
        lambda: Weight(torch.zeros(2, 48).to(torch.float8_e4m3fn), MXFP8, torch.ones(2, 2, dtype=torch.uint8)),
        lambda: Weight(torch.zeros(2, 32).to(torch.float8_e4m3fn), MXFP8, torch.ones(2, 1, dtype=torch.uint8), (1, 32)),
    ],
)
def test_what_does_not_fit_together_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match=r"scales|blocks"):
        wrong()


def test_a_product_that_knows_plain_weights_alone_refuses_others() -> None:
    assert Weight(torch.ones(2, 2)).plain.sum() == 4
    with pytest.raises(TypeError, match=r"format 'FP8 in blocks' come to a product that reads plain ones alone"):
        _ = fp8_weight(16, 32, (16, 32)).plain
