"""The positions of a token's largest scores on Hopper, all by one program. What is selected is what the three kernels
of `kernels.sparse.select` select.

Its threads go through the scores three times, each warp through a stretch of its own. First each thread keeps the
largest of every so many scores, the maxima of groups as there; among these a number is found that little more scores
reach than are selected. Then the scores that reach it, the candidates, are counted, so that each warp knows how many
come before its own; and then they are written one after the other in the order of their positions. Among these the
least selected one is found, and what is selected follows in one go. If there is no room for all candidates, the scores
themselves take their place.

All scores are compared as they are, which takes fewer instructions than their keys would; maxima and candidates alone
have keys. No warp waits for another one while it goes through the scores.

Gluon.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"
# ruff: noqa: RUF005 (Gluon knows no stars)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language import PropagateNan

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before
from kernels.sparse.select import key_of, middle_of, score_of

_NAN = gl.constexpr(0xFFFFFFFE)
_NAN_IS_LARGER = gl.constexpr(PropagateNan.ALL)
_GUESSES = gl.constexpr(8)
"""Middles of two scores that are tried before the middles of their keys: see `kernels.sparse.select`."""
_SIDE = gl.constexpr(4)
"""Scores of a thread that lie side by side."""
_LINE = gl.constexpr(32 * 4)
"""Scores that a warp takes at once: a count of them fits into a byte."""
_FULL = gl.constexpr(255)
"""Flags that a byte can count."""
_LOWEST = gl.constexpr(float("-inf"))
_SIXTEEN = gl.constexpr(0xFFFF)


@gluon.constexpr_function
def tile_layout(side, warps):
    """Layout of a tile [threads, side]: a thread has a line of it."""
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
def _places(SIDE: gl.constexpr, WARPS: gl.constexpr):
    """Return the places of the numbers of a tile: [threads, side]."""
    LAYOUT: gl.constexpr = tile_layout(SIDE, WARPS)
    thread = gl.arange(0, 32 * WARPS, gl.SliceLayout(1, LAYOUT))
    return thread[:, None] * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, LAYOUT))[None, :]


@gluon.constexpr_function
def lines_layout(warps):
    """Layout of a tile [warps, 128]: a warp has a line of it."""
    return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])


@gluon.jit
def _lines_at(stretch, step, SHAPE: gl.constexpr):
    """Return the places of the first of the lines that warps take in a step: [warps, 128]. Warps have `stretch` steps
    each."""
    WARPS: gl.constexpr = SHAPE.warps
    LAYOUT: gl.constexpr = lines_layout(WARPS)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, _LINE, gl.SliceLayout(0, LAYOUT))
    return ((warp * stretch + step) * (_LINE * SHAPE.rows))[:, None] + column[None, :]


@gluon.jit
def _scores_at(mine, stretch, step, end, SHAPE: gl.constexpr):
    """The scores of a step, a tile [warps, 128] for every row; -inf at and behind `end`, a multiple of 16."""
    ROWS: gl.constexpr = SHAPE.rows
    at = _lines_at(stretch, step, SHAPE)
    tiles = ()
    for i in gl.static_range(ROWS):
        place = at + i * _LINE
        tiles = tiles + (gl.load(mine + place, mask=place < end, other=_LOWEST, cache_modifier=".cg"),)
    return tiles


@gluon.jit
def _block_at(mine, first, end, SHAPE: gl.constexpr):
    """Keys of the scores from `first` on, a tile [threads, 4] for every row; 0 at and behind `end`."""
    ROWS: gl.constexpr = SHAPE.rows
    keys = ()
    for i in gl.static_range(ROWS):
        at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
        score = gl.load(mine + at, mask=at < end, other=0.0, cache_modifier=".cg")
        keys = keys + (gl.where(at < end, key_of(score), 0).to(gl.uint32),)
    return keys


@gluon.jit
def _larger(tiles, others, TILES: gl.constexpr):
    """The larger score of each two; NaN is above all."""
    larger = ()
    for i in gl.static_range(TILES):
        larger = larger + (gl.maximum(tiles[i], others[i], propagate_nan=_NAN_IS_LARGER),)
    return larger


@gluon.jit
def _reaching(tiles, number, TILES: gl.constexpr):
    """Count the keys of some tiles that reach a number."""
    count = (tiles[0] >= number).to(gl.int32)
    for i in gl.static_range(1, TILES):
        count += (tiles[i] >= number).to(gl.int32)
    return _total(count)


@gluon.jit
def _least_of(tiles, SELECTED: gl.constexpr, SLACK: gl.constexpr, GUESSES: gl.constexpr, TILES: gl.constexpr):
    """Variant of `kernels.sparse.select.least_of` for the keys of some tiles."""
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
def _flags(tiles, threshold, SHAPE: gl.constexpr):
    """1 for every candidate of a step's rows, in a byte for each row. NaN is not below the threshold."""
    ROWS: gl.constexpr = SHAPE.rows
    flags = ((tiles[0] < threshold) == 0).to(gl.int32)
    for i in gl.static_range(1, ROWS):
        flags += ((tiles[i] < threshold) == 0).to(gl.int32) << (8 * i)
    return flags


@gluon.jit
def _total_of_bytes(x):
    return (x & 0xFF) + (x >> 8 & 0xFF) + (x >> 16 & 0xFF) + (x >> 24 & 0xFF)


@gluon.jit
def _counts(mine, stretch, end, threshold, SHAPE: gl.constexpr):
    """Count the candidates of each warp."""
    WARPS: gl.constexpr = SHAPE.warps
    block = _scores_at(mine, stretch, 0, end, SHAPE)
    count = gl.zeros([WARPS, _LINE], gl.int32, lines_layout(WARPS))
    bytes = count
    for step in range(stretch):
        following = _scores_at(mine, stretch, step + 1, gl.where(step + 1 < stretch, end, 0), SHAPE)
        bytes += _flags(block, threshold, SHAPE)
        if step % _FULL == _FULL - 1:
            count += _total_of_bytes(bytes)
            bytes = gl.zeros_like(bytes)
        block = following
    return gl.sum(count + _total_of_bytes(bytes), 1)


@gluon.jit
def _before_warps(count, WARPS: gl.constexpr):
    """The sum of the counts of the warps before each."""
    SQUARE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0])
    row = gl.arange(0, WARPS, gl.SliceLayout(1, SQUARE))
    column = gl.arange(0, WARPS, gl.SliceLayout(0, SQUARE))
    of_column = gl.convert_layout(count, gl.SliceLayout(0, SQUARE))
    before = gl.sum(gl.where(column[None, :] < row[:, None], of_column[None, :], 0), 1)
    return gl.convert_layout(before, count.type.layout)


@gluon.jit
def _keep(mine, stretch, end, threshold, before, scores, SHAPE: gl.constexpr):
    """Write the candidates, and SHAPE.lanes behind each its position."""
    ROWS: gl.constexpr = SHAPE.rows
    block = _scores_at(mine, stretch, 0, end, SHAPE)
    for step in range(stretch):
        following = _scores_at(mine, stretch, step + 1, gl.where(step + 1 < stretch, end, 0), SHAPE)
        flags = _flags(block, threshold, SHAPE)
        with_own = gl.associative_scan(flags, 1, _add)
        totals = gl.sum(flags, 1)
        at = _lines_at(stretch, step, SHAPE)
        for i in gl.static_range(ROWS):
            own = flags >> (8 * i) & 0xFF
            to = scores + (before[:, None] + (with_own >> (8 * i) & 0xFF) - own)
            gl.store(to, block[i], mask=own != 0)
            gl.store((to + SHAPE.lanes).to(gl.pointer_type(gl.int32), bitcast=True), at + i * _LINE, mask=own != 0)
            before += totals >> (8 * i) & 0xFF
        block = following


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
    """Count the keys of all scores that reach a number."""
    ROWS: gl.constexpr = SHAPE.rows
    count = seen * 0
    for first in range(0, seen, 32 * SHAPE.warps * _SIDE * ROWS):
        count += _reaching(_block_at(mine, first, seen, SHAPE), number, ROWS)
    return count


@gluon.jit
def _list_of_all(out, mine, seen, SELECTED: gl.constexpr, SHAPE: gl.constexpr):
    """Select from all scores."""
    ROWS: gl.constexpr = SHAPE.rows
    low = (seen * 0).to(gl.uint32)
    top = low + _NAN + 1  # too few reach it
    while top - low > 1:
        middle = low + (top - low) // 2
        enough = _reaching_of_all(mine, seen, middle, SHAPE) >= SELECTED
        low = gl.where(enough, middle, low)
        top = gl.where(enough, top, middle)
    place = seen * 0
    left = SELECTED - _reaching_of_all(mine, seen, low + 1, SHAPE)
    for first in range(0, seen, 32 * SHAPE.warps * _SIDE * ROWS):
        tiles = _block_at(mine, first, seen, SHAPE)
        for i in gl.static_range(ROWS):
            at = first + i * (32 * SHAPE.warps * _SIDE) + _places(_SIDE, SHAPE.warps)
            place, left = _list(out, tiles[i], at, low, place, left, SHAPE.warps)


@gluon.jit(do_not_specialize=["scores", "score_stride"], do_not_specialize_on_alignment=["bound", "fault"])
def select_whole(
    score, bound, candidate, selected, fault, scores, score_stride, SELECTED: gl.constexpr, SHAPE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):  # fmt: skip
    """Programs of one token. `candidate`: room for SHAPE.lanes scores and as many positions a token, SHAPE being a
    `kernels.sparse.workspace.Whole`. `score_stride` is in lines of 16 scores, so that the compiler knows how they
    lie."""
    if DEPENDENT:
        wait_for_kernel_before()
        let_kernel_after_start()
    ROWS: gl.constexpr = SHAPE.rows
    EACH: gl.constexpr = SHAPE.lanes // (32 * SHAPE.warps)
    token = gl.program_id(0).to(gl.int64)
    sees = gl.load(bound + token, cache_modifier=".cg")
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
        # Rows of scores are whole pages wide: up to the next multiple of 16 there is memory, and loads can be wide.
        # What it holds means nothing.
        end = (sees + 15) // 16 * 16
        behind = sees + gl.arange(0, 32, gl.BlockedLayout([1], [32], [SHAPE.warps], [0]))
        gl.store(mine + behind, gl.zeros_like(behind).to(gl.float32) + _LOWEST, mask=behind < end)
        gl.thread_barrier()
        span = SHAPE.warps * _LINE * SHAPE.rows
        stretch = (sees + span - 1) // span
        top = _scores_at(mine, stretch, 0, end, SHAPE)
        block = _scores_at(mine, stretch, 1, gl.where(stretch > 1, end, 0), SHAPE)
        for step in range(2, stretch + 1):
            following = _scores_at(mine, stretch, step, gl.where(step < stretch, end, 0), SHAPE)
            top = _larger(top, block, ROWS)
            block = following
        tops = ()
        for i in gl.static_range(ROWS):
            tops = tops + (key_of(top[i]),)
        threshold = score_of(_least_of(tops, SELECTED, SELECTED // 8, _GUESSES, ROWS))
        candidates = candidate + token * (2 * SHAPE.lanes)
        count = _counts(mine, stretch, end, threshold, SHAPE)
        kept = gl.sum(count, 0)
        # Not where what is behind the end would be among them.
        if (kept <= SHAPE.lanes) & (threshold > _LOWEST):
            _keep(mine, stretch, end, threshold, _before_warps(count, SHAPE.warps), candidates, SHAPE)
            gl.thread_barrier()
            lane = _places(EACH, SHAPE.warps)
            own = gl.load(candidates + lane, mask=lane < kept, other=0.0, cache_modifier=".cg")
            positions = (candidates + SHAPE.lanes).to(gl.pointer_type(gl.int32), bitcast=True)
            at = gl.load(positions + lane, mask=lane < kept, other=0, cache_modifier=".cg")
            key = key_of(own)
            key = gl.where(lane < kept, key, 0).to(gl.uint32)
            least = _least_of((key,), SELECTED, 0, 0, 1)
            left = SELECTED - _reaching((key,), least + 1, 1)
            _list(out, key, at, least, kept * 0, left, SHAPE.warps)
        else:
            _list_of_all(out, mine, sees, SELECTED, SHAPE)
