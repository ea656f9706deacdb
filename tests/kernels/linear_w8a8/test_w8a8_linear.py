"""Products of FP8 (W8A8) activations on a CPU, and which sizes they take."""

from typing import Any

import pytest
import torch
from torch import Tensor
from w8a8_case import SIZES, case, check, memory

from kernels.linear import fits_w8a8, padded_scales, supports_w8a8, w8a8, w8a8_linear
from kernels.matrix import BlockScaled


def weight(rows: int, features: int, block: tuple[int, int] = (128, 128)) -> BlockScaled:
    scales = torch.ones(-(-rows // block[0]), -(-features // block[1]))
    return BlockScaled(torch.zeros(rows, features).to(torch.float8_e4m3fn), scales, *block)


@pytest.mark.parametrize(("tokens", "features", "outputs"), SIZES)
def test_reference(tokens: int, features: int, outputs: int) -> None:
    number, scale, matrix = case(tokens, features, outputs, "cpu")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16)
    w8a8_linear(number, scale, matrix, out, memory(matrix))
    check(number, scale, matrix, out)


@pytest.mark.parametrize(
    ("matrix", "takes"),
    [
        (weight(128, 512), True),
        (weight(2112, 7168), True),
        (weight(7168, 2304), True),
        (weight(128, 576), False),
        (weight(72, 512), False),
        (weight(128, 512, (64, 128)), False),
        (weight(128, 512, (128, 64)), False),
    ],
)
def test_matrices(matrix: BlockScaled, takes: bool) -> None:
    assert fits_w8a8(matrix) is takes
    tokens = 16 + takes  # of those that it takes, numbers of tokens that it does not
    number = torch.zeros(tokens, matrix.shape[1]).to(torch.float8_e4m3fn)
    scale = torch.zeros(-(-matrix.shape[1] // 128), tokens).t()
    with pytest.raises(ValueError, match="are not multiplied"):
        w8a8_linear(number, scale, matrix, torch.zeros(tokens, matrix.shape[0], dtype=torch.bfloat16))


def test_scales_have_memory_where_they_need_a_copy() -> None:
    assert padded_scales(weight(256, 7168)) is None
    assert padded_scales(weight(7168, 2304)) == (56, 20)
    number, scale, matrix = case(16, 640, 128, "cpu")
    for wrong in (None, torch.zeros(1, 5)):
        with pytest.raises(ValueError, match="a copy of scales"):
            w8a8_linear(number, scale, matrix, torch.zeros(16, 128, dtype=torch.bfloat16), wrong)


def test_scales_row_by_row_are_refused() -> None:
    number, scale, matrix = case(16, 512, 128, "cpu")
    with pytest.raises(ValueError, match="column by column"):
        w8a8_linear(number, scale.contiguous(), matrix, torch.zeros(16, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("hopper", "version", "there", "multiplies"),
    [
        (True, "12.9", True, True),
        (True, "13.0", True, True),
        (True, "12.8", True, False),
        (True, "12.9", False, False),
        (False, "13.0", True, False),
    ],
)
def test_where_it_multiplies(
    hopper: bool, version: str, there: bool, multiplies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(w8a8, "is_hopper", lambda device: hopper)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(w8a8._MULTIPLIED, "_found", there)
    assert supports_w8a8.__wrapped__(torch.device("cpu")) is multiplies


@pytest.mark.parametrize("fault", ["raises", "other scales"])
def test_where_torch_multiplies_in_another_way_it_is_left_alone(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One line says so, and weights are dequantized."""
    right = w8a8.w8a8_linear

    def other(x_TE: Tensor, scale_TG: Tensor, *others: Any) -> None:
        if fault == "raises":
            raise RuntimeError("no such scales")
        right(x_TE, scale_TG.flip(1).t().contiguous().t(), *others)

    monkeypatch.setattr(w8a8, "is_hopper", lambda device: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(w8a8._MULTIPLIED, "_told", False)
    monkeypatch.setattr(w8a8, "w8a8_linear", other)
    assert not supports_w8a8.__wrapped__(torch.device("cpu"))
    [record] = caplog.records
    assert "dequantized before each product" in record.getMessage()


def test_torch_has_what_is_needed() -> None:
    """The versions that are supported do."""
    assert w8a8._MULTIPLIED.missing() == ""
