"""Operations of DeepSeek V4's attention that need memory of a pass beside that of their results: the selection,
attention itself and the product of groups. A pass asks `kernels.compressed` for the others.

They read rows, slots, positions and pages on the device and allocate nothing, so a pass that asks for them can be
captured. Memory comes from the pass's scratch, as much for any rows of a bucket: what it grows with are tokens, and
the pages that a row may have. On a CPU the kernels' references stand in for them.

Shape legend: T tokens, P pages (of a cache, or of a row's table), K entries per page, X slots and one, L tokens of a
ring, D features of an entry, O rope features, H heads, S selected entries, J heads and I features of an indexer, N
scores of a token, G groups of heads, U features of a group's projected output, F features of a group's heads, W = G F
features of all heads, C = W / 128 of their scales.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from kernels import compressed
from kernels.compressed import AttendWorkspace, TokenRows
from kernels.linear import MOST_STREAMED, group_linear, takes_w8a8_groups, w8a8_group_linear
from kernels.matrix import BlockScaled
from kernels.page import PAGE_TOKENS
from kernels.quantize import GROUP, quantize
from kernels.runtime.hopper import multiprocessors
from kernels.sparse import SelectWorkspace, index_scores, select_positions
from workers.memory.scratch import Scratch, bytes_of
from workers.models.general import dependent, plain
from workers.weights.weight import Weight

SCORES: Final = 1 << 26
"""Most scores of an indexer at once: tokens whose scores are more take turns."""
MOST_WIDENED_IN_REGISTERS: Final = 128
"""Most tokens whose product of groups reads FP8 weights as they are stored where tokens are not rounded; of more the
weights are dequantized first, for cuBLAS. Of 64 tokens that took 32 us in place of 50, of 256 tokens 79 in place of 58
(DeepSeek V4 Flash on one H200, `bench/fp8_linear.py --groups 8x1024x4096`)."""


def select(
    q_TJI: Tensor,
    weight_TJ: Tensor,
    key_PKI: Tensor,
    ratio: int,
    bound_T: Tensor,
    selected_TS: Tensor,
    rows: TokenRows,
    scratch: Scratch,
) -> None:
    """The entries s < `bound_T` (int32) of each token with the highest sum over j of weight[j] relu(q[j] · key[s]), of
    equal ones the first: their numbers, rising, -1 behind the last (int32). Each stands for `ratio` tokens. ValueError
    for keys that stand for more tokens than a page has."""
    if ratio > PAGE_TOKENS:
        raise ValueError(f"an index key for {ratio} tokens is not supported, only one for up to {PAGE_TOKENS}")
    scores, turn = _turn(rows.page_RP.shape[1], key_PKI.shape[1], rows.width)
    early = rows.width > 0 and dependent(q_TJI)
    for begin in range(0, len(q_TJI), turn):
        own = slice(begin, begin + turn)
        with scratch.scope():
            tokens, bound, row = len(q_TJI[own]), bound_T[own], rows.row_T[own]
            score_TN = scratch.empty(tokens, scores, dtype=torch.float32)
            asked = q_TJI[own], weight_TJ[own], key_PKI, rows.page_RP, row, bound
            index_scores(*asked, score_TN, rows.fault_1, width=rows.width, dependent=early)
            workspace = None
            if q_TJI.is_cuda:
                most = selected_TS.shape[1]
                workspace = SelectWorkspace.allocate(tokens, scores, scratch.empty, selected=most)
            select_positions(score_TN, bound, selected_TS[own], rows.fault_1, workspace, dependent=early)


def reserve_selection(tokens: int, pages: int, keys: int, selected: int, width: int, scratch: Scratch) -> None:
    """Take the memory that `select` takes on a GPU, for rows of at most `pages` pages of `keys` keys each."""
    scores, turn = _turn(pages, keys, width)
    with scratch.scope():
        scratch.empty(min(tokens, turn), scores, dtype=torch.float32)
        SelectWorkspace.allocate(min(tokens, turn), scores, scratch.empty, selected=selected)


def _turn(pages: int, keys: int, width: int) -> tuple[int, int]:
    """Scores of a token, in whole pages of 64 whatever number of keys a page has, and tokens that are scored at
    once."""
    scores = -(-pages * keys // PAGE_TOKENS) * PAGE_TOKENS
    return scores, max(1, SCORES // scores // max(width, 1)) * max(width, 1)


def attend(
    q_THD: Tensor,
    ring_XLD: Tensor,
    entry_TD: Tensor | None,
    entry_PKD: Tensor | None,
    selected_TS: Tensor | None,
    sink_H: Tensor,
    rotation_TO: Tensor,
    out_THD: Tensor,
    rows: TokenRows,
    scratch: Scratch,
    *,
    window: int,
    ratio: int,
    first: int = 0,
    block: int = 0,
) -> None:
    """Attention of some tokens: see `kernels.compressed.attend`. Scores are divided by the root of an entry's
    features."""
    tokens, heads, features = q_THD.shape
    pages, selected = rows.page_RP.shape[1], 0 if selected_TS is None else selected_TS.shape[1]
    with scratch.scope():
        shape = tokens, heads, features
        workspace = _attending(shape, q_THD.dtype, window, ratio, pages, selected, scratch)
        given = q_THD, ring_XLD, entry_TD, entry_PKD, selected_TS, sink_H, rotation_TO, out_THD, rows, workspace
        sizes: dict[str, Any] = {"window": window, "ratio": ratio, "first": first, "block": block}
        # Few tokens, whose launches weigh as much as what they compute, are those of decode rows.
        early = rows.width > 0 and dependent(q_THD)
        compressed.attend(*given, scale=features**-0.5, **sizes, dependent=early)


def listed_entries(window: int, ratio: int, pages: int, selected: int) -> int:
    """Entries that are listed for a token, at most; see `reserve_attention`."""
    return window + (selected or (pages * PAGE_TOKENS // ratio if ratio else 0))


def reserve_attention(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    ratio: int,
    pages: int,
    selected: int,
    scratch: Scratch,
) -> None:
    """Take the memory that `attend` takes for queries of this shape, [T, H, D], whose rows have at most `pages` pages;
    `selected` entries of each are attended to, 0: all."""
    with scratch.scope():
        _attending(shape, dtype, window, ratio, pages, selected, scratch)


def _attending(
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    window: int,
    ratio: int,
    pages: int,
    selected: int,
    scratch: Scratch,
) -> AttendWorkspace:
    """Memory of attention; see `reserve_attention`."""
    entries = listed_entries(window, ratio, pages, selected)
    (tokens, heads, features), programs = shape, multiprocessors(scratch.device)
    return AttendWorkspace.allocate(tokens, heads, features, entries, scratch.empty, programs=programs, dtype=dtype)


def project_groups(
    x_TGF: Tensor, weight_NF: Weight, out_TGU: Tensor, scratch: Scratch, *, quantize_activations: bool = False
) -> None:
    """out[t, g] = weight[g] · x[t, g], with weight[g] the g-th of G equal groups of neighbouring rows.
    `quantize_activations`: whether more tokens than are streamed may be rounded to FP8 for weights that are."""
    matrix, early = weight_NF.matrix, dependent(x_TGF)
    tokens, _, rows = out_TGU.shape
    many = tokens > MOST_STREAMED and x_TGF.dtype == torch.bfloat16
    with scratch.scope():
        if isinstance(matrix, BlockScaled) and many and quantize_activations and _rounds(x_TGF, matrix):
            x_TW = x_TGF.flatten(1)
            number_TW = scratch.empty(*x_TW.shape, dtype=torch.float8_e4m3fn)
            scale_TC = scratch.empty(*_scales(*x_TW.shape), dtype=torch.float32).t()
            quantize(x_TW, number_TW, scale_TC, dependent=early)
            w8a8_group_linear(number_TW, scale_TC, matrix, out_TGU, dependent=early)
            return
        if not isinstance(matrix, BlockScaled) or rows % matrix.rows or tokens > MOST_WIDENED_IN_REGISTERS:
            # A matrix that is dequantized in the launch before must not be read early.
            early = early and isinstance(matrix, Tensor)
            matrix = plain(weight_NF, x_TGF.dtype, scratch)
        group_linear(x_TGF, matrix, out_TGU, dependent=early)


def rounded_bytes(tokens: int, features: int) -> int:
    """Return the bytes that `project_groups` takes for tokens with so many features that it rounds to FP8."""
    number = bytes_of((tokens, features), torch.float8_e4m3fn)
    return number + bytes_of(_scales(tokens, features), torch.float32)


def _scales(tokens: int, features: int) -> tuple[int, int]:
    """Sizes of the scales of rounded tokens."""
    return features // GROUP, tokens


def _rounds(x_TGF: Tensor, matrix: BlockScaled) -> bool:
    """Whether many tokens may be rounded to FP8 for this matrix."""
    return x_TGF.is_contiguous() and takes_w8a8_groups(x_TGF.device, x_TGF.shape[1], matrix)
