"""The positions of a token's largest scores on Hopper, all by one program. What is selected is what the three kernels
of `kernels.sparse.select` select.

Its threads go through the scores twice. First each keeps the largest of every so many scores, the maxima of groups as
there; among these a number is found that little more scores reach than are selected. Then the scores that reach it, the
candidates, are written one after the other in the order of their positions; among these the least selected one is
found, and what is selected follows in one go. If there is no room for all candidates, the scores themselves take their
place.

A thread has four scores that lie side by side, of each row of a block. How many candidates come before its own is a
scan over threads, of the counts of all rows in one integer.

Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 (Gluon knows no stars)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.mla_decode.narrow import let_kernel_after_start, wait_for_kernel_before

_NAN = gl.constexpr(0xFFFFFFFE)
_GUESSES = gl.constexpr(8)
"""Middles of two scores that are tried before the middles of their keys: see `kernels.sparse.select`."""
_SIDE = gl.constexpr(4)
"""Scores of a thread that lie side by side."""
_SIXTEEN = gl.constexpr(0xFFFF)


@gluon.constexpr_function
def tile_layout(side, warps):
    """Of a tile [threads, side]: a thread has a line of it."""
    return gl.BlockedLayout([1, side], [32, 1], [warps, 1], [1, 0])


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _before(x):
    """The sum of what stands before each number in its thread's line of a tile."""
    return gl.associative_scan(x, 1, _add) - x


@gluon.jit
def _before_threads(x, WARPS: gl.constexpr):
    """The sum of the numbers of the threads before each."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    number = gl.convert_layout(x, LAYOUT, assert_trivial=True)
    before = gl.associative_scan(number, 0, _add) - number
    return gl.convert_layout(before, x.type.layout, assert_trivial=True)


@gluon.jit
def _total(tile):
    return gl.sum(gl.sum(tile, 1), 0)


@gluon.jit
def key_of(x):
    """See `kernels.sparse.select.key_of`."""
    bits = (x + 0.0).to(gl.uint32, bitcast=True)
    key = bits ^ gl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(gl.uint32)
    return gl.where(x != x, _NAN, key).to(gl.uint32)


@gluon.jit
def score_of(key):
    """The float of a key."""
    bits = key ^ gl.where(key >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(gl.uint32)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def _places(SIDE: gl.constexpr, WARPS: gl.constexpr):
    """Where the numbers of a tile stand: [threads, side]."""
    LAYOUT: gl.constexpr = tile_layout(SIDE, WARPS)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, LAYOUT))
    return thread[:, None] * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.jit
def _block_at(mine, first, end, SHAPE: gl.constexpr):
    """Keys of a block of scores, a tile [threads, 4] for every row; 0 at and behind `end`. Rows of scores are whole
    pages wide: up to the next multiple of 16 there is memory, and loads can be wide."""
    there = (end + 15) // 16 * 16
    ROWS: gl.constexpr = SHAPE.rows
    scores = ()
    for i in gl.static_range(ROWS):
        at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
        scores = scores + (gl.load(mine + at, mask=at < there, other=0.0, cache_modifier=".cg"),)
    tiles = ()
    for i in gl.static_range(ROWS):
        at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
        tiles = tiles + (gl.where(at < end, key_of(scores[i]), 0).to(gl.uint32),)
    return tiles


@gluon.jit
def _reaching(tiles, number, TILES: gl.constexpr):
    """How many keys of some tiles reach a number."""
    count = (tiles[0] >= number).to(gl.int32)
    for i in gl.static_range(1, TILES):
        count += (tiles[i] >= number).to(gl.int32)
    return _total(count)


@gluon.jit
def middle_of(low, high, step, GUESSES: gl.constexpr):
    """Where to cut an interval of keys: somewhere between its ends."""
    middle = low + (high - low) // 2
    if GUESSES > 0:
        guess = key_of(score_of(low) * 0.5 + score_of(high) * 0.5)
        guess = gl.minimum(gl.maximum(guess, low + 1), high - 1)
        middle = gl.where(step < GUESSES, guess, middle)
    return middle


@gluon.jit
def _least_of(tiles, SELECTED: gl.constexpr, SLACK: gl.constexpr, GUESSES: gl.constexpr, TILES: gl.constexpr):
    """As `kernels.sparse.select.least_of`, of the keys of some tiles."""
    least = gl.where(tiles[0] == 0, _NAN, tiles[0]).to(gl.uint32)
    most = tiles[0]
    for i in gl.static_range(1, TILES):
        least = gl.minimum(least, gl.where(tiles[i] == 0, _NAN, tiles[i]).to(gl.uint32))
        most = gl.maximum(most, tiles[i])
    low = gl.min(gl.min(least, 1), 0)
    high = gl.max(gl.max(most, 1), 0) + 1  # fewer reach it
    reached = _reaching(tiles, 1, TILES)
    step = 0
    while (reached > SELECTED + SLACK) & (high - low > 1):
        middle = middle_of(low, high, step, GUESSES)
        number = _reaching(tiles, middle, TILES)
        enough = number >= SELECTED
        low = gl.where(enough, middle, low)
        high = gl.where(enough, high, middle)
        reached = gl.where(enough, number, reached)
        step += 1
    return low


@gluon.jit
def _keep(tiles, threshold, first, kept, keys, positions, SHAPE: gl.constexpr):
    """Write the candidates of a block behind the `kept` before them; how many there are with them."""
    ROWS: gl.constexpr = SHAPE.rows
    # 16 bits for each row, which has 4,096 scores at most.
    counts = gl.sum((tiles[0] >= threshold).to(gl.int32), 1).to(gl.int64)
    for i in gl.static_range(1, ROWS):
        counts += gl.sum((tiles[i] >= threshold).to(gl.int32), 1).to(gl.int64) << (16 * i)
    earlier = _before_threads(counts, SHAPE.warps)
    totals = gl.sum(counts, 0)
    for i in gl.static_range(ROWS):
        keep = tiles[i] >= threshold
        to = kept + ((earlier >> (16 * i)) & _SIXTEEN).to(gl.int32)[:, None] + _before(keep.to(gl.int32))
        inside = keep & (to < SHAPE.lanes)
        gl.store(keys + to, tiles[i].to(gl.int32, bitcast=True), mask=inside)
        at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
        gl.store(positions + to, at, mask=inside)
        kept += ((totals >> (16 * i)) & _SIXTEEN).to(gl.int32)
    return kept


@gluon.jit
def _list(out, key, at, least, place, left, WARPS: gl.constexpr):
    """Write those of a tile's positions, in their order, that are selected: of keys above the least one, and the first
    `left` that equal it. Returns `place` and `left` as they are behind them."""
    # Two counts in one integer.
    flags = (key > least).to(gl.int32) + ((key == least).to(gl.int32) << 16)
    counts = gl.sum(flags, 1)
    before = _before_threads(counts, WARPS)[:, None] + _before(flags)
    equal_before = before >> 16
    take = (key > least) | ((key == least) & (equal_before < left))
    gl.store(out + place + (before & _SIXTEEN) + gl.minimum(equal_before, left), at, mask=take)
    total = gl.sum(counts, 0)
    taken = gl.minimum(total >> 16, left)
    return place + (total & _SIXTEEN) + taken, left - taken


@gluon.jit
def _reaching_of_all(mine, seen, number, SHAPE: gl.constexpr):
    """How many of all scores' keys reach a number."""
    ROWS: gl.constexpr = SHAPE.rows
    count = seen * 0
    for first in range(0, seen, 32 * SHAPE.warps * _SIDE * ROWS):
        count += _reaching(_block_at(mine, first, seen, SHAPE), number, ROWS)
    return count


@gluon.jit
def _list_of_all(out, mine, seen, least, SELECTED: gl.constexpr, SHAPE: gl.constexpr):
    """Select from all scores, whose least selected key is `least` or larger."""
    ROWS: gl.constexpr = SHAPE.rows
    low = least
    high = least + 1  # tried first: most scores are equal where there are many candidates
    top = _NAN + (least & 0) + 1
    while high - low > 0:
        enough = _reaching_of_all(mine, seen, high, SHAPE) >= SELECTED
        # `top` is a number that too few reach, `high` the one that is tried.
        low = gl.where(enough, high, low)
        top = gl.where(enough, top, high)
        high = low + (top - low) // 2
    place = seen * 0
    left = SELECTED - _reaching_of_all(mine, seen, low + 1, SHAPE)
    for first in range(0, seen, 32 * SHAPE.warps * _SIDE * ROWS):
        tiles = _block_at(mine, first, seen, SHAPE)
        for i in gl.static_range(ROWS):
            at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
            place, left = _list(out, tiles[i], at, low, place, left, SHAPE.warps)


@gluon.jit(do_not_specialize=["scores", "score_stride"], do_not_specialize_on_alignment=["bound", "fault"])
def select_whole(
    score, bound, candidate, position, selected, fault, scores, score_stride, SELECTED: gl.constexpr,
    SHAPE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Programs of one token. `candidate`, `position`: room for SHAPE.lanes numbers a token, SHAPE being a
    `kernels.sparse.workspace.Whole`. `score_stride` is in lines
    of 16 scores, so that the compiler knows how they lie."""
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()
    ROWS: gl.constexpr = SHAPE.rows
    BLOCK: gl.constexpr = 32 * SHAPE.warps * _SIDE * SHAPE.rows
    EACH: gl.constexpr = SHAPE.lanes // (32 * SHAPE.warps)
    token = gl.program_id(0).to(gl.int64)
    sees = gl.load(bound + token)
    wrong = (sees < 0) | (sees > scores)
    out = selected + token * SELECTED
    if wrong | (sees <= SELECTED):
        gl.atomic_add(fault, 1, mask=wrong, sem="relaxed")
        all = gl.where(wrong, 0, sees)
        for first in range(0, SELECTED, 32 * SHAPE.warps * _SIDE):
            at = first + _places(_SIDE, SHAPE.warps)
            gl.store(out + at, gl.where(at < all, at, -1), mask=at < SELECTED)
    else:
        mine = score + token * (score_stride * 16)
        top = _block_at(mine, 0, sees, SHAPE)
        for first in range(BLOCK, sees, BLOCK):
            block = _block_at(mine, first, sees, SHAPE)
            larger = ()
            for i in gl.static_range(ROWS):
                larger = larger + (gl.maximum(top[i], block[i]),)
            top = larger
        threshold = _least_of(top, SELECTED, SELECTED // 8, _GUESSES, ROWS)
        keys = candidate + token * SHAPE.lanes
        positions = position + token * SHAPE.lanes
        kept = sees * 0
        tiles = _block_at(mine, 0, sees, SHAPE)
        for first in range(0, sees, BLOCK):
            following = _block_at(mine, first + BLOCK, sees, SHAPE)
            kept = _keep(tiles, threshold, first, kept, keys, positions, SHAPE)
            tiles = following
        gl.thread_barrier()
        if kept <= SHAPE.lanes:
            i = _places(EACH, SHAPE.warps)
            key = gl.load(keys + i, mask=i < kept, other=0, cache_modifier=".cg").to(gl.uint32, bitcast=True)
            at = gl.load(positions + i, mask=i < kept, other=0, cache_modifier=".cg")
            least = _least_of((key,), SELECTED, 0, 0, 1)
            left = SELECTED - _reaching((key,), least + 1, 1)
            _list(out, key, at, least, kept * 0, left, SHAPE.warps)
        else:
            _list_of_all(out, mine, sees, threshold, SELECTED, SHAPE)
