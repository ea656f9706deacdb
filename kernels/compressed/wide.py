"""Attention of many tokens to a window and to entries that stand for several tokens, on Hopper: the groups of
`kernels.mla_decode.wide`, whose tiles are gathered entry by entry as in `kernels.sparse.selected_wide`, for entries
that are keys and values at once.

A program stays and takes one token after the other. As a token has few tiles, what lies between tokens counts: the
queries of the next token are fetched once the last tile of one is scored, and its first tile beside them, while the
groups still sum; outputs leave through the memory of the last tile.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.compressed.wide_groups import left_group, right_group
from kernels.compressed.wide_tile import HALF, Call, item_of, step_behind, steps_of, wide_memory
from kernels.gluon.prefetch import LINE, ask_for_lines
from kernels.mla_decode.split_kv import TILE
from kernels.mla_decode.wide_tile import BLOCK, TILED
from kernels.sparse.fetch import THREADS, rows_layout, tell

_SLICE = gl.constexpr(64)
_STEP = gl.constexpr(1)
_PAGES = gl.constexpr(2)


def queries_box(q_THD: Tensor) -> TensorDescriptor:
    """The TMA descriptor of queries in bfloat16 of 512 features, laid end to end: boxes of 64 x 256."""
    return TensorDescriptor.from_tensor(q_THD.reshape(-1, 2 * HALF.value), [BLOCK.value, HALF.value], TILED.value)


@gluon.jit
def base_of(code, window, step, paged, SIZES: gl.constexpr):
    """Where the entries lie that were listed as `code`; of absent ones anything."""
    base = window
    if SIZES.ratio:
        base = gl.where((code & _PAGES) != 0, paged, base)
    if SIZES.own:
        base = gl.where((code & _STEP) != 0, step, base)
    return base + (code >> 2).to(gl.int64) * (2 * HALF)


@gluon.jit
def copy_half(entry, there, half_s, FIRST: gl.constexpr, LAYOUT: gl.constexpr):
    """Copy half of the features of a tile's entries, from FIRST on; zeros of those that are not there."""
    for i in gl.static_range(HALF // _SLICE):
        feature = FIRST + i * _SLICE + gl.arange(0, _SLICE, gl.SliceLayout(0, LAYOUT))
        at = gl.expand_dims(entry, 1) + feature[None, :]
        mask = gl.expand_dims(there, 1) & (feature >= 0)[None, :]
        async_copy.async_copy_global_to_shared(half_s.slice(i * _SLICE, _SLICE, dim=1), at, mask=mask)


@gluon.jit
def ask_for(call, q, item, SIZES: gl.constexpr):
    """Tell the L2 cache of what an item alone reads: its queries, and the rotations of its tokens."""
    VECTOR: gl.constexpr = 2 * HALF * 2
    lines: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    vector = item.token.to(gl.int64) * call.heads + item.block * BLOCK
    there = gl.where(item.count > 0, gl.minimum(call.tokens.to(gl.int64) * call.heads - vector, BLOCK), 0)
    for part in gl.static_range(BLOCK * VECTOR // LINE // THREADS):
        line = part * THREADS + gl.arange(0, THREADS, lines)
        ask_for_lines(q.to(gl.int64) + vector * VECTOR + line * LINE, line * LINE < there * VECTOR)
    angle = gl.arange(0, THREADS, lines)
    second = (angle >= THREADS // 2).to(gl.int32)
    at = (item.token + second).to(gl.int64) * SIZES.rotation + (angle - second * (THREADS // 2))
    asked = (angle - second * (THREADS // 2) < SIZES.rope) & (second < item.tokens) & (item.count > 0)
    ask_for_lines((call.rotation + at).to(gl.int64), asked)


@gluon.jit
def fetch(
    call, q, q_half, window, step, paged, fetched, ring, SIZES: gl.constexpr, PAIRS: gl.constexpr, AHEAD: gl.constexpr
):
    """The fetching warps: the queries and the tiles of one item after the other."""
    LAYOUT: gl.constexpr = rows_layout(8)
    entry = gl.arange(0, TILE, gl.SliceLayout(1, LAYOUT))
    tiles = 0
    rows = 0
    number = 0
    steps = steps_of(call, PAIRS)
    item = item_of(call, number, PAIRS)
    mine = item.token.to(gl.int64) * call.most
    code = gl.load(call.listed + mine + entry, mask=entry < item.count, other=-1, cache_modifier=".cg")
    while number < steps:
        number = step_behind(number, item, PAIRS)
        following = item_of(call, number, PAIRS)
        next_one = following.token.to(gl.int64) * call.most
        if AHEAD:
            ask_for(call, q, following, SIZES)
        count = item.count
        for low in range(0, gl.maximum(count, 1), TILE):
            there = code >= 0
            at = base_of(code, window, step, paged, SIZES)
            # What follows: the item's next tile, or the first one of the next item.
            more = low + TILE < count
            begin = gl.where(more, mine + low + TILE, next_one)
            left = gl.where(more, count - low - TILE, following.count)
            code = gl.load(call.listed + begin + entry, mask=entry < left, other=-1, cache_modifier=".cg")
            if count > 0:
                buffer = tiles & 1
                phase = ((tiles >> 1) & 1) ^ 1
                mbarrier.wait(ring.empty.index(buffer), phase)
                copy_half(at, there, fetched.kv.index(buffer), 0, LAYOUT)
                tell(ring.full.index(buffer))
                if low == 0:
                    # Of an odd number of tiles there is room for the next token's first one before its queries.
                    vector = item.token * call.heads + item.block * BLOCK
                    mbarrier.wait(ring.q_empty, (rows & 1) ^ 1)
                    mbarrier.expect(ring.q_full, 2 * q_half.block_type.nbytes)
                    tma.async_copy_global_to_shared(q_half, [vector, 0], ring.q_full, fetched.q.index(0))
                    tma.async_copy_global_to_shared(q_half, [vector, HALF], ring.q_full, fetched.q.index(1))
                    rows += 1
                mbarrier.wait(ring.empty.index(2 + buffer), phase)
                copy_half(at, there, fetched.kv.index(2 + buffer), HALF, LAYOUT)
                tell(ring.full.index(2 + buffer))
                tiles += 1
        item = following
        mine = next_one


@gluon.jit(do_not_specialize=["tokens", "heads", "blocks", "most"])
def attend_entries(
    q, q_half, window, step, paged, listed, record, sink, rotation, out, scale, tokens, heads, blocks, most,
    SIZES: gl.constexpr, PAIRS: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Programs that take an `Item` after the other; four warps, the others come on top. With PAIRS two tokens have at
    most 64 heads together. `q_half`: `queries_box` of the queries `q`. `listed`, `record`: see
    `kernels.compressed.listing`; they say of each entry whether it lies in `window`, `step` or `paged`. `scale`
    includes log2(e). AHEAD: whether the L2 cache is told of the next item."""
    call = Call(
        listed=listed,
        record=record,
        sink=sink,
        rotation=rotation,
        out=out,
        scale=scale,
        tokens=tokens,
        heads=heads,
        blocks=blocks,
        most=most,
    )
    fetched, exchanged, ring, messages = wide_memory(THREADS)
    gl.warp_specialize(
        [
            (left_group, (call, fetched, exchanged, ring, messages, SIZES, PAIRS)),
            (right_group, (call, fetched, exchanged, ring, messages, SIZES, PAIRS)),
            (fetch, (call, q, q_half, window, step, paged, fetched, ring, SIZES, PAIRS, AHEAD)),
        ],
        [4, 4],
        [216, 56],
    )
