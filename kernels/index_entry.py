"""Entries of the index cache: the keys by which an indexer tells which cached tokens a query is to attend to.

A plain entry is a key as it is, in the model's dtype. A page of INT8 entries is bytes: first the keys of its 64 tokens
as signed integers of 8 bits, then a fp32 scale for each of them, 64 * 128 + 64 * 4 bytes for keys of 128 features. So a
page is read in whole lines. A cache of INT8 entries is a tensor of uint8 [pages, 64, features + 4], by which kernels
know it, although an entry's bytes do not lie side by side in it: `parts` gives its two parts.

What is rounded is a key in fp32: scale = largest magnitude / 127, code = number / scale, both to nearest even. All
features of a key have one scale, and are about equally large, so that evenly spaced codes lose a quarter of what e4m3
would. A key whose numbers are all below `LEAST` has scale 1 and codes 0. One with a number that is not finite has scale
NaN, which makes all that is computed from it NaN, and its codes mean nothing. Queries are rounded in the same way, so
that products of codes are integers, whose sums are exact in any order.

Shape legend: T entries, D features of a key, P pages, K = 64 entries per page, E = D, or D + 4 bytes in INT8.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.latent_entry import LEAST
from kernels.page import PAGE_TOKENS

SCALE_BYTES: Final = 4
"""Bytes of the scale of an entry in INT8."""
LARGEST: Final = 127.0
"""The largest code; -128 is none, so that codes are as many on both sides of 0."""
_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(LEAST)
_WHOLE = tl.constexpr(1.5 * 2**23)
"""fp32 numbers around it are whole, and the lowest byte of their bits is that of how much they are above it."""


def is_int8(index_PKE: Tensor) -> bool:
    """Whether a cache has INT8 entries."""
    return index_PKE.dtype == torch.uint8


def features_of(index_PKE: Tensor) -> int:
    """Features of a key, D."""
    return index_PKE.shape[-1] - (SCALE_BYTES if is_int8(index_PKE) else 0)


def parts(index_PKE: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache of INT8 entries: codes in int8 [P, K, D], and scales in fp32 [P, K]."""
    features = features_of(index_PKE)
    page_PB = index_PKE.flatten(1)
    keys = PAGE_TOKENS * features
    code_PKD = page_PB[:, :keys].view(-1, PAGE_TOKENS, features).view(torch.int8)
    return code_PKD, page_PB[:, keys:].view(torch.float32)


def encode(number_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Codes in int8 [T, D] of keys or queries, and their scales in fp32 [T]."""
    number_TD = number_TD.float()
    largest_T = number_TD.abs().amax(-1)
    scale_T = torch.where(largest_T < LEAST, 1.0, largest_T / LARGEST).where(largest_T.isfinite(), torch.nan)
    code_TD = (number_TD / scale_T.unsqueeze(-1)).round().nan_to_num()
    return code_TD.to(torch.int8), scale_T


@triton.jit
def rounded(number):
    """Round numbers in fp32, [ROWS, LANES]. Return their codes, and the scale of each row."""
    # Maxima pass NaN over; 0 times what is not finite is NaN.
    largest = tl.max(tl.abs(number), 1) + tl.sum(number * 0.0, 1)
    scale = tl.where(largest < _LEAST, 1.0, tl.div_rn(largest, tl.full(largest.shape, _LARGEST, tl.float32)))
    quotient = tl.div_rn(number, tl.broadcast_to(scale[:, None], number.shape))
    # The sum is rounded to a whole number, to nearest even.
    code = (quotient + _WHOLE).to(tl.int32, bitcast=True).to(tl.int8)
    return code, scale
