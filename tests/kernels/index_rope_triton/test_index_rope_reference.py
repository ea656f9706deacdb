"""The reference of the index keys' norm and rotation, against float64."""

import pytest
import torch
from index_rope_case import CASES, EPS, FACTOR, Case, check, check_int8, expected

from kernels.index_rope import index_rope


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_against_fp64(case: Case) -> None:
    tensors = case.tensors()
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS, factor=FACTOR)
    check(tensors, want, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_reference_in_int8(case: Case) -> None:
    tensors, code_TJI = case.tensors(), case.code()
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS, factor=FACTOR, code_TJI=code_TJI)
    check_int8(tensors, want, code_TJI, case.dtype)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"both_TX": torch.zeros(3, 48)}, "do not fit into 48"),
        ({"rotation_TO": torch.zeros(3, 50)}, "50 roped features"),
        ({"rotation_TO": torch.zeros(3, 15)}, "come in pairs"),
        ({"bias_I": torch.zeros(16)}, "a norm"),
        ({"norm_I": torch.zeros(48, dtype=torch.bfloat16)}, "fp32"),
        ({"both_TX": torch.zeros(3, 53, dtype=torch.bfloat16)}, "fp32"),
        ({"q_TJI": torch.zeros(3, 48, 5).transpose(1, 2)}, "contiguous"),
        ({"key_TI": torch.zeros(3, 48, dtype=torch.bfloat16)}, "keys are torch.float32"),
        ({"weight_TJ": torch.zeros(3, 5).half()}, "weights are contiguous fp32"),
        ({"code_TJI": torch.zeros(1, 5, 48, dtype=torch.int8)}, "contiguous int8"),
        (
            Case(3, 5, 24, 16).tensors() | {"code_TJI": torch.zeros(3, 5, 24, dtype=torch.int8)},
            "24 features are no multiple of 16",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(changes: dict[str, torch.Tensor], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        index_rope(**(CASES[1].tensors() | changes), eps=EPS, factor=FACTOR)
