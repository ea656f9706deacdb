"""The conversion of rows to scaled fp16 on a GPU: eager, captured and replayed on other rows."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from fp16_scaled_case import check, check_against_reference, poisoned, rows

from kernels.fp16_scaled import to_fp16_scaled

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("features", [16, 200, 2048, 16384, 18432])
def test_rows(features: int) -> None:
    check_against_reference(rows(features, "cuda"))


def test_replayed_on_other_rows() -> None:
    x, other = rows(2048, "cuda"), rows(2048, "cuda").flip(1)
    out = poisoned(x)
    graph = capture(lambda: to_fp16_scaled(x, out))

    def refill() -> None:
        x[:6].copy_(other[:6])
        out.fp16_TF.fill_(torch.nan)

    check_replays(graph, refill, [out.fp16_TF, out.unit_T])
    check(x, out)
