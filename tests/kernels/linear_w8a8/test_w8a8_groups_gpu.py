"""Products of groups of FP8 (W8A8) activations on a Hopper GPU: eager, captured, and replayed on other values."""

from __future__ import annotations

import pytest
import torch
from captured import check_replays
from w8a8_groups_case import check, groups_case

from kernels.linear import takes_w8a8_groups, w8a8_group_linear
from kernels.runtime.hopper import is_hopper
from workers.graphs.guard import capture_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not is_hopper(torch.device("cuda", torch.cuda.current_device())),
        reason="needs a Hopper GPU",
    ),
]


@pytest.mark.parametrize(
    ("tokens", "groups", "rows", "features"),
    [
        (17, 8, 1024, 4096),
        (64, 4, 1024, 4096),
        (130, 16, 1024, 4096),
        (700, 8, 1024, 4096),
        (2048, 8, 1024, 4096),
        (99, 3, 128, 384),
        (3000, 2, 384, 128),
    ],
)
def test_every_size(tokens: int, groups: int, rows: int, features: int) -> None:
    """Sizes of DeepSeek V4's output, of one rank and two, and of Pro; and odd ones."""
    number, scale, weight, out = groups_case(tokens, groups, rows, features, "cuda")
    assert takes_w8a8_groups(number.device, groups, weight)
    w8a8_group_linear(number, scale, weight, out)
    check(number, scale, weight, out)


def test_a_token_does_not_depend_on_the_others() -> None:
    """Nor on how many weight rows items have: 256 here, 64 and 128 of fewer."""
    number, scale, weight, out = groups_case(4096, 8, 1024, 4096, "cuda")
    w8a8_group_linear(number, scale, weight, out)
    for own in (slice(0, 20), slice(100, 300), slice(4000, 4096)):
        tokens = own.stop - own.start
        alone = torch.empty(tokens, 8, 1024, dtype=torch.bfloat16, device="cuda")
        scales = scale[own].t().contiguous().t()
        w8a8_group_linear(number[own].contiguous(), scales, weight, alone)
        assert torch.equal(alone, out[own])


def test_replayed_on_other_numbers() -> None:
    number, scale, weight, out = groups_case(300, 8, 1024, 4096, "cuda")
    w8a8_group_linear(number, scale, weight, out, dependent=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), capture_guard(torch.device("cuda")):
        w8a8_group_linear(number, scale, weight, out, dependent=True)
    number.view(torch.uint8).copy_(number.view(torch.uint8).flip(0))
    scale.copy_(scale.flip(0))
    check_replays(graph, lambda: out.fill_(torch.nan), [out])
    check(number, scale, weight, out)
