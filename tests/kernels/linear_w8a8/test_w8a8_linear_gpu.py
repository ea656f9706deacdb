"""Products of FP8 (W8A8) activations on a Hopper GPU: eager, captured, and replayed on other values."""

import pytest
import torch
from captured import check_replays
from w8a8_case import SIZES, case, check, memory

from kernels.linear import fits_w8a8, supports_w8a8, w8a8_linear, w8a8_pieces
from kernels.quantize import Fp8Rows
from kernels.rounded_norm import launch_rounded_norm, w8a8_add_norm
from tests.support.rounded_norm_case import EPS, check_norm, memory_of
from workers.graphs.guard import capture_guard

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not supports_w8a8(torch.device("cuda", torch.cuda.current_device())),
        reason="needs a Hopper GPU, CUDA 12.9 and a torch that multiplies with such scales",
    ),
]
MODELS = [
    (48, 7168, 2112),
    (1024, 1536, 24576),
    (272, 16384, 7168),
    (64, 18432, 7168),
    (4096, 7168, 2048),
    (12, 2304, 7168),
]
"""Sizes of DeepSeek-V3's products."""


@pytest.mark.parametrize(("tokens", "features", "outputs"), [*SIZES, *MODELS])
def test_every_size(tokens: int, features: int, outputs: int) -> None:
    number, scale, weight = case(tokens, features, outputs, "cuda")
    assert fits_w8a8(weight)
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    w8a8_linear(number, scale, weight, out, memory(weight))
    check(number, scale, weight, out)


@pytest.mark.parametrize("tokens", [1, 9, 16, 17, 33, 64])
@pytest.mark.parametrize(("features", "outputs"), [(7168, 2112), (1536, 24576), (16384, 7168), (2048, 192)])
def test_some_tokens_by_kernels_of_our_own(tokens: int, features: int, outputs: int) -> None:
    """The same bits in every replay, with pieces that hold NaN before."""
    number, scale, weight = case(-(-tokens // 4) * 4, features, outputs, "cuda")
    out = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    sizes = w8a8_pieces(tokens, weight)
    assert (sizes is None) == (tokens > 16 and features < 2048)
    if sizes is None:
        return
    pieces = torch.full(sizes, torch.nan, device="cuda")

    def product() -> None:
        w8a8_linear(number, scale, weight, out, pieces=pieces, dependent=True)

    product()
    check(number[:tokens], scale[:tokens], weight, out)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        product()

    def refill() -> None:
        out.fill_(torch.nan)
        pieces.fill_(torch.nan)

    check_replays(graph, refill, [out])
    check(number[:tokens], scale[:tokens], weight, out)


def test_what_lies_behind_the_tokens_does_not_matter() -> None:
    number, scale, weight = case(100, 1024, 256, "cuda")
    number[97:].view(torch.uint8).fill_(0xFF)
    scale[97:] = torch.nan
    out = torch.zeros(100, 256, dtype=torch.bfloat16, device="cuda")
    w8a8_linear(number, scale, weight, out)
    check(number[:97], scale[:97], weight, out[:97])


def test_replayed_on_other_numbers() -> None:
    """A capture must find nothing that is allocated, nor anything that waits; but for cuBLAS's own memory, which it
    takes once a stream, whatever it multiplies."""
    number, scale, weight = case(64, 640, 256, "cuda")
    out, padded = torch.full((64, 256), torch.nan, dtype=torch.bfloat16, device="cuda"), memory(weight)

    def product() -> None:
        w8a8_linear(number, scale, weight, out, padded)

    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        product()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream), capture_guard(torch.device("cuda")):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        product()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    number.view(torch.uint8).copy_(number.view(torch.uint8).flip(0))
    scale.copy_(scale.flip(0))

    def refill() -> None:
        out.fill_(torch.nan)
        if padded is not None:
            padded.fill_(torch.nan)

    check_replays(graph, refill, [out])
    check(number, scale, weight, out)


@pytest.mark.parametrize("tokens", [9, 16, 64])
@pytest.mark.parametrize(("features", "outputs"), [(4096, 4096), (16384, 7168), (2048, 7168)])
def test_some_tokens_that_are_added_to_the_residual(features: int, outputs: int, tokens: int) -> None:
    """Mistral Small 4's, and DeepSeek-V3's, alone and as a rank of eight has it: the residual has the bits of three
    launches."""
    number, scale, weight = case(tokens + -tokens % 4, features, outputs, "cuda")
    sizes = w8a8_pieces(tokens, weight)
    assert sizes is not None
    pieces = torch.full(sizes, torch.nan, device="cuda")
    begun = (30 * torch.randn(tokens, outputs, device="cuda")).bfloat16()
    weight_E, want, residual = torch.rand(outputs, device="cuda").bfloat16() + 0.5, begun.clone(), begun.clone()
    product, rounded = memory_of(tokens, outputs, "cuda")
    w8a8_linear(number, scale, weight, product, pieces=pieces)
    launch_rounded_norm(product, weight_E, product, rounded, EPS, want)
    out, rounded = memory_of(tokens, outputs, "cuda")
    into = residual, weight_E, out, rounded
    w8a8_add_norm(Fp8Rows(number, scale), weight, *into, pieces=pieces, eps=EPS, dependent=True)
    assert torch.equal(residual, want)
    check_norm(residual, weight_E, out, rounded)
