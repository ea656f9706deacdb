"""Norm and rope of an indexer in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_index_rope_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from index_rope_case import CASES, EPS, Case, check, check_fp8, expected  # noqa: E402

from kernels.index_rope import launch  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case: Case) -> None:
    tensors = case.tensors()
    want = expected(tensors)
    base = tensors["key_TI"]._base
    assert base is not None
    behind = base[:, case.features :].clone()
    launch.index_rope(*tensors.values(), None, None, EPS)
    check(tensors, want, case.dtype)
    assert torch.equal(base[:, case.features :], behind)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_queries_in_fp8(case: Case) -> None:
    tensors, fp8 = case.tensors(), case.fp8()
    want, before_TJ = expected(tensors), fp8["weight_TJ"].clone()
    launch.index_rope(*tensors.values(), *fp8.values(), EPS)
    check(tensors, want, case.dtype)
    check_fp8(tensors, fp8, before_TJ)


def test_a_token_is_the_same_alone() -> None:
    case = Case(5, 8, 128, 64, torch.bfloat16)
    together, alone = case.tensors(), case.tensors()
    launch.index_rope(*together.values(), None, None, EPS)
    for token in range(5):
        own = {name: x if name[-2:] == "_I" else x[token : token + 1] for name, x in alone.items()}
        norms = alone["norm_I"], alone["bias_I"]
        launch.index_rope(own["q_TJI"], own["key_TI"], *norms, own["rotation_TO"], None, None, EPS)
    assert torch.equal(together["q_TJI"], alone["q_TJI"])
    assert torch.equal(together["key_TI"], alone["key_TI"])
