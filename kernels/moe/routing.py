"""Choice of experts in Triton: one program a token, every comparison on keys that no two experts share."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TAKEN = tl.constexpr(-(2**63))
"""Below every key: of experts already chosen, and of lanes that are no expert."""
_CLOSED = tl.constexpr(float("-inf"))


@triton.jit
def _key(score, index):
    """int64 that orders by score, and equal scores by the lower index first. NaN is the greatest or the least."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit(do_not_specialize=["row_tokens"])
def route(
    logit,
    bias,
    live,
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
    SHARED: tl.constexpr,
    COLUMNS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    LIVE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Scores lie in a tile [group, member]; both sides are padded to powers of two."""
    token = tl.program_id(0).to(tl.int64)
    members: tl.constexpr = EXPERTS // GROUPS
    group = tl.arange(0, GROUP_BLOCK)
    member = tl.arange(0, MEMBER_BLOCK)
    expert = group[:, None] * members + member[None, :]
    exists = (group < GROUPS)[:, None] & (member < members)[None, :]
    if BIASED:
        shift = tl.load(bias + expert, mask=exists, other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: the kernel after next may read what precedes this one
    at = logit + token * LOGIT_STRIDE + expert
    x = tl.load(at, mask=exists, other=_CLOSED, cache_modifier=".cg")
    for part in tl.static_range(1, PARTS):
        x += tl.load(at + part * PART_STRIDE, mask=exists, other=0.0, cache_modifier=".cg")
    if SOFTMAX:
        power = tl.exp(x - tl.max(x))
        score = power / tl.sum(power)
    else:
        score = tl.sigmoid(x)
    choice = score
    if BIASED:
        choice += shift

    if GROUPS > 1:
        key = tl.where(exists, _key(choice, expert), _TAKEN)
        best = tl.max(key, 1)
        first = key == best[:, None]
        rank = tl.sum(tl.where(first, choice, 0.0), 1)
        if BIASED:  # the two best count
            key = tl.where(first, _TAKEN, key)
            second = key == tl.max(key, 1)[:, None]
            rank += tl.sum(tl.where(second & (key != _TAKEN), choice, 0.0), 1)
        order = tl.where(group < GROUPS, _key(rank, group), _TAKEN)
        others = tl.reshape(order, [1, GROUP_BLOCK])
        better = tl.sum((others > tl.reshape(order, [GROUP_BLOCK, 1])).to(tl.int32), 1)
        choice = tl.where((better < TOP_GROUPS)[:, None], choice, _CLOSED)

    key = tl.where(exists, _key(choice, expert), _TAKEN)
    place = tl.full([GROUP_BLOCK, MEMBER_BLOCK], COLUMNS, tl.int32)
    for k in tl.static_range(CHOSEN):
        found = key == tl.max(key)
        place = tl.where(found, k, place)
        key = tl.where(found, _TAKEN, key)
    chosen = place < CHOSEN
    weight = score
    if NORMALIZE:
        weight = weight / (tl.sum(tl.where(chosen, score, 0.0)) + 1e-20)
    weight *= scale

    alive = token >= 0
    if LIVE:
        alive = tl.load(live + token // row_tokens) > 0
    at = token * COLUMNS + place
    tl.store(id_out + at, tl.where(alive, expert, -1).to(tl.int64), mask=chosen)
    tl.store(weight_out + at, tl.where(alive, weight, 0.0), mask=chosen)
    for s in tl.static_range(SHARED):
        last = token * COLUMNS + CHOSEN + s
        tl.store(id_out + last, tl.where(alive, EXPERTS + s, -1).to(tl.int64))
        tl.store(weight_out + last, tl.where(alive, 1.0, 0.0))
