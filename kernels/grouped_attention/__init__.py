"""Grouped-query attention (Ainslie et al., 2023) over a paged cache of keys and values: for a draft layer, which is one
layer of few heads. Simple rather than fast: a program reads all that a row has cached.

An entry of the cache holds the keys of all key heads, then their values. Query head h reads key head h // (H / G).

Shape legend: T tokens, H query heads, G key heads, D features of a head, F = (H + 2 G) D, O = D roped features, P pages
of the cache (of a table: the most of a row), K = 64 entries per page, C = 2 G D features of an entry, R rows, N
tiles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import triton
from torch import Tensor

from kernels.grouped_attention import kernel
from kernels.page import PAGE_TOKENS

QUERIES: Final = 16
"""Most tokens of a tile."""
_HEADS: Final = 16
"""Most query heads of a program."""
_NO_ROWS: Final = 16
"""Fewest rows of a product on tensor cores."""


def tiles(starts: Sequence[int], counts: Sequence[int], offset: int) -> Iterator[tuple[int, int, int, int]]:
    """Tiles of prefill rows, for `attend`. `starts`: where each row's first token lies in its cache. `counts`: its
    tokens, the first row's from token `offset` on."""
    for row, (start, count) in enumerate(zip(starts, counts, strict=True)):
        for done in range(0, count, QUERIES):
            some = min(QUERIES, count - done)
            yield offset + done, some, row, start + done + some
        offset += count


def rope_store(qkv_TF: Tensor, rotation_TO: Tensor, cache_slot_T: Tensor, cache_PKC: Tensor, heads: int) -> None:
    """Rotate the queries of `qkv_TF` (queries of `heads` heads, then keys, then values) in place, and write the keys,
    rotated, and the values to the cache entries `cache_slot_T` (int64).

    `rotation_TO` (fp32): (cos, sin) of the i-th pair at (2i, 2i + 1); pairs are features (2i, 2i + 1).
    """
    if qkv_TF.is_cuda:
        launch_rope_store(qkv_TF, rotation_TO, cache_slot_T, cache_PKC, heads)
    else:
        rope_store_reference(qkv_TF, rotation_TO, cache_slot_T, cache_PKC, heads)


def attend(
    q_THD: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    out_THD: Tensor,
    *,
    first: int,
    scale: float,
    length_R: Tensor | None = None,
    width: int = 0,
    tile_4N: Tensor | None = None,
) -> None:
    """Attention of rows of `width` tokens each, or of tiles of any rows, from entry `first` of their caches on.

    `length_R` (int32): entries before the end of what the last of a row's tokens sees, itself included; every token
    before it sees one less. 0 marks a padded row, whose output is 0. `tile_4N` (int32): of every tile its first token,
    its tokens, its row in `page_RP` (int32) and its length, as above. What lies behind a length, and before `first`,
    may be NaN, and what is behind the pages of a table arbitrary. A token that sees nothing has output 0.
    """
    if q_THD.is_cuda:
        launch_attend(
            q_THD,
            cache_PKC,
            page_RP,
            out_THD,
            first=first,
            scale=scale,
            length_R=length_R,
            width=width,
            tile_4N=tile_4N,
        )
        return
    if tile_4N is None:
        assert length_R is not None
        found = [(row * width, width, row, length) for row, length in enumerate(length_R.tolist())]
    else:
        found = [tuple(tile) for tile in tile_4N.t().tolist()]
    attend_reference(q_THD, cache_PKC, page_RP, out_THD, found, first, scale)


def rope_store_reference(
    qkv_TF: Tensor, rotation_TO: Tensor, cache_slot_T: Tensor, cache_PKC: Tensor, heads: int
) -> None:
    """`rope_store` in plain torch."""
    tokens, features = rotation_TO.shape
    compute = torch.promote_types(qkv_TF.dtype, torch.float32)
    qkv_THD = qkv_TF.view(tokens, -1, features)
    roped = heads + cache_PKC.shape[-1] // (2 * features)
    turn_T1I = torch.view_as_complex(rotation_TO.to(compute).reshape(tokens, 1, -1, 2))
    pair_THI = torch.view_as_complex(qkv_THD[:, :roped].to(compute).reshape(tokens, roped, -1, 2))
    qkv_THD[:, :roped] = torch.view_as_real(pair_THI * turn_T1I).flatten(-2).to(qkv_TF.dtype)
    cache_PKC.view(-1, cache_PKC.shape[-1])[cache_slot_T] = qkv_THD[:, heads:].flatten(1)


def attend_reference(
    q_THD: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    out_THD: Tensor,
    tiles: Iterable[tuple[int, ...]],
    first: int,
    scale: float,
) -> None:
    """`attend` in plain torch. `tiles`: of every tile its first token, its tokens, its row and its length."""
    features, width = q_THD.shape[-1], cache_PKC.shape[-1]
    key_heads = width // (2 * features)
    compute = torch.promote_types(q_THD.dtype, torch.float32)
    for begin, count, row, length in tiles:
        own = slice(begin, begin + count)
        out_THD[own] = 0
        if length <= first:
            continue
        pages = page_RP[row, : -(-length // PAGE_TOKENS)].to(torch.int64)
        entry_SGD = cache_PKC[pages].flatten(0, 1)[first:length].view(-1, 2 * key_heads, features).to(compute)
        key_SGD, value_SGD = entry_SGD[:, :key_heads], entry_SGD[:, key_heads:]
        q_NGHD = q_THD[own].to(compute).view(count, key_heads, -1, features)
        score_GHNS = torch.einsum("nghd,sgd->ghns", q_NGHD, key_SGD) * scale
        bound_N1 = torch.arange(length - count + 1, length + 1, device=q_THD.device).unsqueeze(1)
        seen_NS = torch.arange(first, length, device=q_THD.device) < bound_N1
        weight_GHNS = score_GHNS.masked_fill(~seen_NS, -torch.inf).softmax(-1).nan_to_num(0.0)
        out_THD[own] = torch.einsum("ghns,sgd->nghd", weight_GHNS, value_SGD).flatten(1, 2).to(out_THD.dtype)


def launch_rope_store(qkv_TF: Tensor, rotation_TO: Tensor, cache_slot_T: Tensor, cache_PKC: Tensor, heads: int) -> None:
    """`rope_store` as a Triton kernel."""
    tokens, features = rotation_TO.shape
    if not tokens:
        return
    key_heads = cache_PKC.shape[-1] // (2 * features)
    kernel.rope_store[(tokens, heads + 2 * key_heads)](
        qkv_TF,
        rotation_TO,
        cache_slot_T,
        cache_PKC,
        TOKEN=qkv_TF.stride(0),
        ROTATION=rotation_TO.stride(0),
        HEADS=heads,
        KEY_HEADS=key_heads,
        FEATURES=features,
        BLOCK=triton.next_power_of_2(features),
        num_warps=1,
    )


def launch_attend(
    q_THD: Tensor,
    cache_PKC: Tensor,
    page_RP: Tensor,
    out_THD: Tensor,
    *,
    first: int,
    scale: float,
    length_R: Tensor | None = None,
    width: int = 0,
    tile_4N: Tensor | None = None,
) -> None:
    """`attend` as a Triton kernel."""
    heads, features = q_THD.shape[1:]
    key_heads = cache_PKC.shape[-1] // (2 * features)
    group = heads // key_heads
    rows = page_RP.shape[0] if tile_4N is None else tile_4N.shape[1]
    if not rows:
        return
    head_block = min(triton.next_power_of_2(group), _HEADS)
    queries = max(triton.next_power_of_2(width or QUERIES), _NO_ROWS // head_block)
    parts = triton.cdiv(group, head_block)
    table = length_R if tile_4N is None else tile_4N
    assert table is not None
    kernel.attend[(rows, key_heads * parts)](
        q_THD,
        cache_PKC,
        page_RP,
        table,
        out_THD,
        rows,
        page_RP.stride(0),
        scale,
        FIRST=first,
        WIDTH=0 if tile_4N is not None else width,
        Q_TOKEN=q_THD.stride(0),
        OUT_TOKEN=out_THD.stride(0),
        KEY_HEADS=key_heads,
        GROUP=group,
        PARTS=parts,
        HEADS=head_block,
        QUERIES=queries,
        FEATURES=features,
        BLOCK=max(triton.next_power_of_2(features), 16),
        num_warps=4 if queries * head_block <= 32 else 8,
    )
