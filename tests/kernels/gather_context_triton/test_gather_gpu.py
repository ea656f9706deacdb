"""The gather of cached context on a GPU: eager, captured, and replayed on other rows."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from gather_case import Gather

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [80, 576])
@pytest.mark.parametrize("begin", [0, 64, 200])
@pytest.mark.parametrize("counts", [[1], [0, 2048, 0], [64, 3, 0, 130], [17] * 200])
def test_every_entry_comes_from_its_row(counts: list[int], begin: int, features: int, dtype: torch.dtype) -> None:
    case = Gather(counts, begin, features, dtype, "cuda")
    case.serve()
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("latent", "features"), [(512, 576), (64, 80), (200, 216)])
@pytest.mark.parametrize("counts", [[1], [64, 3, 0, 130], [17] * 200])
def test_fp8_entries(counts: list[int], latent: int, features: int, dtype: torch.dtype) -> None:
    case = Gather(counts, 64, features, dtype, "cuda", latent=latent)
    case.serve()
    case.check()


def test_replayed_on_other_rows() -> None:
    case, other = (Gather(counts, 64, device="cuda", seed=seed) for seed, counts in [(1, [70, 30]), (2, [20, 80])])
    graph = capture(case.serve)

    def refill() -> None:
        for name, tensor in case.tensors.items():
            tensor.copy_(other.tensors[name])
        case.tensors["out"].fill_(torch.nan)

    check_replays(graph, refill, [case.tensors["out"]])
    case.want = other.want
    case.check()


def test_pages_past_two_to_the_31_elements() -> None:
    pages = 2**31 // (64 * 576) + 2
    cache = torch.empty(pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    cache[-1] = torch.randn(64, 576, device="cuda")
    case = Gather([64], device="cuda")
    case.tensors |= {"cache": cache, "table": torch.full((1, 1), pages - 1, dtype=torch.int32, device="cuda")}
    case.want = cache[-1].cpu()
    case.serve()
    case.check()
