"""Products of the general path with MXFP8 weights that come through a ring, run by the PTX emulator."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels.linear import mxfp8_launch, mxfp8_pieces
from tests.kernels.linear_mxfp8.mxfp8_case import check, drawn
from tests.support.ptx import emulated
from workers.memory.scratch import Scratch
from workers.models import general
from workers.models.general import GeneralOps
from workers.parallel.group import Group
from workers.weights.formats import MXFP8
from workers.weights.weight import Weight

TOKENS, ROWS, FEATURES = 5, 144, 1024


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have CPU tensors taken for a Hopper GPU's, of three multiprocessors, whose products may come through the ring."""
    monkeypatch.setattr(mxfp8_launch, "is_hopper", lambda device: True)
    monkeypatch.setattr(mxfp8_launch, "multiprocessors", lambda device: 3)
    monkeypatch.setattr(mxfp8_launch, "MOST_STREAMED", 64)
    monkeypatch.setattr(general, "takes_mxfp8", lambda x, weight: True)


@pytest.mark.long
def test_a_product() -> None:
    x, matrix, _ = drawn(TOKENS, ROWS, FEATURES, torch.bfloat16)
    weight = Weight(matrix.data, MXFP8, matrix.scales)
    out = torch.full((TOKENS, ROWS), torch.nan, dtype=torch.bfloat16)
    scratch = Scratch(x.device, torch.full((1 << 20,), 0xFF, dtype=torch.uint8))
    with emulated() as launches:
        GeneralOps(Group()).linear(x, weight, out, scratch)
    assert launches == ["mxfp8_multiply", "add_pieces"]
    check(x, matrix, out)


def test_memory_of_a_product() -> None:
    """One block of 256 rows, of which each program leaves a piece of two times 128."""
    x, matrix, _ = drawn(TOKENS, ROWS, FEATURES, torch.bfloat16)
    assert mxfp8_pieces(x, matrix, torch.empty(TOKENS, ROWS)) == (2 * (1 + 3), 16, 128)


WHOLE = drawn(TOKENS, ROWS, FEATURES, torch.bfloat16)[:2]


@pytest.mark.parametrize(
    ("x", "columns"),
    [
        pytest.param(WHOLE[0].float(), ROWS, id="tokens in fp32"),
        pytest.param(WHOLE[0].repeat(13, 1), ROWS, id="more tokens than are taken"),
        pytest.param(torch.empty(TOKENS, FEATURES + 4).bfloat16()[:, :FEATURES], ROWS, id="rows not in pieces"),
        pytest.param(torch.empty(TOKENS, FEATURES + 4).bfloat16()[:, 4:], ROWS, id="tokens that begin in a piece"),
        pytest.param(WHOLE[0], ROWS + 16, id="results that lie apart"),
    ],
)
def test_what_other_kernels_multiply(x: Tensor, columns: int) -> None:
    out = torch.empty(x.shape[0], columns)[:, :ROWS]
    assert mxfp8_pieces(x, WHOLE[1], out) is None


def test_short_rows_are_for_other_kernels() -> None:
    for features in (512, 1056):
        x, matrix, out = drawn(TOKENS, ROWS, features, torch.bfloat16)
        assert mxfp8_pieces(x, matrix, torch.empty_like(out)) is None


def test_blocks_alone_and_blocks_shared_out() -> None:
    """Of three multiprocessors: three blocks of 128 rows have one each; two have them share blocks of 256 rows."""
    for rows, sizes in ((384, (3 + 3, 16, 128)), (256, (2 * (1 + 3), 16, 128))):
        x, matrix, out = drawn(TOKENS, rows, FEATURES, torch.bfloat16)
        assert mxfp8_pieces(x, matrix, torch.empty_like(out)) == sizes


@pytest.mark.long
def test_a_product_without_pieces() -> None:
    x, matrix, _ = drawn(TOKENS, 304, FEATURES, torch.bfloat16)
    weight = Weight(matrix.data, MXFP8, matrix.scales)
    out = torch.full((TOKENS, 304), torch.nan, dtype=torch.bfloat16)
    with emulated() as launches:
        GeneralOps(Group()).linear(x, weight, out, Scratch(x.device))
    assert launches == ["mxfp8_multiply"]
    check(x, matrix, out)
