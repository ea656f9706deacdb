"""Cache specs: what one layer caches per token, how much memory that takes, and how it is tested.

All caches of a rank have the same pages: a page id means the same 64 tokens in each of them, so page tables, the prefix
cache and preemption know of pages alone.

Shape legend: P pages, K entries per page, 64 unless they stand for several tokens each, E entries, D features of an
index key, C integers of an entry, B bytes of a scale.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from kernels.index_entry import SCALE_BYTES, parts
from kernels.index_entry import encode as encode_keys
from kernels.latent_entry import encode, fp8_entry
from kernels.page import PAGE_TOKENS, WHOLE, Shards
from workers.memory.bits import bits


class CacheSpec(ABC):
    """The entries of one layer."""

    sharded: ClassVar[bool] = True
    """Whether ranks that share out one cache (`kernels.page.Shards`) have a part of its pages each. Otherwise every
    rank has all pages, by their global ids."""

    @property
    @abstractmethod
    def entry_bytes(self) -> int:
        """Bytes a token takes."""

    @property
    def tokens_of_entry(self) -> int:
        """Tokens for which there is one entry, on the page of the last of them."""
        return 1

    @abstractmethod
    def allocate(self, pages: int, device: torch.device) -> Tensor:
        """Memory for so many pages, [pages, 64, ...], that holds no numbers that are not finite."""

    @abstractmethod
    def random(self, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Contents of so many pages as a model might leave them; equal generators give equal contents."""

    @abstractmethod
    def poison(self, content: Tensor, chosen_PK: Tensor) -> None:
        """Make the chosen entries (bool [P, K]) of `content` such that whatever is computed from one of them is NaN."""

    def bits(self, content: Tensor) -> Tensor:
        """Return all bits of every entry of `content`, as integers [P, K, C]."""
        return bits(content)

    def entry_bits(self, cache: Tensor, entry_E: Tensor) -> Tensor:
        """Return all bits of some entries, as integers [E, C]. `entry_E` (int64): page * entries of a page + offset."""
        return bits(cache.view(-1, cache.shape[-1]).index_select(0, entry_E))

    @property
    def page_bytes(self) -> int:
        """Bytes a page takes."""
        return PAGE_TOKENS * self.entry_bytes


@dataclass(frozen=True)
class LatentSpec(CacheSpec):
    """Latents of multi-head latent attention: the normed latent, then the roped part of the key, as they are.

    Entries are whole on every rank that has their page, because heads share them.
    """

    width: int
    """Features: kv_lora_rank + qk_rope_head_dim."""
    dtype: torch.dtype

    @override
    @property
    def entry_bytes(self) -> int:
        return self.width * self.dtype.itemsize

    @override
    def allocate(self, pages: int, device: torch.device) -> Tensor:
        """[pages, 64, width], zeros."""
        return torch.zeros(pages, PAGE_TOKENS, self.width, dtype=self.dtype, device=device)

    @override
    def random(self, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw contents about as large as normed latents are."""
        content_PKC = torch.empty(pages, PAGE_TOKENS, self.width, dtype=self.dtype, device=device)
        return content_PKC.uniform_(-1.7, 1.7, generator=generator)

    @override
    def poison(self, content: Tensor, chosen_PK: Tensor) -> None:
        content.masked_fill_(chosen_PK.unsqueeze(-1), torch.nan)


@dataclass(frozen=True)
class IndexSpec(LatentSpec):
    """Keys of an indexer, as they are: `width` features, normed and roped."""


@dataclass(frozen=True)
class CompressedSpec(CacheSpec):
    """Entries that stand for several tokens each, as they are. One lies on the page of the last of its tokens: only
    with that is it complete, so no page has an entry that depends on tokens behind the page."""

    width: int
    """Features of an entry."""
    ratio: int
    """Tokens of an entry: a number that divides those of a page, or a multiple of them."""
    dtype: torch.dtype

    @property
    def entries(self) -> int:
        """Entries of a page. Where one stands for more tokens than a page has, some pages leave it empty."""
        return max(1, PAGE_TOKENS // self.ratio)

    @override
    @property
    def tokens_of_entry(self) -> int:
        return self.ratio

    @override
    @property
    def entry_bytes(self) -> int:
        """Bytes that a token takes, on average."""
        return -(-self.page_bytes // PAGE_TOKENS)

    @override
    @property
    def page_bytes(self) -> int:
        return self.entries * self.width * self.dtype.itemsize

    @override
    def allocate(self, pages: int, device: torch.device) -> Tensor:
        """[pages, entries, width], zeros."""
        return torch.zeros(pages, self.entries, self.width, dtype=self.dtype, device=device)

    @override
    def random(self, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw contents about as large as normed entries are."""
        return self.allocate(pages, device).uniform_(-1.7, 1.7, generator=generator)

    @override
    def poison(self, content: Tensor, chosen_PK: Tensor) -> None:
        content.masked_fill_(chosen_PK.unsqueeze(-1), torch.nan)


@dataclass(frozen=True)
class Fp8LatentSpec(CacheSpec):
    """The same latents in FP8 with scales, and the roped part of the key as it is: see `kernels.latent_entry`."""

    latent: int
    """Features: kv_lora_rank."""
    rope: int
    """Features: qk_rope_head_dim."""
    dtype: torch.dtype
    """Dtype of the model."""

    @override
    @property
    def entry_bytes(self) -> int:
        return fp8_entry(self.latent, self.rope, self.dtype).size

    @override
    def allocate(self, pages: int, device: torch.device) -> Tensor:
        """[pages, 64, bytes] of uint8, zeros, which are entries of zeros."""
        return torch.zeros(pages, PAGE_TOKENS, self.entry_bytes, dtype=torch.uint8, device=device)

    @override
    def random(self, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """The entries of such latents as `LatentSpec` draws."""
        plain = LatentSpec(self.latent + self.rope, self.dtype).random(pages, device, generator)
        return encode(plain.flatten(0, 1), self.latent).view(pages, PAGE_TOKENS, -1)

    @override
    def poison(self, content: Tensor, chosen_PK: Tensor) -> None:
        """NaN in the scales and in the roped part: bytes of which no bit is 0."""
        scales = fp8_entry(self.latent, self.rope, self.dtype).scales
        content[..., scales:].masked_fill_(chosen_PK.unsqueeze(-1), 255)


@dataclass(frozen=True)
class Int8IndexSpec(CacheSpec):
    """The same keys in INT8, with a scale each: see `kernels.index_entry`. The bytes of a page's keys lie before all of
    its scales."""

    width: int
    """Features."""
    dtype: torch.dtype
    """Dtype of the model."""

    @override
    @property
    def entry_bytes(self) -> int:
        return self.width + SCALE_BYTES

    @override
    def allocate(self, pages: int, device: torch.device) -> Tensor:
        """[pages, 64, bytes] of uint8, zeros, which are keys of zeros."""
        return torch.zeros(pages, PAGE_TOKENS, self.entry_bytes, dtype=torch.uint8, device=device)

    @override
    def random(self, pages: int, device: torch.device, generator: torch.Generator) -> Tensor:
        """Draw keys as `IndexSpec` does, in INT8."""
        content = self.allocate(pages, device)
        code_PKD, scale_PK = parts(content)
        code_TD, scale_T = encode_keys(IndexSpec(self.width, self.dtype).random(pages, device, generator).flatten(0, 1))
        code_PKD.copy_(code_TD.view(code_PKD.shape))
        scale_PK.copy_(scale_T.view(scale_PK.shape))
        return content

    @override
    def poison(self, content: Tensor, chosen_PK: Tensor) -> None:
        """NaN in scales; a code that no key has in keys."""
        code_PKD, scale_PK = parts(content)
        code_PKD.masked_fill_(chosen_PK.unsqueeze(-1), -128)
        scale_PK.masked_fill_(chosen_PK, torch.nan)

    @override
    def bits(self, content: Tensor) -> Tensor:
        code_PKD, scale_PK = parts(content)
        scale_PKB = scale_PK.contiguous().view(torch.uint8).view(*scale_PK.shape, SCALE_BYTES)
        return torch.cat([code_PKD.view(torch.uint8), scale_PKB], -1)

    @override
    def entry_bits(self, cache: Tensor, entry_E: Tensor) -> Tensor:
        code_PKD, scale_PK = parts(cache)
        where = entry_E // PAGE_TOKENS, entry_E % PAGE_TOKENS
        return torch.cat([code_PKD.view(torch.uint8)[where], scale_PK[where].unsqueeze(1).view(torch.uint8)], 1)


def index_spec(features: int, dtype: torch.dtype, *, int8: bool) -> CacheSpec:
    """Return the spec of the index cache of a model in `dtype`."""
    return Int8IndexSpec(features, dtype) if int8 else IndexSpec(features, dtype)


def latent_spec(latent: int, rope: int, dtype: torch.dtype, *, fp8: bool) -> CacheSpec:
    """Return the spec of the latent cache of a model in `dtype`."""
    return Fp8LatentSpec(latent, rope, dtype) if fp8 else LatentSpec(latent + rope, dtype)


def page_bytes(specs: Iterable[CacheSpec], shards: Shards = WHOLE) -> int:
    """Bytes that a rank needs for each page of its own: of a cache that is not shared out it has the pages of all."""
    return sum(spec.page_bytes * (1 if spec.sharded else shards.count) for spec in specs)
