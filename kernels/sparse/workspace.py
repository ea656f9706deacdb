"""Device memory that the kernels of sparse attention work in, and how calls are cut up. Sizes are known when a graph is
captured; what the memory holds means nothing before and after a call.

Shape legend: T query tokens, L latent features, H heads, G parts of its selected entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kernels.mla_decode.schedule import (
    CTA_FIELDS,
    FP8_RINGS,
    REINTERPRETED,
    DecodeShape,
    DecodeTiling,
    Workspace,
    hopper_tiling,
    portable_tiling,
)
from kernels.page import PAGE_TOKENS, pages_for
from kernels.runtime.hopper import is_hopper, multiprocessors

SELECTED: Final = 2048
"""Positions that are selected at most, where nothing else is said."""
INVARIANT_TOKENS: Final = 64
"""Tokens whose entries are gathered at a time in invariant mode, some 150 MB of 2,048 entries in bf16."""
WHOLE_TOKENS: Final = 16
"""Tokens from which on one program selects for each, where it may. On an H200 programs that share a token's scores took
15.1 / 19.8 microseconds for 8 / 16 tokens of 4,096 scores and 29.1 / 29.3 / 52.0 / 75.9 for 8 / 16 / 64 / 128 of
65,536, and one for each 17.8 / 17.6 and 22.7 / 23.3 / 25.0 / 27.7."""
WHOLE_OF_FEW: Final = (16, 4)
WHOLE_OF_MANY: Final = (8, 4)
"""Warps of a program that selects for one of `FEW_TOKENS` tokens, or of more, and its rows (`Whole`)."""
FEW_TOKENS: Final = 132
"""A multiprocessor of an H200 for each."""
SCORES: Final = (1024, 4096)
"""Scores that a program of the selection takes at a time, at least and at most."""


class Whole(NamedTuple):
    """Selection from all scores of a token by one program on Hopper: a constant of `kernels.sparse.select_whole`."""

    warps: int
    rows: int
    """Lines of 128 scores that a warp takes at a time, 4 at most."""
    lanes: int
    """Candidates that there is room for: a power of two, and not fewer than threads."""

    @property
    def groups(self) -> int:
        """Number of groups of scores, of each of which it takes the largest: lines have 128."""
        return 128 * self.rows * self.warps


@dataclass(frozen=True)
class SelectWorkspace:
    """Memory of `kernels.sparse.select_positions`: int32 tensors. Where one program selects for a token (`whole`), the
    candidates alone."""

    whole: Whole | None
    parts: int
    """Programs that share a token's scores, where several may."""
    block: int
    """Scores that they take at a time."""
    most: int
    """Positions that are selected at most."""
    best: Tensor
    """[T, groups]: keys of the largest scores of groups of them."""
    taken: Tensor
    """[T]: candidates, as many as there are even where there is no room for all."""
    least: Tensor
    """[T]: the key that candidates reach."""
    begins: Tensor
    """[T, blocks, 2]: where the candidates of a block of scores begin, and how many they are."""
    candidate: Tensor
    """[T, room]: keys; where one program selects for a token [T, 2 room], scores and then their positions."""
    position: Tensor
    """[T, room]."""

    @staticmethod
    def allocate(
        tokens: int,
        scores: int,
        empty: Callable[..., Tensor],
        *,
        selected: int = SELECTED,
        hopper: bool | None = None,
    ) -> SelectWorkspace:
        """Allocate memory for calls of exactly `tokens` tokens with up to `scores` scores each, of which `selected`
        positions are selected at most. `empty(*shape, dtype=)` gives uninitialised device memory. `hopper`: whether
        Hopper's own kernel may be taken; None asks the device."""
        lanes = 4 * _power_of_2(max(selected, 512) - 1)
        best = empty(0, dtype=torch.int32)
        hopper = is_hopper(best.device) if hopper is None else hopper
        whole = whole_selection(tokens, selected, lanes) if hopper else None
        parts = _power_of_2(min(32, 264 // max(tokens, 1), -(-scores // SCORES[0])))
        block = min(max(_power_of_2(scores // parts), SCORES[0]), SCORES[1])
        groups = min(2 * lanes, max(2 * _power_of_2(max(scores, 1) - 1), 1024))
        shared = 0 if whole else tokens
        return SelectWorkspace(
            whole=whole,
            parts=parts,
            block=block,
            most=selected,
            best=empty(shared, groups, dtype=torch.int32),
            taken=empty(shared, dtype=torch.int32),
            least=empty(shared, dtype=torch.int32),
            begins=empty(shared, max(1, -(-scores // block)), 2, dtype=torch.int32),
            candidate=empty(tokens, 2 * lanes if whole else lanes, dtype=torch.int32),
            position=empty(shared, lanes, dtype=torch.int32),
        )


@dataclass(frozen=True)
class SparseTiling:
    """Tiling of a call of `kernels.sparse.sparse_decode`."""

    path: str
    """Name of the attention kernel: "triton" (portable), "wide" or "fp8" (Hopper)."""
    block: int
    """Heads of a program."""
    tile: int
    """Entries it gathers at a time."""
    part: int
    """Entries it takes in all."""
    warps: int
    stages: int
    """Tiles in flight."""


@dataclass(frozen=True)
class SparseWorkspace:
    """Memory of `kernels.sparse.sparse_decode`."""

    tiling: SparseTiling
    partial_GTHL: Tensor
    """Outputs of parts, in the dtype of the query; G is 0 where programs share no token."""
    partial_lse_GTH: Tensor
    """fp32 log2-sum-exp2 of their scaled scores."""
    place_BTS: Tensor
    """int32, for every block of heads: where in the flattened cache the selected entries lie, -1 for absent ones. On
    Hopper once for all, those that are there one after the other."""
    length_T: Tensor
    """int32, on Hopper: how many entries are there."""
    pieces_T: Tensor
    """int32, on Hopper: parts that have any."""
    metadata: Tensor
    """int32, on Hopper: `CTA_FIELDS` for every part of every token, see `kernels.sparse.places`."""

    @staticmethod
    def allocate(
        tokens: int,
        heads: int,
        latent: int,
        selected: int,
        dtype: torch.dtype,
        empty: Callable[..., Tensor],
        *,
        fp8: bool = False,
        multiprocessors: int = 132,
        hopper: bool | None = None,
    ) -> SparseWorkspace:
        """Allocate memory for calls of exactly `tokens` tokens of `heads` heads, with `selected` entries each. `dtype`
        is the queries', `fp8` says whether the cache has FP8 entries. `hopper`: whether Hopper's own kernels may be
        taken; None asks the device."""
        length_T = empty(tokens, dtype=torch.int32)
        if hopper is None:
            hopper = is_hopper(length_T.device)
        hopper = hopper and _takes_hopper(heads, latent, dtype, fp8=fp8)
        choose = hopper_sparse_tiling if hopper else sparse_tiling
        tiling = choose(tokens, heads, latent, selected, dtype, fp8=fp8, multiprocessors=multiprocessors)
        parts = -(-selected // tiling.part)
        shared = parts if parts > 1 else 0
        blocks = -(-heads // tiling.block) if tiling.path == "triton" else 1
        planned = 0 if tiling.path == "triton" else parts * tokens * CTA_FIELDS
        return SparseWorkspace(
            tiling=tiling,
            partial_GTHL=empty(shared, tokens, heads, latent, dtype=dtype),
            partial_lse_GTH=empty(shared, tokens, heads, dtype=torch.float32),
            place_BTS=empty(blocks, tokens, selected, dtype=torch.int32),
            length_T=length_T,
            pieces_T=empty(tokens, dtype=torch.int32),
            metadata=empty(planned, dtype=torch.int32),
        )


def widens_selected(heads: int, latent: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether selected FP8 entries are widened anew for every token and block of heads. Then attention to entries in
    `dtype` works in the same memory, and gives the same bits where they hold the same numbers."""
    return is_hopper(device) and _takes_hopper(heads, latent, dtype, fp8=True) and heads > max(FP8_RINGS)


def _takes_hopper(heads: int, latent: int, dtype: torch.dtype, *, fp8: bool) -> bool:
    """Whether Hopper has kernels of its own for such calls."""
    # Of 16 heads in bfloat16 the portable kernel takes a little less time than one of 64.
    there = latent == 512 and dtype == torch.bfloat16 and (fp8 or heads > 16)
    return there and (not fp8 or REINTERPRETED.there())


@dataclass(frozen=True)
class InvariantWorkspace:
    """Memory of `kernels.sparse.sparse_decode` in invariant mode: selected entries, gathered for some tokens at a time,
    and what `kernels.mla_decode` needs for as many rows."""

    cache_PKE: Tensor
    """Pages of the gathered entries, as the cache has them."""
    page_TP: Tensor
    """int32."""
    length_T: Tensor
    """int32."""
    decode: Tensor
    """uint8."""

    @staticmethod
    def allocate(
        tokens: int,
        heads: int,
        latent: int,
        rope: int,
        selected: int,
        dtype: torch.dtype,
        cache_PKE: Tensor,
        empty: Callable[..., Tensor],
    ) -> InvariantWorkspace:
        """Allocate memory for calls of exactly `tokens` tokens of `heads` heads, with `selected` entries each. `dtype`
        is the queries', `cache_PKE` a cache such as they read."""
        group, pages = min(tokens, INVARIANT_TOKENS), pages_for(selected)
        shape = DecodeShape(max(group, 1), 1, heads, latent, rope, pages, invariant=True)
        tiling = invariant_tiling(shape, cache_PKE, dtype)
        return InvariantWorkspace(
            cache_PKE=empty(group * pages, PAGE_TOKENS, cache_PKE.shape[-1], dtype=cache_PKE.dtype),
            page_TP=empty(group, pages, dtype=torch.int32),
            length_T=empty(group, dtype=torch.int32),
            decode=empty(Workspace.bytes(shape, tiling, dtype), dtype=torch.uint8),
        )


def whole_selection(tokens: int, selected: int, lanes: int) -> Whole | None:
    """Return the selection by one program with room for `lanes` candidates a token; None where several programs share a
    token's scores. One program knows a number that as many scores reach as it has groups, so it must have one for each
    selected position."""
    warps, rows = WHOLE_OF_FEW if tokens <= FEW_TOKENS else WHOLE_OF_MANY
    whole = Whole(warps=min(warps, lanes // 32), rows=rows, lanes=lanes)
    return whole if tokens >= WHOLE_TOKENS and selected <= whole.groups else None


def invariant_tiling(shape: DecodeShape, cache_PKE: Tensor, dtype: torch.dtype) -> DecodeTiling:
    """The tiling that dense attention has in invariant mode."""
    device, fp8 = cache_PKE.device, cache_PKE.dtype == torch.uint8
    choose = hopper_tiling if is_hopper(device) and dtype == torch.bfloat16 else portable_tiling
    return choose(shape, multiprocessors(device), fp8=fp8)


def sparse_tiling(
    tokens: int, heads: int, latent: int, selected: int, dtype: torch.dtype, *, fp8: bool, multiprocessors: int
) -> SparseTiling:
    """Blocks as large as there are heads, and parts enough to fill a GPU."""
    if heads > 32 and dtype.itemsize == 2:
        # Of plain entries larger tiles would spill registers.
        block, tile, warps, stages, resident = 64, 64 if fp8 else 32, 8, 3 if fp8 else 5, 1
    elif heads > 16:
        block, tile, warps, stages, resident = 32, 32, 8, 5, 1
    else:
        block, tile, warps, stages, resident = 16, 32, 4, 5, 2
    if dtype.itemsize == 4:
        stages = 2
    programs = max(1, tokens * -(-heads // block))
    parts = _power_of_2(min(resident * multiprocessors // programs, selected // tile))
    part = -(-selected // parts // tile) * tile
    return SparseTiling("triton", block=block, tile=tile, part=part, warps=warps, stages=stages)


def hopper_sparse_tiling(
    tokens: int, heads: int, latent: int, selected: int, dtype: torch.dtype, *, fp8: bool, multiprocessors: int
) -> SparseTiling:
    """Return the tiling of Hopper's own kernels, for 512 latent and 64 roped features: one program per multiprocessor,
    whole tiles each."""
    block = next((most for most in FP8_RINGS if fp8 and heads <= most), 64)
    programs = max(1, tokens * -(-heads // block))
    tiles = pages_for(selected)
    parts = _power_of_2(min(multiprocessors // programs, tiles))
    part = -(-tiles // parts) * PAGE_TOKENS
    path, stages = ("fp8", FP8_RINGS[block]) if block in FP8_RINGS else ("wide", 2)
    return SparseTiling(path, block=block, tile=PAGE_TOKENS, part=part, warps=4, stages=stages)


def _power_of_2(x: int) -> int:
    """The largest power of two that is at most x, and at least 1. Kernels are compiled for a number of parts, and few
    numbers of tokens should compile others."""
    return 1 << max(0, x.bit_length() - 1)
