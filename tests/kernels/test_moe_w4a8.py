"""Experts in MXFP4 with activations in FP8: which weights become FP8, when activations are rounded, and where in the
workspace they lie then."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.matrix import WIDEST, MicroScaled4, e2m1
from kernels.moe import schedule, w4a8_launch
from kernels.moe.records import Stored, stored
from kernels.moe.schedule import FEWEST_W4A8_MEAN, ExpertsShape, Workspace

V4 = ExpertsShape(8192, 6, 256, 4096, 2048, hopper=132, quantize_activations=True, limit=10.0)
IN_FP8 = Stored("mxfp4", 1, 32, 4096, 128, True), Stored("mxfp4", 1, 32, 4096, 64, True)


def matrix(spread: int, seed: int = 0) -> MicroScaled4:
    """Experts' matrices whose rows' scales are so many powers of two apart."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (3, 8, 128), generator=random).to(torch.uint8)
    data[..., ::16] |= 0x11  # no group is zero
    scales = torch.randint(100, 101 + spread, (3, 8, 8), generator=random)
    scales[..., 0], scales[..., 5] = 100, 100 + spread
    return MicroScaled4(data, scales.to(torch.uint8))


@pytest.mark.parametrize("spread", [0, 1, WIDEST])
def test_rows_are_fp8_times_a_power_of_two(spread: int) -> None:
    """Torch's conversion rounds nothing."""
    found = matrix(spread).with_least()
    assert found.least is not None
    scaled = torch.ldexp(found.float(), 122 - found.least.int().unsqueeze(-1))
    assert torch.equal(scaled.to(torch.float8_e4m3fn).float(), scaled)
    assert stored(found).in_fp8
    assert torch.equal(found[1].least, found.least[1])


def test_every_number_and_power() -> None:
    """The table that the kernel makes of the distance to a row's least byte has the bytes of the eight magnitudes."""
    magnitudes = e2m1(torch.tensor([0x10, 0x32, 0x54, 0x76], dtype=torch.uint8))
    for distance in range(WIDEST + 1):
        words = distance * 0x08080800 + 0x14100800, distance * 0x08080808 + 0x24201C18
        table = torch.tensor([word >> 8 * i & 0xFF for word in words for i in range(4)], dtype=torch.uint8)
        want = magnitudes * 2.0 ** (distance - 5)
        assert torch.equal(table.view(torch.float8_e4m3fn).float(), want)


def test_rows_that_are_not() -> None:
    """One row is enough, and then no scale is looked at but those of groups that are not zero."""
    far = matrix(WIDEST + 1)
    assert far.with_least() is far
    assert not stored(far).in_fp8
    one = matrix(2)
    one.scales[1, 3, 6] = 100 - WIDEST
    assert one.with_least() is one
    one.data[1, 3, 96:112] = 0x80  # zeros of either sign
    found = one.with_least()
    assert found.least is not None
    assert torch.equal(found.least, matrix(2).with_least().least)
    one.data[1, 3] = 0
    one.scales[1, 3, 0] = 0
    assert one.with_least().least is not None


def test_least_bytes_have_a_shape() -> None:
    whole = matrix(1)
    with pytest.raises(ValueError, match="least bytes"):
        replace(whole, least=torch.zeros(3, 7, dtype=torch.uint8))


def test_many_tokens_are_quantized() -> None:
    tiling = schedule.tiling(V4, IN_FP8)
    assert (tiling.w8a8, tiling.w4a8, tiling.rearranged) == (True, True, False)
    assert (tiling.rows, tiling.programs, tiling.stored) == (256, 132, IN_FP8)
    assert (tiling.gate_up.blocks(2048), tiling.down.blocks(4096)) == (16, 32)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        (replace(V4, tokens=FEWEST_W4A8_MEAN * 256 // 6 - 1), IN_FP8),
        (replace(V4, quantize_activations=False), IN_FP8),
        (replace(V4, hopper=0), IN_FP8),
        (replace(V4, dtype=torch.float16), IN_FP8),
        (replace(V4, groups=8), IN_FP8),
        (replace(V4, intermediate=256), IN_FP8),
        (replace(V4, hidden=4352), IN_FP8),
        (replace(V4, chosen=1), IN_FP8),
        (V4, (IN_FP8[0], IN_FP8[1]._replace(in_fp8=False))),
        (V4, (IN_FP8[0], Stored("int4", 1, 32, 4096, 64))),
    ],
)
def test_what_is_not_quantized(shape: ExpertsShape, how: tuple[Stored, Stored]) -> None:
    assert not schedule.tiling(shape, how).w8a8


def test_what_it_does_not_take() -> None:
    with pytest.raises(ValueError, match="power of two for each"):
        schedule.w4a8(replace(V4, groups=8), 132, IN_FP8)


@pytest.mark.parametrize("chosen", [2, 9])
@pytest.mark.parametrize("tokens", [64 * 9, 4096])
def test_it_needs_no_more_memory(tokens: int, chosen: int) -> None:
    """Whoever asks how much does not know how weights are stored, and may not say that tokens are rounded."""
    shape = replace(V4, tokens=tokens, chosen=chosen, experts=chosen, hidden=512, intermediate=512)
    tiling = schedule.tiling(shape, IN_FP8)
    assert tiling.w4a8
    asked = replace(shape, quantize_activations=False)
    assert Workspace.bytes(shape, tiling) <= Workspace.bytes(asked, schedule.tiling(asked))


def test_tokens_inputs_and_their_scales_lie_apart_and_inside() -> None:
    """With two experts a token they take the most of their memory."""
    shape = replace(V4, tokens=100, chosen=2, hidden=512, intermediate=512)
    tiling = schedule.w4a8(shape, 132, IN_FP8)
    buffer = torch.zeros(Workspace.bytes(shape, tiling), dtype=torch.uint8)
    scratch = Workspace.over(buffer, shape, tiling)
    tensors = [*w4a8_launch.sorted_tokens(scratch, shape), *w4a8_launch.tokens(scratch, shape)]
    tensors += w4a8_launch.inputs(scratch, shape)
    assert [tuple(tensor.shape) for tensor in tensors] == [
        (200, 512),
        (4, 200),
        (100, 512),
        (100, 4),
        (200, 512),
        (4, 200),
    ]
    assert [tensor.data_ptr() % 16 for tensor in tensors] == [0] * 6
    for tensor in tensors:
        tensor.view(torch.uint8).add_(1)
    kept = (scratch.sorted_Y, scratch.table, scratch.counts)
    assert not any(bool(part.any()) for part in kept)
    assert buffer.sum() == sum(tensor.nbytes for tensor in tensors)
    assert buffer.max() == 1
