"""The product that makes a query's latent of FP8 (W8A8) activations, and the latent's norm, on a Hopper GPU."""

from dataclasses import replace

import pytest
import torch
from w8a8_case import case, check

from kernels.linear import supports_w8a8, w8a8_pieces
from kernels.quantize import Fp8Rows
from kernels.rounded_norm import w8a8_latent
from tests.support.rounded_norm_case import check_norm, memory_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not supports_w8a8(torch.device("cuda", torch.cuda.current_device())),
        reason="needs a Hopper GPU, CUDA 12.9 and a torch that multiplies with such scales",
    ),
]


@pytest.mark.parametrize(("features", "outputs", "normed"), [(4096, 1536, 1024), (7168, 2112, 1536)])
@pytest.mark.parametrize("tokens", [9, 16, 33])
def test_a_latent_and_its_norm(tokens: int, features: int, outputs: int, normed: int) -> None:
    """Of DeepSeek V4, whose blocks have many pieces, and of V3."""
    number, scale, weight = case(-(-tokens // 4) * 4, features, outputs, "cuda")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    sizes = w8a8_pieces(tokens, weight)
    assert sizes is not None
    pieces, norm_A = torch.full(sizes, torch.nan, device="cuda"), torch.rand(normed, device="cuda").bfloat16() + 0.5
    normed_TA, rounded = memory_of(tokens, normed, "cuda")
    rounded = replace(rounded, by_token_TG=None)  # no experts read a latent
    product = Fp8Rows(number, scale), weight, out, norm_A, normed_TA, rounded
    w8a8_latent(*product, pieces=pieces, eps=1e-6, dependent=True)
    check(number[:tokens], scale[:tokens], weight, out)
    check_norm(out[:, :normed], norm_A, normed_TA, rounded)
