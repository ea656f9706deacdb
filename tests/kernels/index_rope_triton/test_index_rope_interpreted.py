"""Runs interpreted_index_rope.py in a process whose Triton interprets; and the reference beside it."""

from pathlib import Path

import pytest
import torch
from index_rope_case import CASES, EPS, Case, check, check_fp8, expected

from kernels.index_rope import index_rope
from tests.support.interpreter import interpreted_pytest


@pytest.mark.long
def test_index_rope_in_the_interpreter() -> None:
    interpreted_pytest(Path(__file__).with_name("interpreted_index_rope.py"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_against_fp64(case: Case) -> None:
    tensors = case.tensors()
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS)
    check(tensors, want, case.dtype)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_the_reference_in_fp8(case: Case) -> None:
    tensors, fp8 = case.tensors(), case.fp8()
    want, before_TJ = expected(tensors), fp8["weight_TJ"].clone()
    index_rope(*tensors.values(), eps=EPS, **fp8)
    check(tensors, want, case.dtype)
    check_fp8(tensors, fp8, before_TJ)


def test_codes_without_weights_are_refused() -> None:
    tensors, fp8 = CASES[1].tensors(), CASES[1].fp8()
    with pytest.raises(ValueError, match="come with weights"):
        index_rope(*tensors.values(), eps=EPS, code_TJI=fp8["code_TJI"])
    with pytest.raises(ValueError, match="contiguous e4m3"):
        index_rope(*tensors.values(), eps=EPS, code_TJI=fp8["code_TJI"][1:], weight_TJ=fp8["weight_TJ"])
    with pytest.raises(ValueError, match="weights are contiguous fp32"):
        index_rope(*tensors.values(), eps=EPS, code_TJI=fp8["code_TJI"], weight_TJ=fp8["weight_TJ"].half())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key_TI": torch.zeros(3, 32)}, "do not fit into 48"),
        ({"rotation_TO": torch.zeros(3, 50)}, "50 roped features"),
        ({"rotation_TO": torch.zeros(3, 15)}, "come in pairs"),
        ({"bias_I": torch.zeros(16)}, "a norm"),
        ({"norm_I": torch.zeros(48, dtype=torch.bfloat16)}, "fp32"),
        ({"q_TJI": torch.zeros(3, 48, 5).transpose(1, 2)}, "contiguous"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        index_rope(*(CASES[1].tensors() | changes).values(), eps=EPS)
