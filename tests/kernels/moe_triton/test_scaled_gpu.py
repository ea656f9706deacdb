"""The experts with weights of 8 and 4 bits on a GPU: eager, replayed on other tokens, and alone against in a batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from captured import same_bits
from experts_case import Experts, Format
from replayed import check_replayed

from kernels import moe
from kernels.matrix import BlockScaled, GroupScaled, Matrix, MicroScaled, MicroScaled4
from kernels.moe import schedule

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V3 = {"chosen": 9, "experts": 25, "shared": 1, "hidden": 7168, "intermediate": 2048, "device": "cuda"}
"""DeepSeek-V3's, of fewer experts."""
SMALL = {"chosen": 3, "experts": 9, "shared": 1, "hidden": 288, "intermediate": 160, "device": "cuda"}
FORMATS: list[Format] = ["int4", "mxfp8", "mxfp4", (128, 128)]
_weights: dict[Format, tuple[Matrix, Matrix]] = {}


def make(format: Format, tokens: int, **changes: object) -> Experts:
    """A case with weights of this format, made once."""
    sizes = {**V3, **changes}
    case = Experts(tokens, **sizes, formats=(format, format), weights=_weights.get(format))  # type: ignore[arg-type]
    if format not in _weights and case.weights:
        _weights[format] = case.weights
    return case


@pytest.mark.parametrize("tokens", [1, 2, 16, 40, 64, 200, 1000])
@pytest.mark.parametrize("format", FORMATS)
def test_eager(format: Format, tokens: int) -> None:
    case = make(format, tokens, holes=tokens % 2 == 0, padded=(0,) if tokens > 2 else ())
    case.run()
    case.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("formats", [("int4", (16, 64)), ((64, 128), None), (None, "int4"), ("mxfp4", "int4")])
@pytest.mark.parametrize("groups", [0, 4])
@pytest.mark.parametrize("tokens", [1, 40, 500])
def test_blocks_that_tiles_do_not_divide(
    tokens: int, groups: int, formats: tuple[Format, Format], dtype: torch.dtype
) -> None:
    """Either matrix in a format of its own; groups of features to be summed apart begin inside blocks of `down`."""
    case = Experts(tokens, **SMALL, dtype=dtype, groups=groups, formats=formats)  # type: ignore[arg-type]
    case.run()
    case.check()


@pytest.mark.parametrize("rows", [16, 64, 128])
@pytest.mark.parametrize("format", FORMATS)
def test_every_tile(format: Format, rows: int) -> None:
    case = make(format, 150, skewed=True, holes=True)
    gate_up, down = schedule.SCALED[rows]
    case.run(case.tiling(rows=rows, gate_up=gate_up, down=down))
    case.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("tokens", [1, 16, 64, 400])
@pytest.mark.parametrize("format", FORMATS)
def test_replayed_on_other_tokens(format: Format, tokens: int, dependent: bool) -> None:
    if dependent and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("programmatic dependent launch needs compute capability 9.0")
    case = make(format, tokens)
    other = make(format, tokens, seed=1, holes=True, padded=tuple(range(tokens // 2, tokens)))
    check_replayed(case, other, case.tiling(), dependent)


@pytest.mark.parametrize("format", FORMATS)
def test_a_token_alone_equals_the_token_in_any_batch(format: Format) -> None:
    batch = make(format, 500, groups=8)
    want = batch.run().clone()
    for tokens in (1, 2, 7, 64, 120, 499):
        part = replace(batch, tokens=tokens, tensors={}, inputs={})
        for name in ("x", "id", "weight", "out"):
            part.tensors[name].copy_(batch.inputs[name][-tokens:])
        assert same_bits(part.run(), want[-tokens:])


@pytest.mark.parametrize("tokens", [1, 300])
def test_programs_of_several_groups_have_the_bits_of_one_for_each(tokens: int) -> None:
    formats: tuple[Format, Format] = ((128, 128), (128, 128))
    case = Experts(tokens, **{**SMALL, "intermediate": 1024}, groups=8, formats=formats)  # type: ignore[arg-type]
    want = case.run(case.tiling(walked=1)).clone()
    for walked in (2, 4, 8):
        case.refill()
        assert same_bits(case.run(case.tiling(walked=walked)), want), walked


@pytest.mark.parametrize("format", FORMATS)
def test_the_public_function_takes_the_memory_that_it_says(format: Format) -> None:
    """Tokens are so many that Hopper's own kernels would take plain weights, too."""
    case = make(format, 1000)
    t = case.tensors
    assert case.weights is not None
    shape = moe.experts_shape(t["x"], t["id"], case.weights[1], shared=1)
    workspace = torch.full((moe.workspace_bytes(shape),), 0x7F, dtype=torch.uint8, device="cuda")
    moe.experts(t["x"], t["id"], t["weight"], *case.weights, t["out"], shared=1, workspace=workspace)
    case.check()


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("format", FORMATS)
def test_addresses_past_two_to_the_31_bytes(format: Format, tokens: int) -> None:
    """Only the last of many experts has weights that are filled."""
    experts = 160
    small = Experts(tokens, 1, 1, 7168, 2048, device="cuda", formats=(format, format))
    assert small.weights is not None
    small.run()
    small.check()
    weights = tuple(_last_of(experts, matrix) for matrix in small.weights)
    large = Experts(tokens, 1, experts, 7168, 2048, device="cuda", weights=weights)  # type: ignore[arg-type]
    for name in ("x", "weight"):
        large.tensors[name].copy_(small.tensors[name])
    large.tensors["id"].fill_(experts - 1)
    large.run(small.tiling())
    assert same_bits(large.tensors["out"], small.tensors["out"])


def _last_of(experts: int, matrix: Matrix) -> Matrix:
    assert not isinstance(matrix, torch.Tensor)
    data, scales = (
        torch.empty(experts, *part.shape[1:], dtype=part.dtype, device="cuda") for part in (matrix.data, matrix.scales)
    )
    data[-1].view(torch.uint8).copy_(matrix.data[0].view(torch.uint8))
    scales[-1] = matrix.scales[0]
    if isinstance(matrix, MicroScaled4):
        # What was found by looking at the rows of the small matrix holds for these, and tilings ask for it.
        least = None if matrix.least is None else matrix.least.expand(experts, -1).contiguous()
        return MicroScaled4(data, scales, least)
    if isinstance(matrix, (GroupScaled, MicroScaled)):
        return type(matrix)(data, scales)
    assert isinstance(matrix, BlockScaled)
    return BlockScaled(data, scales, matrix.rows, matrix.features)
