"""Norm and rope of an indexer on a GPU: eager, captured and replayed on other tokens."""

from __future__ import annotations

import pytest
import torch
from captured import capture
from index_rope_case import CASES, EPS, FACTOR, Case, check, check_int8, expected

from kernels.index_rope import index_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", [*CASES, Case(3000, 64, 128, 64, torch.bfloat16)], ids=str)
def test_against_fp64(case: Case) -> None:
    tensors = case.tensors("cuda")
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS, factor=FACTOR)
    check(tensors, want, case.dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_in_int8(case: Case) -> None:
    tensors, code_TJI = case.tensors("cuda"), case.code("cuda")
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS, factor=FACTOR, code_TJI=code_TJI)
    check_int8(tensors, want, code_TJI, case.dtype)


def test_replayed_on_other_tokens() -> None:
    case = Case(7, 32, 128, 64, torch.bfloat16)
    tensors, other = case.tensors("cuda"), case.tensors("cuda", seed=1)
    graph = capture(lambda: index_rope(*tensors.values(), eps=EPS, factor=FACTOR))
    for name, tensor in tensors.items():
        tensor.copy_(other[name])
    want = expected(tensors)
    graph.replay()
    check(tensors, want, case.dtype)
