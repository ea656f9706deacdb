"""Division of products into parts, and the arguments of the public functions."""

import math
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from kernels import linear
from kernels.linear import part_linear, parts_of
from kernels.linear.parts import MOST_BYTES, MOST_PARTS, Cut


@pytest.mark.parametrize(
    ("rows", "features", "cut"),
    [
        (3648, 2048, Cut(128, 8, 4)),  # DeepSeek-V2-Lite: queries and latents
        (2048, 2048, Cut(64, 8, 4)),  # its attention's output
        (7168, 16384, None),  # DeepSeek-V3's
        (102400, 2048, None),
        (64, 8, Cut(64, 1, 1)),
    ],
)
def test_published_sizes(rows: int, features: int, cut: Cut | None) -> None:
    assert Cut.of(rows, features, 132) == cut


@given(rows=st.integers(1, 20000), features=st.integers(1, 20000), programs=st.integers(1, 200))
@example(rows=65, features=513, programs=1)  # 131 KB of weights; but a stage has room for 64 tokens besides
def test_parts_cover_the_features_once_and_all_programs_run_at_once(rows: int, features: int, programs: int) -> None:
    cut = Cut.of(rows, features, programs)
    if cut is None:
        for block, parts in product((64, 128), range(1, MOST_PARTS + 1)):
            stages = math.ceil(math.ceil(features / 64) / parts)
            assert -(-rows // block) * parts > programs or stages * (block + 64) * 128 > MOST_BYTES
        return
    assert (cut.parts - 1) * cut.group < features <= cut.parts * cut.group
    assert -(-rows // cut.block) * cut.parts <= programs
    assert cut.parts <= MOST_PARTS
    assert cut.stages * (cut.block + 64) * 128 <= MOST_BYTES


@pytest.mark.parametrize("tokens", [16, 17, 64, 65])
def test_only_some_tokens_on_hopper_are_served(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.zeros(128, 256, dtype=torch.bfloat16)
    assert parts_of(tokens, weight) == 0
    monkeypatch.setattr(linear, "is_hopper", lambda device: True)
    assert parts_of(tokens, weight) == (4 if 16 < tokens <= 64 else 0)
    for other in (weight.float(), torch.zeros(128, 260, dtype=torch.bfloat16)[:, :-4], weight.t()):
        assert parts_of(tokens, other) == 0


def parts(x: Tensor, weight: Tensor) -> Tensor:
    out = torch.full((x.shape[0], 3, weight.shape[0]), torch.nan)
    part_linear(x, weight, out)
    return out


def test_on_a_cpu() -> None:
    x, weight = torch.randn(5, 192).bfloat16(), torch.randn(7, 192).bfloat16()
    want = torch.einsum("tpk,fpk->tpf", x.double().unflatten(1, (3, 64)), weight.double().unflatten(1, (3, 64)))
    torch.testing.assert_close(parts(x, weight).double(), want, rtol=1e-5, atol=1e-5)


def test_what_it_refuses() -> None:
    x, weight = torch.zeros(5, 192).bfloat16(), torch.zeros(7, 192).bfloat16()
    with pytest.raises(ValueError, match="no 3 parts"):
        parts(torch.zeros(5, 256).bfloat16(), torch.zeros(7, 256).bfloat16())
    with pytest.raises(ValueError, match="no 3 parts"):
        parts(torch.zeros(65, 192).bfloat16(), weight)
    for one, other in ((x.float(), weight), (x, weight.float()), (torch.zeros(5, 200).bfloat16()[:, 4:-4], weight)):
        with pytest.raises(ValueError, match="16-byte"):
            parts(one, other)
