"""The choice of experts for a few tokens, and the list of all that were chosen, in Gluon: one program, some tokens per
warp.

A warp holds all experts of its tokens, so the best of them is found by one instruction (`redux.sync`, of 32-bit
integers that are ordered like the scores), and nothing but who was chosen passes between warps: once, a bit an expert.

Equal scores are rare: of several equally good the rounds find all at once. Whether that was so is seen afterwards, in
the word that passes between the warps anyway, and then the choice is made again, with the lower number first.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.gluon.dependent import let_kernel_after_start, wait_for_kernel_before

_NONE = gl.constexpr(-(2**31))
"""Integer below those by which any score is ordered: of experts already chosen, and of lanes that are no expert."""
_CLOSED = gl.constexpr(float("-inf"))
_INFINITELY_LOW = gl.constexpr(-0x7F800001)
"""Integer by which -inf is ordered."""
_AGAIN = gl.constexpr(-(2**31))
"""The bit of a lane's word that says that a token's scores were equal."""
_APART = gl.constexpr(2**-15)
"""Logits at most _SPAN below a token's highest, or the lower one further below, that lie so far apart have scores in
the same order. Those, exp(logit - highest) / sum, have relative errors of at most 1.8 * 2^-18 each: the difference is
rounded by 2^-19, its product with log2(e) by 2^-18, that constant costs 2^-19, exp2 and the division 2^-22. So two of
them together are wrong by less than half of what lies between them."""
_SPAN = gl.constexpr(64.0)


@gluon.jit
def _order(score):
    """int32 that orders by score. NaN is the greatest or the least."""
    bits = score.to(gl.int32, bitcast=True)
    return gl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE + 1)


@gluon.jit
def _score(order):
    """Invert `_order`: the score that such an integer stands for."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _bits(word):
    """Count the bits that are set. (Written with shifts the compiler knows it in some places only.)"""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [word], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _places(order, CHOSEN: gl.constexpr):
    """Place of each expert among the best of its token, -1 of the others, and what the best are ordered by. Equals have
    one place."""
    place = gl.zeros_like(order) - 1
    bests = ()
    for k in gl.static_range(CHOSEN):
        best = gl.max(order, 1)
        bests = bests + (best,)
        found = order == best[:, None]
        place = gl.where(found, k, place)
        order = gl.where(found, _NONE, order)
    return place, bests


@gluon.jit
def _exact_places(order, lane, CHOSEN: gl.constexpr):
    """Place of each expert among the best of its token, equal ones by their number; -1 of the others."""
    place = gl.zeros_like(order) - 1
    for k in range(CHOSEN):
        found = order == gl.max(order, 1)[:, None]
        # Lanes that are no expert have numbers, too.
        found = found & (lane[None, :] == gl.min(gl.where(found, lane[None, :], 0x7FFFFFFF), 1)[:, None])
        place = gl.where(found, k, place)
        order = gl.where(found, _NONE, order)
    return place


@gluon.jit
def _open(order, WARPS: gl.constexpr, TOKENS: gl.constexpr, GROUPS: gl.constexpr, GROUP_BLOCK: gl.constexpr,
    MEMBER_BLOCK: gl.constexpr, TOP_GROUPS: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    """Find the experts of the best groups. Groups are ranked by their best expert, or with a bias by their two best."""
    HELD: gl.constexpr = GROUP_BLOCK * MEMBER_BLOCK // 32
    threads: gl.constexpr = [1, GROUP_BLOCK, 32 // GROUP_BLOCK]
    tile: gl.constexpr = gl.BlockedLayout([1, HELD], [1, 32], [WARPS, 1], [1, 0])
    members: gl.constexpr = gl.BlockedLayout([1, 1, HELD], threads, [WARPS, 1, 1], [2, 1, 0])
    pairs: gl.constexpr = gl.BlockedLayout([1, 1, GROUP_BLOCK], threads, [WARPS, 1, 1], [2, 1, 0])
    order = gl.reshape(order, [TOKENS, GROUP_BLOCK, MEMBER_BLOCK])
    order = gl.convert_layout(order, members, assert_trivial=True)
    best = gl.max(order, 2)
    rank = _score(best)
    if BIASED:
        first = order == best[:, :, None]
        second = gl.max(gl.where(first, _NONE, order), 2)
        # Counted in fp32: of integers the compiler makes a population count, whose bits it gathers on the stack.
        second = gl.where(gl.sum(first.to(gl.float32), 2) > 1, best, second)
        rank += gl.where(second != _NONE, _score(second), 0.0)
    g = gl.arange(0, GROUP_BLOCK, gl.SliceLayout(0, gl.SliceLayout(2, members)))
    rank = gl.where((g < GROUPS)[None, :], _order(rank), _NONE)
    mine = gl.convert_layout(rank, gl.SliceLayout(2, pairs), assert_trivial=True)
    others = gl.convert_layout(rank, gl.SliceLayout(1, pairs))
    g = gl.arange(0, GROUP_BLOCK, gl.SliceLayout(1, gl.SliceLayout(0, pairs)))
    h = gl.arange(0, GROUP_BLOCK, gl.SliceLayout(0, gl.SliceLayout(0, pairs)))
    earlier = (h[None, :] < g[:, None])[None, :, :]
    before = (others[:, None, :] > mine[:, :, None]) | ((others[:, None, :] == mine[:, :, None]) & earlier)
    better = gl.reduce_or(gl.where(before, (1 << h)[None, :][None, :, :], 0), 2)
    best = gl.convert_layout((_bits(better) < TOP_GROUPS).to(gl.int32), gl.SliceLayout(2, members), assert_trivial=True)
    best = (best[:, :, None] + gl.zeros_like(order)) > 0
    return gl.convert_layout(gl.reshape(best, [TOKENS, GROUP_BLOCK * MEMBER_BLOCK]), tile, assert_trivial=True)


@gluon.jit
def _together(word_s, place, alive, again, WARPS: gl.constexpr, TOKENS: gl.constexpr, HELD: gl.constexpr):
    """int32 [32]: of each lane its experts that any living token chose, a bit each; and _AGAIN, if any is so."""
    tile: gl.constexpr = gl.BlockedLayout([1, 1, HELD], [1, 32, 1], [WARPS, 1, 1], [2, 1, 0])
    parts: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 32], [1, WARPS, 1], [2, 1, 0])
    union: gl.constexpr = gl.BlockedLayout([WARPS, 1], [1, 32], [1, WARPS], [1, 0])
    place = gl.convert_layout(gl.reshape(place, [TOKENS, 32, HELD]), tile, assert_trivial=True)
    bit = 1 << gl.arange(0, HELD, gl.SliceLayout(0, gl.SliceLayout(1, tile)))
    word = gl.reduce_or(gl.where(place >= 0, bit[None, None, :], 0), 2)
    word |= gl.convert_layout(gl.where(again, _AGAIN, 0), gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None]
    word = gl.where(gl.convert_layout(alive, gl.SliceLayout(1, gl.SliceLayout(2, tile)))[:, None], word, 0)
    word = gl.reshape(word, [TOKENS // WARPS, WARPS, 32])
    word = gl.reduce_or(gl.convert_layout(word, parts, assert_trivial=True), 0)
    if WARPS == 1:
        word = gl.convert_layout(word, union, assert_trivial=True)
    else:
        word_s.store(word)
        gl.thread_barrier()
        word = word_s.load(union)
    return gl.reduce_or(word, 0)


@gluon.jit
def _store(place_out, weight_out, place, score, scale, alive, t, expert, inside, EXPERTS: gl.constexpr,
    CHOSEN: gl.constexpr, NORMALIZE: gl.constexpr,
):  # fmt: skip
    """Places and weights of every token."""
    weight = score
    if NORMALIZE:
        weight = weight / (gl.sum(gl.where(place >= 0, score, 0.0), 1)[:, None] + 1e-20)
    place = gl.where(alive[:, None], place, -1)
    gl.store(place_out + t[:, None] * EXPERTS + expert[None, :], place, mask=inside)
    gl.store(weight_out + t[:, None] * CHOSEN + place, weight * scale, mask=inside & (place >= 0))


@gluon.jit(do_not_specialize=["tokens", "row_share", "slots", "scale"])
def choose(
    logit, bias, length, place_out, weight_out, slot_out, tokens, row_share, slots, scale,
    EXPERTS: gl.constexpr, GROUPS: gl.constexpr, GROUP_BLOCK: gl.constexpr, MEMBER_BLOCK: gl.constexpr,
    TOP_GROUPS: gl.constexpr, CHOSEN: gl.constexpr, TOKENS: gl.constexpr, WARPS: gl.constexpr, SOFTMAX: gl.constexpr,
    BIASED: gl.constexpr, NORMALIZE: gl.constexpr, DEPENDENT: gl.constexpr,
):  # fmt: skip
    """One program for all tokens: every token's choice, then the list of the experts that anyone chose."""
    MEMBERS: gl.constexpr = EXPERTS // GROUPS
    LANES: gl.constexpr = GROUP_BLOCK * MEMBER_BLOCK
    HELD: gl.constexpr = LANES // 32
    EARLY: gl.constexpr = SOFTMAX and GROUPS == 1 and not BIASED
    tile: gl.constexpr = gl.BlockedLayout([1, HELD], [1, 32], [WARPS, 1], [1, 0])
    t = gl.arange(0, TOKENS, gl.SliceLayout(1, tile))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, tile))
    group = lane // MEMBER_BLOCK
    expert = group * MEMBERS + lane % MEMBER_BLOCK
    exists = (group < GROUPS) & (lane % MEMBER_BLOCK < MEMBERS)
    inside = (t < tokens)[:, None] & exists[None, :]
    row = (t * row_share) >> 16  # a quotient would take longer than the loads for which the row is needed
    # From the start, lest other values use the same memory.
    word_s = gl.allocate_shared_memory(gl.int32, [2, WARPS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    if BIASED:
        shift = gl.load(bias + expert, mask=exists, other=0.0)
    if DEPENDENT:
        let_kernel_after_start()
        wait_for_kernel_before()
    x = gl.load(logit + t[:, None] * EXPERTS + expert[None, :], mask=inside, other=_CLOSED, cache_modifier=".cg")
    alive = gl.load(length + row, mask=t < tokens, other=0, cache_modifier=".cg") > 0
    # Of padding they are all the same; asked here, as ptxas else reads `length` only when the logits are there.
    x = gl.where(alive[:, None], x, 0.0)
    if EARLY:
        # Where logits lie apart, their order is that of the scores, and is known before these are.
        order = gl.where(exists[None, :], _order(x), _NONE)
        place, bests = _places(order, CHOSEN)
        top = _score(bests[0])
        power = gl.exp(x - top[:, None])
        score = power / gl.sum(power, 1)[:, None]
        order = gl.where(exists[None, :], _order(score), _NONE)
        last = _score(bests[CHOSEN - 1])
        apart = gl.zeros_like(top) + _SPAN
        for k in gl.static_range(1, CHOSEN):
            apart = gl.minimum(apart, _score(bests[k - 1]) - _score(bests[k]))
        right = (top - last <= _SPAN) & (apart >= _APART)  # the former of finite ones only
        behind = (x <= (last - _APART)[:, None]) | (~exists)[None, :]
        places = gl.sum(gl.where((place >= 0) | behind, place, LANES), 1)
    else:
        if SOFTMAX:
            power = gl.exp(x - _score(gl.max(_order(x), 1))[:, None])
            score = power / gl.sum(power, 1)[:, None]
        else:
            score = 1 / (1 + gl.exp(-x))
        choice = score
        if BIASED:
            choice += shift[None, :]
        order = gl.where(exists[None, :], _order(choice), _NONE)
        if GROUPS > 1:
            opened = _open(order, WARPS, TOKENS, GROUPS, GROUP_BLOCK, MEMBER_BLOCK, TOP_GROUPS, BIASED)
            # Experts of closed groups stay eligible behind all others, as scores of -inf would be.
            order = gl.where(opened | (order == _NONE), order, _INFINITELY_LOW)
        place, bests = _places(order, CHOSEN)
        right = bests[CHOSEN - 1] != _NONE
        places = gl.sum(place, 1)
    # Less it cannot be, and it is more where a place was taken twice.
    right = right & (places == CHOSEN * (CHOSEN - 1) // 2 - (LANES - CHOSEN))
    wanted = _together(word_s.index(0), place, alive, ~right, WARPS, TOKENS, HELD)
    _store(
        place_out, weight_out, place, score, scale, alive, t, expert, inside, EXPERTS, CHOSEN, NORMALIZE
    )  # fmt: skip
    _list(slot_out, wanted, slots, EXPERTS, GROUPS, MEMBER_BLOCK, WARPS, HELD)
    if gl.min(wanted, 0) < 0:
        gl.thread_barrier()  # what was stored is overwritten
        place = _exact_places(order, lane, CHOSEN)
        wanted = _together(word_s.index(1), place, alive, t < 0, WARPS, TOKENS, HELD)
        _store(
            place_out, weight_out, place, score, scale, alive, t, expert, inside, EXPERTS, CHOSEN, NORMALIZE
        )  # fmt: skip
        _list(slot_out, wanted, slots, EXPERTS, GROUPS, MEMBER_BLOCK, WARPS, HELD)


@gluon.jit
def _list(slot_out, wanted, slots, EXPERTS: gl.constexpr, GROUPS: gl.constexpr, MEMBER_BLOCK: gl.constexpr,
    WARPS: gl.constexpr, HELD: gl.constexpr,
):  # fmt: skip
    """The experts of the bits of `wanted`, then -1, last how many they are."""
    wanted = wanted & ~_AGAIN
    experts: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [1, 0])
    thread = gl.arange(0, 32, gl.SliceLayout(1, experts))
    wanted = gl.convert_layout(wanted, gl.SliceLayout(1, experts), assert_trivial=True)
    # How many the threads before have, and all: digit for digit, one instruction gathers a digit of all threads.
    mine = _bits(wanted)
    before = gl.zeros_like(mine)
    total = 0
    for digit in gl.static_range(HELD.bit_length()):
        digits = gl.reduce_or(((mine >> digit) & 1) << thread, 0)
        before += _bits(digits & ((1 << thread) - 1)) << digit
        total += _bits(digits) << digit
    held = gl.arange(0, HELD, gl.SliceLayout(0, experts))
    lane = thread[:, None] * HELD + held[None, :]
    chosen = ((wanted[:, None] >> held[None, :]) & 1) > 0
    position = before[:, None] + _bits(wanted[:, None] & ((1 << held) - 1)[None, :])
    at = gl.where(chosen, position, total + lane - position)
    expert = lane // MEMBER_BLOCK * (EXPERTS // GROUPS) + lane % MEMBER_BLOCK
    gl.store(slot_out + at, gl.where(chosen, expert, -1), mask=at < slots)
    gl.store(slot_out + slots, total)
