"""Norm and rope of an indexer in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from index_rope_case import CASES, EPS, FACTOR, Case, check, check_int8, expected  # noqa: E402

from kernels.index_rope import launch_index_rope  # noqa: E402


@pytest.mark.parametrize("case", CASES, ids=str)
def test_against_fp64(case: Case) -> None:
    tensors = case.tensors()
    want, before_TX = expected(tensors), tensors["both_TX"].clone()
    base = tensors["key_TI"]._base
    assert base is not None
    launch_index_rope(*tensors.values(), None, EPS, FACTOR)
    check(tensors, want, case.dtype)
    assert bool(base[:, case.features :].isnan().all())
    assert torch.equal(tensors["both_TX"], before_TX)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_in_int8(case: Case) -> None:
    tensors, code_TJI = case.tensors(), case.code()
    want = expected(tensors)
    launch_index_rope(*tensors.values(), code_TJI, EPS, FACTOR)
    check_int8(tensors, want, code_TJI, case.dtype)


def test_a_token_is_the_same_alone() -> None:
    case = Case(5, 8, 128, 64, torch.bfloat16)
    together, alone = case.tensors(), case.tensors()
    launch_index_rope(*together.values(), None, EPS, FACTOR)
    for token in range(5):
        own = [x if name[-2:] == "_I" else x[token : token + 1] for name, x in alone.items()]
        launch_index_rope(*own, None, EPS, FACTOR)
    for name in ("q_TJI", "key_TI", "weight_TJ"):
        assert torch.equal(together[name], alone[name])
