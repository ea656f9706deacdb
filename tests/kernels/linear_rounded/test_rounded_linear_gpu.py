"""Products of rounded activations on a Hopper GPU: eager, captured, and replayed on other values."""

import pytest
import torch
from captured import capture, check_replays
from rounded_case import SIZES, case, check

from kernels.linear import multiplies_rounded, rounded_linear, takes_rounded
from workers.graphs.guard import capture_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not multiplies_rounded(torch.device("cuda", torch.cuda.current_device())),
        reason="needs a Hopper GPU, CUDA 12.9 and a torch that multiplies with such scales",
    ),
]
MODELS = [(48, 7168, 2112), (1024, 1536, 24576), (272, 16384, 7168), (64, 18432, 7168), (4096, 7168, 2048)]
"""Of DeepSeek-V3."""


@pytest.mark.parametrize(("tokens", "features", "outputs"), [*SIZES, *MODELS])
def test_every_size(tokens: int, features: int, outputs: int) -> None:
    number, scale, weight = case(tokens, features, outputs, "cuda")
    assert takes_rounded(tokens, weight)
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    rounded_linear(number, scale, weight, out)
    check(number, scale, weight, out)


def test_replayed_on_other_numbers() -> None:
    """A capture must find nothing that is allocated, nor anything that waits."""
    number, scale, weight = case(64, 1024, 256, "cuda")
    out = torch.full((64, 256), torch.nan, dtype=torch.bfloat16, device="cuda")
    graph = capture(lambda: rounded_linear(number, scale, weight, out))
    with capture_guard(torch.device("cuda")):
        rounded_linear(number, scale, weight, out)
    number.copy_(number.clone().flip(0))
    scale.copy_(scale.clone().flip(0))
    check_replays(graph, lambda: out.fill_(torch.nan), [out])
    check(number, scale, weight, out)
