"""Checks of the tensors of sparse attention before a launch: kernels see only pointers. ValueError where a tensor is
not what its function says."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor

from kernels.index_entry import features_of, is_int8
from kernels.latent_entry import entry_of
from kernels.page import PAGE_TOKENS

GRID: Final = 65535
"""Programs along the second axis of a grid."""


def write_index_keys(key_TD: Tensor, slot_T: Tensor, index_PKE: Tensor) -> None:
    """Check the tensors of `kernels.sparse.write_index_keys`."""
    _index_cache(index_PKE)
    if not is_int8(index_PKE) and index_PKE.dtype != key_TD.dtype:
        raise ValueError(f"index_PKE must be {key_TD.dtype}, or INT8 entries as bytes, not {index_PKE.dtype}")
    if key_TD.shape[1:] != (features_of(index_PKE),) or key_TD.stride(1) != 1:
        raise ValueError(f"key_TD must be rows of {features_of(index_PKE)} features, not {_told(key_TD)}")
    _contiguous("slot_T", slot_T, key_TD.shape[:1], torch.int64)


def index_scores(
    q_THD: Tensor,
    weight_TH: Tensor,
    index_PKE: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    bound_T: Tensor,
    score_TN: Tensor,
    fault_1: Tensor,
    *,
    invariant: bool,
) -> None:
    """Check the tensors of `kernels.sparse.index_scores`."""
    (tokens, heads, features), keys = q_THD.shape, index_PKE.shape[1]
    if is_int8(index_PKE) or invariant or PAGE_TOKENS % keys or not index_PKE.is_contiguous():
        _index_cache(index_PKE)
    wanted = torch.int8 if is_int8(index_PKE) else index_PKE.dtype
    if q_THD.dtype != wanted or features != features_of(index_PKE) or not q_THD.is_contiguous():
        raise ValueError(
            f"q_THD must be contiguous {wanted} of {features_of(index_PKE)} features, not {_told(q_THD)}: the cache is "
            f"{_told(index_PKE)}"
        )
    if is_int8(index_PKE):
        _contiguous("weight_TH", weight_TH, (tokens, heads), torch.float32)
    elif weight_TH.shape != (tokens, heads) or weight_TH.dtype != torch.float32 or weight_TH.stride(1) != 1:
        raise ValueError(f"weight_TH must be fp32 rows of {heads} weights, not {_told(weight_TH)}")
    _tokens(tokens, page_RP, row_T, fault_1)
    _contiguous("bound_T", bound_T, (tokens,), torch.int32)
    _scores(score_TN, tokens)
    if score_TN.shape[1] > -(-page_RP.shape[1] * keys // PAGE_TOKENS) * PAGE_TOKENS:
        raise ValueError(f"{score_TN.shape[1]} scores are more than the entries of {page_RP.shape[1]} pages of a row")


def select_positions(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, fault_1: Tensor) -> None:
    """Check the tensors of `kernels.sparse.select_positions`."""
    tokens = score_TN.shape[0]
    _scores(score_TN, tokens)
    _contiguous("bound_T", bound_T, (tokens,), torch.int32)
    _contiguous("selected_TS", selected_TS, (tokens, selected_TS.shape[1]), torch.int32)
    _contiguous("fault_1", fault_1, (1,), torch.int64)


def sparse_decode(
    q_THC: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    row_T: Tensor,
    selected_TS: Tensor,
    out_THL: Tensor,
    lse_TH: Tensor,
    fault_1: Tensor,
) -> None:
    """Check the tensors of `kernels.sparse.sparse_decode`."""
    tokens, heads, features = q_THC.shape
    latent = out_THL.shape[2]
    if cache_PKC.dtype not in (q_THC.dtype, torch.uint8):
        raise ValueError(f"cache_PKC must be {q_THC.dtype}, or FP8 entries as bytes, not {cache_PKC.dtype}")
    entry_of(cache_PKC, latent, features - latent, q_THC.dtype)
    if cache_PKC.shape[1] != PAGE_TOKENS or not cache_PKC.is_contiguous():
        raise ValueError(f"cache_PKC must be contiguous pages of {PAGE_TOKENS} entries, not {_told(cache_PKC)}")
    _contiguous("q_THC", q_THC, (tokens, heads, features), q_THC.dtype)
    _contiguous("out_THL", out_THL, (tokens, heads, latent), out_THL.dtype)
    _contiguous("lse_TH", lse_TH, (tokens, heads), torch.float32)
    _contiguous("selected_TS", selected_TS, (tokens, selected_TS.shape[1]), torch.int32)
    _tokens(tokens, page_RP, row_T, fault_1)


def _tokens(tokens: int, page_RP: Tensor, row_T: Tensor, fault_1: Tensor) -> None:
    _few(tokens)
    _contiguous("row_T", row_T, (tokens,), torch.int32)
    _contiguous("fault_1", fault_1, (1,), torch.int64)
    if page_RP.dim() != 2 or page_RP.dtype != torch.int32 or page_RP.stride(1) != 1:
        raise ValueError(f"page_RP must be int32 with contiguous rows, not {_told(page_RP)}")


def _few(tokens: int) -> None:
    if tokens > GRID:
        raise ValueError(f"a call takes at most {GRID} tokens, not {tokens}: call it for some of them at a time")


def _index_cache(index_PKE: Tensor) -> None:
    if index_PKE.shape[1] != PAGE_TOKENS or not index_PKE.is_contiguous():
        raise ValueError(f"index_PKE must be contiguous pages of {PAGE_TOKENS} keys, not {_told(index_PKE)}")


def _scores(score_TN: Tensor, tokens: int) -> None:
    _few(tokens)
    if score_TN.shape[0] != tokens or score_TN.dtype != torch.float32 or score_TN.stride(1) != 1:
        raise ValueError(f"score_TN must be fp32 in {tokens} contiguous rows, not {_told(score_TN)}")
    if score_TN.shape[1] % PAGE_TOKENS or score_TN.stride(0) % 16:
        raise ValueError(f"score_TN must be whole pages of {PAGE_TOKENS} scores wide, not {_told(score_TN)}")


def _contiguous(name: str, tensor: Tensor, shape: Iterable[int], dtype: torch.dtype) -> None:
    if tensor.shape != tuple(shape) or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, {tuple(shape)} of {dtype}, not {_told(tensor)}")


def _told(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}, strides {tensor.stride()}"
