"""Uploads: the same bytes as a plain copy, and errors that reach whoever waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from workers.weights.upload import Uploader

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture
def uploader(device: torch.device) -> Iterator[Uploader]:
    made = Uploader(device, threads=3, piece_bytes=256)
    yield made
    made.close()


def test_everything_arrives_whatever_its_shape(uploader: Uploader, device: torch.device) -> None:
    shapes = [(), (1,), (0, 4), (63,), (64,), (65,), (1, 1, 200), (3, 100), (7, 5, 9), (2, 64, 64)]
    sources = [torch.randn(shape) for shape in shapes * 20]
    into = [torch.full_like(source, torch.nan, device=device) for source in sources]
    for source, place in zip(sources, into, strict=True):
        uploader.fill(place, lambda source=source: source)
    uploader.settle()
    for source, place in zip(sources, into, strict=True):
        torch.testing.assert_close(place.cpu(), source, rtol=0, atol=0)


def test_strided_parts_and_other_dtypes(uploader: Uploader, device: torch.device) -> None:
    source = torch.randn(40, 30).to(torch.bfloat16)
    into = torch.zeros(40, 50, dtype=torch.float32, device=device)
    uploader.fill(into[:, 5:25], lambda: source[:, 10:])
    uploader.settle()
    assert torch.equal(into[:, 5:25].cpu(), source[:, 10:].float())
    assert not into[:, :5].any()
    quantized = torch.randint(0, 120, (40, 30), dtype=torch.uint8).view(torch.float8_e4m3fn)
    kept = torch.zeros(2, 40, 20, dtype=torch.float8_e4m3fn, device=device)
    uploader.fill(kept[1], lambda: quantized[:, 10:])
    uploader.settle()
    assert torch.equal(kept[1].cpu().view(torch.uint8), quantized[:, 10:].view(torch.uint8))
    assert not into[:, 25:].any()


def test_what_is_computed_of_uploads(uploader: Uploader, device: torch.device) -> None:
    """Uploads are more than a buffer holds, many at once, into memory of another dtype."""
    sources = [(torch.randn(n, 9).to(torch.float8_e4m3fn), torch.rand(n, 1)) for n in range(1, 100)]
    into = [torch.full(data.shape, torch.nan, dtype=torch.bfloat16, device=device) for data, _ in sources]
    for pair, place in zip(sources, into, strict=True):
        uploader.fill_computed(place, lambda pair=pair: pair, lambda data, scale: data.float() * scale)
    uploader.settle()
    for (data, scale), place in zip(sources, into, strict=True):
        assert torch.equal(place.cpu(), (data.float() * scale).bfloat16())


def test_an_error_reaches_settle(uploader: Uploader, device: torch.device) -> None:
    def broken() -> torch.Tensor:
        raise OSError("the disk is gone")

    uploader.fill(torch.empty(4, device=device), broken)
    with pytest.raises(OSError, match="the disk is gone"):
        uploader.settle()
