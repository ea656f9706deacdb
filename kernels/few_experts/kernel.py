"""Router and choice of experts of a few tokens, in Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_TAKEN = tl.constexpr(-(2**63))
"""Below every key: of experts already chosen, and of lanes that are no expert."""
_CLOSED = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["tokens", "eps"])
def router(
    x,
    square,
    weight,
    logit,
    tokens,
    eps,
    X_STRIDE: tl.constexpr,
    EXPERTS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Logits of ROWS experts for every token, in fp32 on plain cores; each row of x still lacks its inverse RMS.

    GROUP tokens are asked for before any is summed: sums between warps are barriers, which loads do not pass.
    """
    first = tl.program_id(0) * ROWS
    k = tl.arange(0, BLOCK)
    inside = k < FEATURES
    p = tl.arange(0, PIECE_BLOCK)
    if DEPENDENT:
        gdc_launch_dependents()
    rows = ()
    for r in tl.static_range(ROWS):
        row = tl.minimum(first + r, EXPERTS - 1)
        rows = rows + (tl.load(weight + row * FEATURES + k, mask=inside, other=0.0),)  # noqa: RUF005
    if DEPENDENT:
        gdc_wait()
    for begin in tl.static_range(0, TOKENS, GROUP):
        vectors = ()
        pieces = ()
        for t in tl.static_range(begin, min(begin + GROUP, TOKENS)):
            live = t < tokens
            a = tl.load(x + t * X_STRIDE + k, mask=inside & live, other=0.0, cache_modifier=".cg")
            piece = tl.load(square + t * PIECES + p, mask=(p < PIECES) & live, other=0.0, cache_modifier=".cg")
            vectors = vectors + (a,)  # noqa: RUF005
            pieces = pieces + (piece,)  # noqa: RUF005
        for t in tl.static_range(begin, min(begin + GROUP, TOKENS)):
            scale = tl.rsqrt(tl.sum(pieces[t - begin], 0) / FEATURES + eps)
            for r in tl.static_range(ROWS):
                y = tl.sum(rows[r].to(tl.float32) * vectors[t - begin].to(tl.float32), 0) * scale
                tl.store(logit + t * EXPERTS + first + r, y, mask=(t < tokens) & (first + r < EXPERTS))


@triton.jit
def _key(score, index):
    """int64 that orders by score, and equal scores by the lower index first."""
    bits = score.to(tl.int32, bitcast=True)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(tl.int64) << 32) + (0x7FFFFFFF - index)


@triton.jit(do_not_specialize=["tokens", "row_tokens", "slots", "scale"])
def choose(
    logit,
    bias,
    length,
    place_out,
    weight_out,
    slot_out,
    tokens,
    row_tokens,
    slots,
    scale,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    MEMBER_BLOCK: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    CHOSEN: tl.constexpr,
    SLOT_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    SOFTMAX: tl.constexpr,
    BIASED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One program for all tokens: every token's choice, then the list of the experts that anyone chose."""
    MEMBERS: tl.constexpr = EXPERTS // GROUPS
    LANES: tl.constexpr = GROUP_BLOCK * MEMBER_BLOCK
    lane = tl.arange(0, LANES)
    t = tl.arange(0, TOKENS)
    expert = lane // MEMBER_BLOCK * MEMBERS + lane % MEMBER_BLOCK
    exists = (lane // MEMBER_BLOCK < GROUPS) & (lane % MEMBER_BLOCK < MEMBERS)
    if BIASED:
        shift = tl.load(bias + expert, mask=exists, other=0.0)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    alive = (t < tokens) & (tl.load(length + t // row_tokens, mask=t < tokens, other=0) > 0)
    mask = (t < tokens)[:, None] & exists[None, :]
    x = tl.load(logit + t[:, None] * EXPERTS + expert[None, :], mask=mask, other=_CLOSED, cache_modifier=".cg")
    x = tl.where((t < tokens)[:, None], x, 0.0)
    if SOFTMAX:
        power = tl.exp(x - tl.max(x, 1)[:, None])
        score = power / tl.sum(power, 1)[:, None]
    else:
        score = tl.sigmoid(x)
    choice = score
    if BIASED:
        choice += shift[None, :]
    key = tl.where(exists[None, :], _key(choice, expert[None, :]), _TAKEN)

    if GROUPS > 1:
        group = tl.arange(0, GROUP_BLOCK)
        member_key = tl.reshape(key, [TOKENS, GROUP_BLOCK, MEMBER_BLOCK])
        member_choice = tl.reshape(choice, [TOKENS, GROUP_BLOCK, MEMBER_BLOCK])
        first = member_key == tl.max(member_key, 2)[:, :, None]
        rank = tl.sum(tl.where(first, member_choice, 0.0), 2)
        if BIASED:  # the two best count
            rest = tl.where(first, _TAKEN, member_key)
            second = (rest == tl.max(rest, 2)[:, :, None]) & (rest != _TAKEN)
            rank += tl.sum(tl.where(second, member_choice, 0.0), 2)
        order = tl.where((group < GROUPS)[None, :], _key(rank, group[None, :]), _TAKEN)
        # Counted in fp32: of integers the compiler makes a population count, whose bits it gathers on the stack.
        better = tl.sum((order[:, None, :] > order[:, :, None]).to(tl.float32), 2)
        open_group = (better < TOP_GROUPS)[:, :, None] & (member_key != _TAKEN)
        # Experts of closed groups stay eligible behind all others, as scores of -inf would be.
        closed = tl.reshape(_key(tl.full([LANES], _CLOSED, tl.float32), expert), [1, GROUP_BLOCK, MEMBER_BLOCK])
        member_key = tl.where(open_group | (member_key == _TAKEN), member_key, closed)
        key = tl.reshape(member_key, [TOKENS, LANES])

    place = tl.full([TOKENS, LANES], -1, tl.int32)
    for k in tl.static_range(CHOSEN):
        found = key == tl.max(key, 1)[:, None]
        place = tl.where(found, k, place)
        key = tl.where(found, _TAKEN, key)
    weight = score
    if NORMALIZE:
        weight = weight / (tl.sum(tl.where(place >= 0, score, 0.0), 1)[:, None] + 1e-20)
    place = tl.where(alive[:, None], place, -1)
    tl.store(place_out + t[:, None] * EXPERTS + expert[None, :], place, mask=mask)
    tl.store(weight_out + t[:, None] * CHOSEN + place, weight * scale, mask=mask & (place >= 0))
    wanted = tl.max((place >= 0).to(tl.int32), 0)
    position = tl.cumsum(wanted, 0) - wanted
    count = tl.sum(wanted, 0)
    tl.store(slot_out + position, expert, mask=wanted > 0)
    s = tl.arange(0, SLOT_BLOCK)
    tl.store(slot_out + s, -1, mask=(s >= count) & (s < slots))
    tl.store(slot_out + slots, count)
