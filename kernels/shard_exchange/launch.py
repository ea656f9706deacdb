"""Launches the exchanges. Allocates nothing and waits for nothing, so it may be captured into a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, Final

import triton
from torch import Tensor

from kernels.one_shot.words import take
from kernels.shard_exchange import kernel

PIECE_BYTES: Final = 16
"""Bytes that a thread handles at a time."""
LANES: Final = 128
"""Most programs. Each waits for those of its own index alone, so all go on where not all run at once."""
FEW_THREADS, MANY_THREADS = 128, 512
"""Threads of a program: few, so that little is shared by many programs, and many, so that much takes few steps."""

Fields = tuple[Tensor, Tensor, Tensor, int, int]
"""Own memory, addresses of all, turns, number of this shard, bytes of a slot: see `Inbox`."""

_take = cache(take)


def _threads(pieces: int) -> int:
    return FEW_THREADS if pieces <= 2 * LANES * FEW_THREADS else MANY_THREADS


def places_of(out_THL: Tensor) -> int:
    """Threads of an item, of which some may have no piece."""
    return int(triton.next_power_of_2(out_THL.shape[2] * out_THL.itemsize // PIECE_BYTES))


def calls(tokens: int, pieces: int, lane_bytes: int, *, items: int = 0) -> Iterator[slice]:
    """The tokens of each call, of which as many as lanes have room for are exchanged at a time. `pieces`: of a token;
    `items`: items of `MANY_THREADS` pieces. ValueError where there is no room for one token."""
    steps = lane_bytes // ((MANY_THREADS + items) * PIECE_BYTES)
    most = steps * LANES * MANY_THREADS // pieces
    if most < 1:
        raise ValueError(f"a token of {pieces} pieces does not fit into {LANES} lanes of {lane_bytes} bytes")
    for begin in range(0, tokens, most):
        yield slice(begin, min(begin + most, tokens))


def gather(part_TY: Tensor, inbox: Fields, out_TDY: Tensor, *, dependent: bool) -> None:
    """`kernel.gather_shards`, in one call. `inbox`: the fields of an `Inbox`."""
    row = part_TY.shape[1] * part_TY.itemsize // PIECE_BYTES
    pieces = part_TY.shape[0] * row
    programs, steps, common = _common(inbox, pieces, _threads(pieces), dependent)
    own, address_D, turn_L, index, _ = inbox
    kernel.gather_shards[(programs,)](part_TY, own, address_D, turn_L, out_TDY, pieces, steps, index, ROW=row, **common)


def merge(
    part_TDHL: Tensor,
    lse_TDH: Tensor,
    inbox: Fields,
    out_THL: Tensor,
    out_lse_TH: Tensor,
    *,
    tree: bool,
    dependent: bool,
) -> None:
    """`kernel.merge_shards`, in one call. `inbox`: the fields of an `Inbox`."""
    tokens, heads, latent = out_THL.shape
    pieces = latent * out_THL.itemsize // PIECE_BYTES
    places = places_of(out_THL)
    items = tokens * heads
    threads = max(_threads(items * places), places)
    programs, steps, common = _common(inbox, items * places, threads, dependent)
    own, address_D, turn_L, index, _ = inbox
    kernel.merge_shards[(programs,)](
        part_TDHL,
        lse_TDH,
        own,
        address_D,
        turn_L,
        out_THL,
        out_lse_TH,
        items,
        steps,
        heads,
        index,
        PIECES=pieces,
        PLACES=places,
        FP32=out_THL.itemsize == 4,
        TREE=tree,
        # Who leaves it to the compiler which products and sums are one operation gets another answer elsewhere.
        enable_fp_fusion=not tree,
        **common,
    )


def _common(inbox: Fields, pieces: int, threads: int, dependent: bool) -> tuple[int, int, dict[str, Any]]:
    """(programs, steps of each, what both kernels are compiled for)."""
    _, address_D, _, _, slot_bytes = inbox
    shards = len(address_D)
    programs = min(LANES, triton.cdiv(pieces, threads))
    asm, constraints = _take(shards - 1, slot_bytes)
    return (
        programs,
        triton.cdiv(pieces, programs * threads),
        {
            "SHARDS": shards,
            "BLOCK": threads,
            "LANE_BYTES": slot_bytes // LANES,
            "SLOT_BYTES": slot_bytes,
            "TAKE": asm,
            "CONSTRAINTS": constraints,
            "DEPENDENT": dependent,
            "num_warps": threads // 32,
            "maxnreg": 128,
            "launch_pdl": dependent,
        },
    )
