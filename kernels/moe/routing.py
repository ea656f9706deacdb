"""Choice of experts in Triton: one program per token, every comparison on integers that are ordered like the scores.

Among 32 lanes the greatest of 32-bit integers is found by one instruction, that of floats or of 64 bits by five steps
of shuffles.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_NONE = tl.constexpr(-(2**31))
"""Integer below those by which any score is ordered: of experts already chosen, and of lanes that are no expert."""
_CLOSED = tl.constexpr(float("-inf"))


@triton.jit
def _order(score):
    """int32 that orders by score. NaN is the greatest or the least."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.maximum(bits ^ ((bits >> 31) & 0x7FFFFFFF), _NONE + 1)


@triton.jit
def _score(order):
    """Invert the order: the score that such an integer stands for."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _softplus(x):
    """log(1 + exp(x)), to a few units in the last place however small; from 20 on x itself. NaN stays NaN."""
    power = tl.exp(tl.where(x > 20, 0.0, x))
    more = 1 + power
    # What the sum has lost is in the quotient (Kahan).
    small = tl.where(more == 1, power, tl.log(more) * (power / (more - 1)))
    return tl.where(x > 20, x, small)


@triton.jit
def _places(order, expert, CHOSEN: tl.constexpr):
    """Place of each expert among the best, equal ones by their number; of the others at least CHOSEN."""
    place = tl.full(order.shape, CHOSEN, tl.int32)
    best = _NONE
    left = order
    for k in tl.static_range(CHOSEN):
        best = tl.max(left)
        found = left == best
        place = tl.where(found, k, place)
        left = tl.where(found, _NONE, left)
    if (best == _NONE) | (tl.sum((place < CHOSEN).to(tl.int32)) != CHOSEN):
        # Some round found several.
        place = tl.full(order.shape, CHOSEN, tl.int32)
        left = order
        for k in tl.static_range(CHOSEN):
            found = left == tl.max(left)
            # Lanes that are no expert have numbers, too.
            found &= expert == tl.min(tl.where(found, expert, 0x7FFFFFFF))
            place = tl.where(found, k, place)
            left = tl.where(found, _NONE, left)
    return place


@triton.jit(do_not_specialize=["row_tokens"])
def route(
    logit,
    bias,
    live,
    given,
    given_row,
    id_out,
    weight_out,
    row_tokens,
    scale,
    LOGIT_STRIDE: tl.constexpr,
    PART_STRIDE: tl.constexpr,
    PARTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOSEN_BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SCORING: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLOSED_AT_ZERO: tl.constexpr,
    LIVE: tl.constexpr,
    GIVEN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scores lie in a tile [group, member]; both sides are padded to powers of two. GIVEN: a token's experts are
    those in row `given_row` of the table `given`."""
    token = tl.program_id(0).to(tl.int64)
    members: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)
    member = tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * members + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < members)[None, :]
    row = token // row_tokens
    if BIASED:
        shift = tl.load(bias + expert, mask=exists, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if GIVEN:
        named_at = given + tl.load(given_row + token, cache_modifier=".cg") * CHOSEN
    alive = token >= 0
    if LIVE:
        alive = tl.load(live + row) > 0
    at = logit + token * LOGIT_STRIDE + expert
    x = tl.load(at, mask=exists, other=_CLOSED, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * PART_STRIDE, mask=exists, other=0.0, cache_modifier=".cg")
    if LIVE:
        x += tl.where(alive, 0.0, 1.0)  # of padding it is all the same; ptxas would read `live` behind the logits
    if SCORING == "softmax":
        power = tl.exp(x - _score(tl.max(_order(x))))
        score = power / tl.sum(power)
    elif SCORING == "sqrt_softplus":
        score = tl.sqrt_rn(_softplus(x))
    else:
        score = tl.sigmoid(x)
    choice = score
    if BIASED:
        choice += shift

    if GROUPS > 1:
        order = tl.where(exists, _order(choice), _NONE)
        best = tl.max(order, 1)
        rank = _score(best)
        if BIASED:  # the two best count
            first = order == best[:, None]
            second = tl.max(tl.where(first, _NONE, order), 1)
            second = tl.where(tl.sum(first.to(tl.int32), 1) > 1, best, second)
            rank += tl.where(second != _NONE, _score(second), 0.0)
        order = tl.where(group < GROUPS, _order(rank), _NONE)
        mine = tl.reshape(order, [GROUP_BLOCK, 1])
        others = tl.reshape(order, [1, GROUP_BLOCK])
        before = (others > mine) | ((others == mine) & (group[None, :] < group[:, None]))
        closed = 0.0 if CLOSED_AT_ZERO else _CLOSED
        choice = tl.where((tl.sum(before.to(tl.int32), 1) < TOP_GROUPS)[:, None], choice, closed)

    weight = score
    if GIVEN:
        # Who is nobody's expert, or has been named before, stays -1.
        k = tl.arange(0, CHOSEN_BLOCK)
        tl.store(id_out + token * COLUMNS + k, tl.full([CHOSEN_BLOCK], -1, tl.int64), mask=k < CHOSEN)
        tl.store(weight_out + token * COLUMNS + k, tl.zeros([CHOSEN_BLOCK], tl.float32), mask=k < CHOSEN)
        tl.debug_barrier()
        place = tl.full(expert.shape, CHOSEN, tl.int32)
        times = tl.zeros(expert.shape, tl.float32)
        for behind in tl.static_range(CHOSEN):
            named = expert == tl.load(named_at + CHOSEN - 1 - behind)
            place = tl.where(exists & named, CHOSEN - 1 - behind, place)
            times += tl.where(named, 1.0, 0.0)
        weight *= times
    else:
        place = _places(tl.where(exists, _order(choice), _NONE), expert, CHOSEN)
    chosen = place < CHOSEN
    if NORMALIZE:
        weight = weight / (tl.sum(tl.where(chosen, weight, 0.0)) + 1e-20)
    weight *= scale

    at = token * COLUMNS + place
    tl.store(id_out + at, tl.where(alive, expert, -1).to(tl.int64), mask=chosen)
    tl.store(weight_out + at, tl.where(alive, weight, 0.0), mask=chosen)
    for s in tl.static_range(SHARED):
        last = token * COLUMNS + CHOSEN + s
        tl.store(id_out + last, tl.where(alive, EXPERTS + s, -1).to(tl.int64))
        tl.store(weight_out + last, tl.where(alive, 1.0, 0.0))
