"""Conversion of FP8 entries to tiles in bfloat16 for the groups of `wide`: for each half of the features four warps
load the latents of a tile and write their numbers to shared memory, 16 entries at a time. Either half is widened as
soon as the group that reads it last has handed it back, and a scheduler has a warp of each: while one waits for its
loads or conversions, the other goes on. Whoever calls brings the roped features, which are bfloat16 already.

Their stores are fenced by those who read (`wide_tile.until_there`): a fence of theirs would wait for all that they are
loading. Words of two numbers go to places that products see as numbers, by a private part of Gluon, of Triton 3.6."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 (Gluon knows no stars)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.latent_entry import GROUP
from kernels.mla_decode.split_kv import TILE
from kernels.mla_decode.wide_tile import HALF_LATENT

ROWS = gl.constexpr(16)
"""Entries of a piece."""
QUARTERS = gl.constexpr(TILE.value // ROWS.value)
PIECES = gl.constexpr(2 * QUARTERS.value)
"""Pieces of a half of a tile: for each quarter of the entries, two groups of features."""
AHEAD = gl.constexpr(3)
"""Pieces that are on their way while one is written."""
PIECE = gl.constexpr(gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0]))
"""Layout of words of four codes. Eight threads write a line of shared memory, of which no two share a bank."""
PLACE = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
"""Layout of a half of a tile in words of two numbers."""
WORDS = gl.constexpr(GROUP // 4)
"""Words of a group of features."""

# A word of codes and their scale become two words of numbers.
_WIDEN = gl.constexpr(
    """
    {
    .reg .b16 low, high, a, b, c, d;
    .reg .b32 first, second;
    .reg .f32 p, q, r, s;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 first, low;
    cvt.rn.f16x2.e4m3x2 second, high;
    mov.b32 {a, b}, first;
    mov.b32 {c, d}, second;
    cvt.f32.f16 p, a;
    cvt.f32.f16 q, b;
    cvt.f32.f16 r, c;
    cvt.f32.f16 s, d;
    mul.f32 p, p, $3;
    mul.f32 q, q, $3;
    mul.f32 r, r, $3;
    mul.f32 s, s, $3;
    cvt.rn.bf16x2.f32 $0, q, p;
    cvt.rn.bf16x2.f32 $1, s, r;
    }
    """
)


@gluon.jit
def widened(codes, scale):
    """Convert words of codes [ROWS, WORDS] to words of two bfloat16 [ROWS, 2 WORDS]."""
    kinds: gl.constexpr = (gl.int32, gl.int32)
    first, second = gl.inline_asm_elementwise(
        _WIDEN, "=r,=r,r,r", [codes, gl.expand_dims(scale, 1)], dtype=kinds, is_pure=False, pack=1
    )
    return gl.reshape(gl.join(first, second), [ROWS, 2 * WORDS])


@gluon.jit
def load_piece(cache, numbers, INDEX: gl.constexpr, SIDE: gl.constexpr, ENTRY: gl.constexpr):
    """Words of codes [ROWS, WORDS] and scales [ROWS] of a group of features of the entries with `numbers`: [ROWS] for
    each quarter of the tile. SIDE: 0 for the left half of the features, 1 for the right."""
    GROUP_INDEX: gl.constexpr = 2 * SIDE + INDEX % 2
    at = cache + numbers[INDEX // 2].to(gl.int64) * ENTRY.size
    words = gl.expand_dims(at.to(gl.pointer_type(gl.int32), bitcast=True), 1)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, PIECE))[None, :]
    scales = at.to(gl.pointer_type(gl.float32), bitcast=True)
    codes = gl.load(words + (GROUP_INDEX * WORDS + word), cache_modifier=".cg")
    return codes, gl.load(scales + (ENTRY.scales // 4 + GROUP_INDEX), cache_modifier=".cg")


@gluon.jit
def first_pieces(cache, numbers, SIDE: gl.constexpr, ENTRY: gl.constexpr):
    """Load the first pieces of a half of a tile."""
    loaded = ()
    for piece in gl.static_range(AHEAD):
        loaded = loaded + (load_piece(cache, numbers, piece, SIDE, ENTRY),)
    return loaded


@gluon.jit
def put_piece(own, to, INDEX: gl.constexpr):
    """Write a loaded piece to its place in a half of a tile."""
    part = to._reinterpret(gl.int32, [TILE, HALF_LATENT // 2], PLACE)
    part = part.slice(INDEX // 2 * ROWS, ROWS, dim=0).slice(INDEX % 2 * 2 * WORDS, 2 * WORDS, dim=1)
    part.store(widened(own[0], own[1]))


@gluon.jit
def widen_half(
    cache, loaded, numbers, following, fetched, ring, tiles,
    SIDE: gl.constexpr, ENTRY: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Write one half of a CTA's tile number `tiles`, of the entries with `numbers`, to its place once that is free,
    and tell when it is complete. `loaded`: its first pieces. Returns those of the next tile, whose entries are
    `following`.

    COPIED: roped features come by cp.async of the threads that widen the right half. Else they come by the copy engine,
    and each half of a tile is complete after two arrivals, of which one of the right half is the copy's."""
    half = SIDE * 2 + (tiles & 1)
    to = fetched.kv.index(half)
    mbarrier.wait(ring.empty.index(half), ((tiles >> 1) & 1) ^ 1)
    for piece in gl.static_range(PIECES):
        if piece + AHEAD < PIECES:
            coming = load_piece(cache, numbers, piece + AHEAD, SIDE, ENTRY)
        else:
            coming = load_piece(cache, following, piece + AHEAD - PIECES, SIDE, ENTRY)
        put_piece(loaded[0], to, piece)
        loaded = loaded[1:] + (coming,)
    if COPIED and SIDE == 1:
        async_copy.wait_group(0)
    gl.thread_barrier()
    mbarrier.arrive(ring.full.index(half), count=1 if COPIED else 2 - SIDE)
    return loaded
