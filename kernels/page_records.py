"""Copies pages of all caches of a rank into records, which lie side by side, and back: one launch for all of them.

A record is a page of every cache, one behind the other. What pages hold does not matter here: they are copied as words
of 64 bits.

Shape legend: L caches, P pages of a cache, N pages that are copied, R bytes of a record, B bytes.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD: Final = 8
"""Bytes."""
_ALIGNED: Final = 16
"""Bytes that addresses of pages and records are multiples of."""
_WORDS = 2048
"""Words that a program copies."""


@dataclass(frozen=True)
class PagedRecords:
    """The caches whose pages make a record, and where in it each of them lies."""

    layers: tuple[Tensor, ...]
    """uint8 [P, bytes of a page], contiguous, one a cache."""
    begins: tuple[int, ...]
    """Byte of a record at which the page of each cache begins."""
    place_L3: Tensor
    """int64, on the device of the caches: address of a cache, words of its page, first word in a record."""
    most_words: int
    """Of a page of any cache."""

    @staticmethod
    def of(layers: Sequence[Tensor], begins: Sequence[int]) -> PagedRecords:
        """Describe caches [P, ...]. ValueError where pages or places in a record are not aligned to 16 bytes."""
        flat = tuple(layer.view(layer.shape[0], -1).view(torch.uint8) for layer in layers)
        places = [(x.data_ptr(), x.shape[1] // WORD, begin // WORD) for x, begin in zip(flat, begins, strict=True)]
        for x, begin in zip(flat, begins, strict=True):
            if x.data_ptr() % _ALIGNED or x.shape[1] % _ALIGNED or begin % _ALIGNED:
                raise ValueError(f"pages of {x.shape[1]} bytes at byte {begin} of a record: all are multiples of 16")
        place_L3 = torch.tensor(places, dtype=torch.int64).to(flat[0].device)
        return PagedRecords(flat, tuple(begins), place_L3, max(words for _, words, _ in places))


def gather_pages(records: PagedRecords, page_N: Tensor, out_NR: Tensor) -> None:
    """out[n] = the record of page `page_N`[n]; bytes between the pages of two caches stay as they are.

    - `page_N`: int64, pages that there are.
    - `out_NR`: uint8, contiguous, R a multiple of 16 bytes.
    """
    _copy(records, page_N, out_NR, out=True)


def scatter_pages(records: PagedRecords, page_N: Tensor, record_NR: Tensor) -> None:
    """Page `page_N`[n] of every cache = its part of record n: the reverse of `gather_pages`. Pages differ."""
    _copy(records, page_N, record_NR, out=False)


def _copy(records: PagedRecords, page_N: Tensor, record_NR: Tensor, *, out: bool) -> None:
    if page_N.dtype != torch.int64 or page_N.shape != record_NR.shape[:1]:
        raise ValueError(f"one int64 page for each of {record_NR.shape[0]} records, not {page_N.dtype} {page_N.shape}")
    if record_NR.dtype != torch.uint8 or not record_NR.is_contiguous() or record_NR.shape[1] % _ALIGNED:
        raise ValueError("records are contiguous bytes, each a multiple of 16 of them")
    compute = launch_copy_pages if record_NR.is_cuda else copy_pages_reference
    compute(records, page_N, record_NR, out)


def copy_pages_reference(records: PagedRecords, page_N: Tensor, record_NR: Tensor, out: bool) -> None:
    """Copy pages to records, or (not `out`) back, in plain torch."""
    for layer_PB, begin in zip(records.layers, records.begins, strict=True):
        part_NB = record_NR[:, begin : begin + layer_PB.shape[1]]
        if out:
            part_NB.copy_(layer_PB[page_N])
        else:
            layer_PB[page_N] = part_NB


def launch_copy_pages(records: PagedRecords, page_N: Tensor, record_NR: Tensor, out: bool) -> None:
    """Copy pages to records, or (not `out`) back, in a Triton kernel."""
    count, size = record_NR.shape
    if not count:
        return
    grid = (triton.cdiv(records.most_words, _WORDS), len(records.layers), count)
    copy_pages[grid](records.place_L3, page_N, record_NR.view(torch.int64), size // WORD, OUT=out, WORDS=_WORDS)


@triton.jit(do_not_specialize=["record_words"])
def copy_pages(place, pages, records, record_words, OUT: tl.constexpr, WORDS: tl.constexpr):
    """Copy a piece of one cache's page: into a record (OUT), or from it."""
    place += tl.program_id(1) * 3
    record = tl.program_id(2)
    words = tl.load(place + 1)
    first = tl.program_id(0) * WORDS
    if first < words:
        # Addresses are those of whole pages and records: the compiler cannot know that they are aligned.
        in_page = tl.multiple_of(tl.load(pages + record) * words, 2)
        in_record = tl.multiple_of(record.to(tl.int64) * record_words + tl.load(place + 2), 2)
        page = tl.multiple_of(tl.load(place).to(tl.pointer_type(tl.int64)), 16) + in_page
        word = first + tl.arange(0, WORDS)
        mask = word < tl.multiple_of(words, 2)
        if OUT:
            tl.store(records + in_record + word, tl.load(page + word, mask=mask), mask=mask)
        else:
            tl.store(page + word, tl.load(records + in_record + word, mask=mask), mask=mask)
