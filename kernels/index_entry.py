"""Entries of the index cache: the keys by which an indexer tells which cached tokens a query is to attend to.

A plain entry is a key as it is, in the model's dtype. A page of FP8 entries is bytes: first the keys of its 64 tokens
in e4m3, then a fp32 scale for each of them, 64 * 128 + 64 * 4 bytes for keys of 128 features. So a page is read in
whole lines. A cache of FP8 entries is a tensor of uint8 [pages, 64, features + 4], by which kernels know it, although
an entry's bytes do not lie side by side in it: `parts` gives its two parts.

Keys are rounded as latents are (`kernels.latent_entry`), with one scale for all features of a key.

Shape legend: T entries, D features of a key, P pages, K = 64 entries per page, E = D, or D + 4 bytes in FP8.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from kernels.latent_entry import LARGEST, LEAST
from kernels.page import PAGE_TOKENS

SCALE_BYTES: Final = 4
"""Of an entry in FP8."""


def is_fp8(index_PKE: Tensor) -> bool:
    """Whether a cache has FP8 entries."""
    return index_PKE.dtype == torch.uint8


def features_of(index_PKE: Tensor) -> int:
    """Features of a key, D."""
    return index_PKE.shape[-1] - (SCALE_BYTES if is_fp8(index_PKE) else 0)


def parts(index_PKE: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a cache of FP8 entries: keys in e4m3 [P, K, D], and scales in fp32 [P, K]."""
    features = features_of(index_PKE)
    page_PB = index_PKE.flatten(1)
    keys = PAGE_TOKENS * features
    key_PKD = page_PB[:, :keys].view(-1, PAGE_TOKENS, features).view(torch.float8_e4m3fn)
    return key_PKD, page_PB[:, keys:].view(torch.float32)


def encode(key_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Keys in e4m3 [T, D] and their scales in fp32 [T]."""
    number_TD = key_TD.float()
    largest_T = number_TD.abs().amax(-1)
    scale_T = torch.where(largest_T < LEAST, 1.0, largest_T / LARGEST).where(largest_T.isfinite(), torch.nan)
    return (number_TD / scale_T.unsqueeze(-1)).to(torch.float8_e4m3fn), scale_T


def gather(index_PKE: Tensor, page_X: Tensor, dtype: torch.dtype) -> Tensor:
    """The keys of whole pages (int64 [X]) one after the other, in `dtype`: [X * K, D]."""
    if not is_fp8(index_PKE):
        return index_PKE[page_X].flatten(0, 1).to(dtype)
    key_PKD, scale_PK = parts(index_PKE)
    # Indexing is not there for e4m3.
    code_XKD = key_PKD.view(torch.uint8)[page_X].view(torch.float8_e4m3fn)
    return (code_XKD.to(dtype) * scale_PK[page_X].unsqueeze(-1).to(dtype)).flatten(0, 1)
