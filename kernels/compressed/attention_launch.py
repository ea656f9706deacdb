"""Launches attention to windows and compressed entries. As `launch`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
import triton
from torch import Tensor

from kernels.compressed import attention
from kernels.compressed.attention import Sizes
from kernels.compressed.launch import options
from kernels.compressed.listing import RECORD_FIELDS, find_entries
from kernels.compressed.rows import TokenRows
from kernels.page import PAGE_TOKENS
from kernels.runtime.hopper import is_hopper

FEWEST_OF_HOPPER: Final = 128
"""Fewest tokens for that kernel, whose programs have whole tokens: about as many as there are programs, by
arithmetic."""
AHEAD = True
"""Whether that kernel tells the L2 cache of the next token's queries and rotations meanwhile. Not measured yet."""
_FEATURES_OF_HOPPER: Final = 512
_FOUND: Final = 512
"""Entries of a token that are listed at a time for it."""
_PIECE: Final = 128
"""Features of a piece of an entry."""
_LISTED: Final = 256
"""Entries that a program lists at a time."""
_MERGED: Final = 8
"""Pieces that are added up at a time."""
TILES_OF_PART: Final = 1
"""Tiles of a part, where a token's entries are shared by as many programs as may be: a program goes through its tiles
one after the other, and few tokens leave most multiprocessors idle."""
MOST_PARTS: Final = 16
"""Most parts of a token's entries. Every one of them leaves a piece that is written and read again."""


class Tiling(NamedTuple):
    """How the heads and entries of a token are cut up."""

    block: int
    """Heads of a program."""
    tile: int
    """Entries that it reads at a time."""
    warps: int
    stages: int
    """Tiles in flight."""
    hopper: bool = False
    """Whether Hopper's own kernel attends."""

    @staticmethod
    def of(heads: int, itemsize: int) -> Tiling:
        """The tiling of the portable kernel for so many heads, and numbers of so many bytes."""
        if itemsize == 4:
            return Tiling(16, 32, 4, 2)
        # Of 64 heads the sums would not find registers.
        return Tiling(32, 32, 8, 7) if heads > 16 else Tiling(16, 32, 4, 5)


HOPPER: Final = Tiling(64, 64, 4, 2, hopper=True)


def takes_hopper(tokens: int, heads: int, features: int, dtype: torch.dtype) -> bool:
    """Whether Hopper has a kernel of its own for such calls."""
    # With 16 heads three quarters of its products would be of nobody's.
    sizes = tokens >= FEWEST_OF_HOPPER and heads > 16 and features == _FEATURES_OF_HOPPER
    return sizes and dtype == torch.bfloat16


@dataclass(frozen=True)
class AttendWorkspace:
    """Memory of `kernels.compressed.attend`; what it holds means nothing before and after a call."""

    tiling: Tiling
    listed_BTN: Tensor
    """int32, for every block of heads: where a token's entries lie."""
    partial_GTHD: Tensor
    """fp32 outputs of parts of a token's entries; G is 0 where no programs share a token."""
    partial_lse_GTH: Tensor
    """fp32 log2-sum-exp2 of their scaled scores."""
    record_TE: Tensor
    """int32, for Hopper's own kernel: see `kernels.compressed.listing`."""
    programs: int
    """Programs of that kernel at most."""

    @staticmethod
    def allocate(
        tokens: int,
        heads: int,
        features: int,
        entries: int,
        empty: Callable[..., Tensor],
        *,
        programs: int = 132,
        dtype: torch.dtype = torch.bfloat16,
        hopper: bool | None = None,
    ) -> AttendWorkspace:
        """Allocate memory for calls of exactly `tokens` tokens of `heads` heads, each of which attends to at most
        `entries` entries, those of the window included. `empty(*shape, dtype=)` gives uninitialised device memory; so
        many `programs` are wanted at least, one for each multiprocessor of a GPU. `dtype`: of queries and entries.
        `hopper`: whether Hopper's own kernel may be taken where there are tokens enough; None asks the device."""
        may = takes_hopper(tokens, heads, features, dtype)
        if may:
            may = is_hopper(empty(0, dtype=torch.int32).device) if hopper is None else hopper
        tiling = HOPPER if may else Tiling.of(heads, dtype.itemsize)
        blocks = 1 if may else -(-heads // tiling.block)
        # Kernels are compiled for a number of parts, and few numbers of tokens should compile others.
        parts = 1 if may else _parts(programs // max(tokens * blocks, 1), -(-entries // tiling.tile))
        shared = parts if parts > 1 else 0
        return AttendWorkspace(
            tiling,
            empty(blocks, tokens, entries, dtype=torch.int32),
            empty(shared, tokens, heads, features, dtype=torch.float32),
            empty(shared, tokens, heads, dtype=torch.float32),
            empty(tokens if may else 0, RECORD_FIELDS, dtype=torch.int32),
            programs,
        )


def _parts(room: int, tiles: int) -> int:
    """Parts of a token's entries: a power of two, where there is room for so many programs of each token."""
    wanted = -(-tiles // TILES_OF_PART)
    return min(1 << max(0, room.bit_length() - 1), 1 << max(0, wanted - 1).bit_length(), MOST_PARTS)


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
    workspace: AttendWorkspace,
    *,
    window: int,
    ratio: int,
    scale: float,
    first: int,
    block: int = 0,
    dependent: bool = False,
) -> None:
    tokens, heads, features = q_THD.shape
    if not tokens:
        return
    tiling, partial, partial_lse = workspace.tiling, workspace.partial_GTHD, workspace.partial_lse_GTH
    blocks, most = triton.cdiv(heads, tiling.block), workspace.listed_BTN.shape[2]
    fits = workspace.listed_BTN.shape[:2] == (1 if tiling.hopper else blocks, tokens)
    fits = fits and partial.shape[1:] == q_THD.shape
    if not fits or (not tiling.hopper and tiling != Tiling.of(heads, q_THD.itemsize)):
        raise ValueError(f"a workspace of {tuple(partial.shape)} serves no call of {tuple(q_THD.shape)} {q_THD.dtype}")
    pieces = features // _PIECE if features % _PIECE == 0 else 1
    if (roped := rotation_TO.shape[1]) > features // pieces:
        raise ValueError(f"{roped} roped features of {features}: the last {features // pieces} are turned back at most")
    sizes = Sizes(
        features=features,
        pieces=pieces,
        lanes=max(16, triton.next_power_of_2(features // pieces)),
        rope=roped,
        rotation=rotation_TO.stride(0),
        window=window,
        first=first,
        length=ring_XLD.shape[1],
        own=entry_TD is not None,
        block=block,
        ratio=ratio,
        entries=max(1, PAGE_TOKENS // ratio) if ratio else 0,
        selected=0 if selected_TS is None else selected_TS.shape[1],
        precision="ieee" if q_THD.itemsize == 4 else "tf32",
        dependent=dependent and not tiling.hopper,
    )
    entries = ring_XLD if entry_TD is None else entry_TD, ring_XLD if entry_PKD is None else entry_PKD
    pages = 0 if entry_PKD is None else len(entry_PKD)
    if tiling.hopper:
        sources = ring_XLD, *entries, workspace.listed_BTN if selected_TS is None else selected_TS
        _attend_on_hopper(q_THD, sources, sink_H, rotation_TO, out_THD, rows, workspace, pages, scale, sizes)
        return
    parts = max(1, len(partial))
    attention.attend[(blocks * parts, tokens)](
        q_THD,
        ring_XLD,
        *entries,
        workspace.listed_BTN if selected_TS is None else selected_TS,
        sink_H,
        rotation_TO,
        out_THD,
        partial,
        partial_lse,
        workspace.listed_BTN,
        rows.position_T,
        rows.row_T,
        rows.slot_R,
        rows.page_RP,
        rows.fault_1,
        scale * math.log2(math.e),
        tokens,
        len(rows.slot_R),
        len(ring_XLD),
        rows.page_RP.shape[1],
        pages,
        rows.page_RP.stride(0),
        heads,
        blocks,
        most,
        SIZES=sizes,
        BLOCK=tiling.block,
        TILE=tiling.tile,
        PARTS=parts,
        LISTED=_LISTED,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **options(dependent),
    )
    if parts > 1:
        attention.merge[(tokens * heads,)](
            partial,
            partial_lse,
            sink_H,
            rotation_TO,
            out_THD,
            rows.row_T,
            rows.slot_R,
            tokens * heads,
            heads,
            len(rows.slot_R),
            len(ring_XLD),
            SIZES=sizes,
            PARTS=parts,
            TILE=_MERGED,
            BLOCK=triton.next_power_of_2(features),
            num_warps=4,
            **options(dependent),
        )


def _attend_on_hopper(
    q_THD: Tensor,
    sources: tuple[Tensor, ...],
    sink_H: Tensor,
    rotation_TO: Tensor,
    out_THD: Tensor,
    rows: TokenRows,
    workspace: AttendWorkspace,
    pages: int,
    scale: float,
    sizes: Sizes,
) -> None:
    """List the entries of each token, then attend to them. `sources`: where entries lie, and the selection."""
    from kernels.compressed.wide import attend_entries, queries_box

    tokens, heads, features = q_THD.shape
    blocks, most = triton.cdiv(heads, workspace.tiling.block), workspace.listed_BTN.shape[2]
    told = workspace.listed_BTN, workspace.record_TE
    # What is not finite of a token reaches the other one of its pair: never a token that is decided by itself.
    pairs = 2 * heads <= workspace.tiling.block and not rows.width and not sizes.first and not sizes.block
    find_entries[(triton.cdiv(tokens, 2) if pairs else tokens,)](
        *sources,
        out_THD,
        *told,
        rows.position_T,
        rows.row_T,
        rows.slot_R,
        rows.page_RP,
        rows.fault_1,
        tokens,
        len(rows.slot_R),
        len(sources[0]),
        rows.page_RP.shape[1],
        pages,
        rows.page_RP.stride(0),
        heads * features,
        most,
        SIZES=sizes,
        TILE=32,
        LANES=_FOUND,
        PAIRS=pairs,
        STEPS=sizes.selected.bit_length(),
        num_warps=4,
    )
    items = triton.cdiv(tokens, 2) if pairs else tokens * blocks
    attend_entries[(min(workspace.programs, items),)](
        q_THD,
        queries_box(q_THD),
        *sources[:3],
        *told,
        sink_H,
        rotation_TO,
        out_THD,
        scale * math.log2(math.e),
        tokens,
        heads,
        blocks,
        most,
        SIZES=sizes,
        PAIRS=pairs,
        AHEAD=AHEAD,
        num_warps=workspace.tiling.warps,
    )
