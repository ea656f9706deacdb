"""Random pages of the latent cache: what proofs of steps write to it, and what they see of it afterwards."""

from __future__ import annotations

import pytest
import torch

from kernels.page import PAGE_TOKENS
from tests.support.fp8_entries import numbers
from workers.cache.paged import PagedCache
from workers.cache.random_pages import RandomPages
from workers.cache.spec import CacheSpec, Fp8LatentSpec, IndexSpec, Int8IndexSpec, LatentSpec

PAGE_P = torch.tensor([0, 4, 2])


def cache_of(dtype: torch.dtype) -> PagedCache:
    return PagedCache.allocate([LatentSpec(5, dtype)] * 3, 6, torch.device("cpu"))


def noise(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_random_poisoned_where_told_and_alone_written(dtype: torch.dtype) -> None:
    cache, poison_PK = cache_of(dtype), torch.rand(3, PAGE_TOKENS, generator=noise(1)) < 0.5
    pages = RandomPages(cache, PAGE_P.tolist(), noise())
    pages.poison(1, poison_PK)
    assert not any(layer.any() for layer in cache.layers)
    pages.restore()
    for index, layer in enumerate(cache.layers):
        written = layer[PAGE_P]
        poisoned_PK = poison_PK if index == 1 else torch.zeros_like(poison_PK)
        assert torch.equal(written.isnan(), poisoned_PK.unsqueeze(-1).expand_as(written))
        assert 0.9 < written[~poisoned_PK].float().std() < 1.1
        assert not layer[[1, 3, 5]].any()
    assert not torch.equal(cache.layers[0], cache.layers[2])
    again = cache_of(dtype)
    RandomPages(again, PAGE_P.tolist(), noise()).restore()
    assert torch.equal(again.layers[2], cache.layers[2])
    cache.zero_fill(PAGE_P.tolist())
    assert not any(layer.any() for layer in cache.layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_is_a_change(dtype: torch.dtype) -> None:
    """One bit of a number, of the sign of 0, of a NaN; and what is restored has not changed."""
    cache = cache_of(dtype)
    pages = RandomPages(cache, PAGE_P.tolist(), noise())
    poison_PK = torch.zeros(3, PAGE_TOKENS, dtype=torch.bool)
    poison_PK[1, 7] = True
    for layer in range(3):
        pages.poison(layer, poison_PK)
    pages.restore()
    layer, whole = cache.layers[1], torch.int32 if dtype == torch.float32 else torch.int16
    assert not any(pages.changed(index).any() for index in range(3))
    entry_E = torch.tensor([4 * PAGE_TOKENS + 7, 2 * PAGE_TOKENS + 63])
    before = cache.entry_bits(1, entry_E)
    layer.view(whole)[4, 7, 0] += 1
    layer.view(whole)[2, 63, 4] += 1
    layer[5] = 1.0  # not in play
    assert pages.changed(1).nonzero().tolist() == [[1, 7], [2, 63]]
    assert (cache.entry_bits(1, entry_E) != before).nonzero().tolist() == [[0, 0], [1, 4]]
    assert not pages.changed(0).any()
    pages.restore()
    assert not pages.changed(1).any()
    assert torch.equal(cache.entry_bits(1, entry_E), before)
    zeros = RandomPages(cache, PAGE_P.tolist(), noise())
    for content in zeros._contents:
        content.zero_()
    zeros.restore()
    layer[0, 0, 0] = -0.0
    assert zeros.changed(1).nonzero().tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("latent", "rope", "dtype", "size"),
    [
        (512, 64, torch.bfloat16, 656),  # 512 + 16 + 128
        (64, 16, torch.bfloat16, 112),  # 64 + 4 + 32, and 12 of padding
        (160, 8, torch.float32, 208),  # 160 + 8 + 32, and 8
        (6, 2, torch.float16, 16),  # 6, 2 before the scale, 4 + 4
    ],
)
def test_fp8_pages(latent: int, rope: int, dtype: torch.dtype, size: int) -> None:
    """Are those of the same latents rounded; of what is poisoned all is read as NaN."""
    spec: CacheSpec = Fp8LatentSpec(latent, rope, dtype)
    assert (spec.entry_bytes, spec.page_bytes) == (size, 64 * size)
    cache = PagedCache.allocate([spec] * 2, 6, torch.device("cpu"))
    assert cache.layers[0].shape == (6, 64, size)
    pages, poison_PK = (
        RandomPages(cache, PAGE_P.tolist(), noise()),
        torch.rand(3, PAGE_TOKENS, generator=noise(1)) < 0.5,
    )
    pages.poison(1, poison_PK)
    pages.restore()
    read = [numbers(layer[PAGE_P].flatten(0, 1), latent, rope, dtype) for layer in cache.layers]
    plain = LatentSpec(latent + rope, dtype).random(3, torch.device("cpu"), noise()).flatten(0, 1)
    torch.testing.assert_close(read[0], plain.double(), rtol=2**-4, atol=1.7 / 448 / 2)
    assert torch.equal(read[0][:, latent:], plain[:, latent:].double())
    poison_E = poison_PK.flatten()
    assert read[1][poison_E].isnan().all()
    assert read[1][~poison_E].isfinite().all()
    assert not pages.changed(1).any()
    cache.layers[1][4, 7, latent // 2] ^= 1
    assert pages.changed(1).nonzero().tolist() == [[1, 7]]
    cache.zero_fill(PAGE_P.tolist())
    assert not any(layer.any() for layer in cache.layers)
    assert not numbers(cache.layers[0][0], latent, rope, dtype).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_pages_of_index_keys(dtype: torch.dtype) -> None:
    """A page's keys, then their scales: 64 * 128 + 64 * 4 bytes. They are those of the same keys rounded, a key that is
    poisoned is NaN, and a bit that changes is one of its own entry, wherever its bytes lie."""
    spec: CacheSpec = Int8IndexSpec(128, dtype)
    assert (spec.entry_bytes, spec.page_bytes) == (132, 8448)
    cache = PagedCache.allocate([spec] * 2, 6, torch.device("cpu"))
    pages, poison_PK = (
        RandomPages(cache, PAGE_P.tolist(), noise()),
        torch.rand(3, PAGE_TOKENS, generator=noise(1)) < 0.5,
    )
    pages.poison(1, poison_PK)
    pages.restore()

    def read(layer: int) -> torch.Tensor:
        page_PB = cache.layers[layer][PAGE_P].flatten(1)
        code = page_PB[:, :8192].contiguous().view(torch.int8).double().view(-1, PAGE_TOKENS, 128)
        return code * page_PB[:, 8192:].contiguous().view(torch.float32).double().unsqueeze(-1)

    plain = IndexSpec(128, dtype).random(3, torch.device("cpu"), noise())
    # The largest that is drawn is 1.7, in bf16 1.703125.
    torch.testing.assert_close(read(0), plain.double(), rtol=1e-6, atol=1.703125 / 127 / 2)
    assert read(1)[poison_PK].isnan().all()
    assert read(1)[~poison_PK].isfinite().all()
    assert not pages.changed(0).any()
    entry_E = torch.tensor([4 * PAGE_TOKENS + 7, 2 * PAGE_TOKENS + 63, 5])
    before = cache.entry_bits(0, entry_E)
    cache.layers[0].flatten(1)[4, 7 * 128 + 3] ^= 1
    cache.layers[0].flatten(1)[2, 8192 + 63 * 4 + 2] ^= 1
    assert pages.changed(0).nonzero().tolist() == [[1, 7], [2, 63]]
    assert (cache.entry_bits(0, entry_E) != before).nonzero().tolist() == [[0, 3], [1, 130]]
    cache.zero_fill(PAGE_P.tolist())
    assert not any(layer.any() for layer in cache.layers)
