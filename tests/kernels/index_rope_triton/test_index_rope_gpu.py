"""Norm and rope of an indexer on a GPU: eager, captured and replayed on other tokens."""

from __future__ import annotations

import pytest
import torch
from captured import capture
from index_rope_case import CASES, EPS, Case, check, check_fp8, expected

from kernels.index_rope import index_rope

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("case", [*CASES, Case(3000, 64, 128, 64, torch.bfloat16)], ids=str)
def test_against_fp64(case: Case) -> None:
    tensors = case.tensors("cuda")
    want = expected(tensors)
    index_rope(*tensors.values(), eps=EPS)
    check(tensors, want, case.dtype)


@pytest.mark.parametrize("case", CASES[1:], ids=str)
def test_queries_in_fp8(case: Case) -> None:
    tensors, fp8 = case.tensors("cuda"), case.fp8("cuda")
    want, before_TJ = expected(tensors), fp8["weight_TJ"].clone()
    index_rope(*tensors.values(), eps=EPS, **fp8)
    check(tensors, want, case.dtype)
    check_fp8(tensors, fp8, before_TJ)


def test_replayed_on_other_tokens() -> None:
    case = Case(7, 32, 128, 64, torch.bfloat16)
    tensors, other = case.tensors("cuda"), case.tensors("cuda", seed=1)
    graph = capture(lambda: index_rope(*tensors.values(), eps=EPS))
    for name, tensor in tensors.items():
        tensor.copy_(other[name])
    want = expected(tensors)
    graph.replay()
    check(tensors, want, case.dtype)
