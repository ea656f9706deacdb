"""Rounding of the experts' activations to FP8: when it is done, and where in the workspace they lie then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.moe import schedule, w8a8_launch
from kernels.moe.records import PLAIN, Stored
from kernels.moe.schedule import ExpertsShape, Workspace

V3 = ExpertsShape(4096, 9, 257, 7168, 2048, shared=1, hopper=132, quantize_activations=True)
WHOLE = Stored("fp8", 128, 128, 32, 56), Stored("fp8", 128, 128, 56, 16)


def test_many_tokens_are_quantized() -> None:
    tiling = schedule.tiling(V3, WHOLE)
    assert tiling.w8a8
    assert (tiling.rows, tiling.programs, tiling.stored) == (128, 132, WHOLE)
    assert (tiling.gate_up.blocks(2048), tiling.down.blocks(7168)) == (16, 28)


def test_one_token_has_no_tiles() -> None:
    assert [schedule.tiling(replace(V3, tokens=tokens), WHOLE).w8a8 for tokens in (1, 2, 12)] == [False, True, True]


@pytest.mark.parametrize(
    ("shape", "stored"),
    [
        (replace(V3, quantize_activations=False), WHOLE),
        (replace(V3, hopper=0), WHOLE),
        (replace(V3, dtype=torch.float16), WHOLE),
        (replace(V3, groups=8), WHOLE),
        (replace(V3, intermediate=1472), WHOLE),
        (replace(V3, hidden=7200), WHOLE),
        (V3, (PLAIN, WHOLE[1])),
        (V3, (WHOLE[0], Stored("int4", 1, 32, 7168, 64))),
        (V3, (Stored("fp8", 64, 128, 64, 56), WHOLE[1])),
        (V3, (WHOLE[0], Stored("fp8", 128, 64, 56, 32))),
        (V3, (PLAIN, PLAIN)),
    ],
)
def test_what_is_not_quantized(shape: ExpertsShape, stored: tuple[Stored, Stored]) -> None:
    assert not schedule.tiling(shape, stored).w8a8


@pytest.mark.parametrize("tokens", [2, 12, 57, 300, 4096])
@pytest.mark.parametrize("chosen", [1, 2, 9])
def test_it_needs_no_more_memory(tokens: int, chosen: int) -> None:
    """Whoever asks how much does not know how weights are stored, and may not say that tokens are rounded."""
    sizes = {"experts": chosen + 1, "shared": int(chosen > 1), "hidden": 512, "intermediate": 256}
    shape = replace(V3, tokens=tokens, chosen=chosen, **sizes)
    stored = Stored("fp8", 128, 128, 4, 4), Stored("fp8", 128, 128, 4, 2)
    tiling = schedule.tiling(shape, stored)
    assert tiling.w8a8
    asked = replace(shape, quantize_activations=False)
    assert Workspace.bytes(shape, tiling) <= Workspace.bytes(asked, schedule.tiling(asked))


def test_inputs_and_their_scales_lie_apart_and_inside() -> None:
    shape = replace(V3, tokens=100, hidden=512, intermediate=256)
    tiling = schedule.w8a8(shape, 132, WHOLE)
    buffer = torch.zeros(Workspace.bytes(shape, tiling), dtype=torch.uint8)
    scratch = Workspace.over(buffer, shape, tiling)
    tensors = [*w8a8_launch.tokens(scratch, shape), *w8a8_launch.inputs(scratch, shape)]
    assert [tuple(tensor.shape) for tensor in tensors] == [(100, 512), (100, 4), (900, 256), (900, 2)]
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 4
    for tensor in tensors:
        tensor.view(torch.uint8).add_(1)
    kept = (scratch.sorted_Y, scratch.table, scratch.counts)
    assert not any(bool(part.any()) for part in kept)
    assert buffer.sum() == sum(tensor.nbytes for tensor in tensors)
    assert buffer.max() == 1
