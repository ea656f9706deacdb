"""The absorbed form in Triton: from the projections to the absorbed query and the cache entry, and from pieces of split
attention through W_UV to a head's output, one launch each."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_entry import store_entry
from kernels.mla_decode.schedule import CTA_FIELDS, ROW_FIELDS
from kernels.parts import sum_of_parts

_CTA = tl.constexpr(CTA_FIELDS)
_ROW = tl.constexpr(ROW_FIELDS)


@triton.jit
def _rotate(x, turn, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th (cos, sin) of `turn`, [BLOCK]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    cos, sin = tl.split(tl.reshape(turn, [1, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit
def _projected(at, mask, dtype: tl.constexpr, FROM: tl.constexpr):
    """Load the result of a product, or the sum of as many parts of it as FROM says."""
    PARTS: tl.constexpr = FROM.parts
    if PARTS:
        value = sum_of_parts(at, mask, FROM.part, PARTS).to(dtype)
    else:
        value = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
    return value


@triton.jit
def _write_entry(
    source, norm, turn, entry, exists, eps, FROM: tl.constexpr, FEATURES: tl.constexpr, ENTRY: tl.constexpr
):
    """A token's cache entry: the normed latent, then the rotated key."""
    LATENT: tl.constexpr = FEATURES.latent
    ROPE_BLOCK: tl.constexpr = FEATURES.rope_block
    dtype: tl.constexpr = norm.dtype.element_ty
    c = tl.arange(0, FEATURES.latent_block)
    inside = c < LATENT
    o = tl.arange(0, ROPE_BLOCK)
    roped = o < FEATURES.rope
    w = tl.load(norm + c, mask=inside, other=0.0).to(tl.float32)
    value = _projected(source + c, inside, dtype, FROM).to(tl.float32)
    key = _projected(source + LATENT + o, roped, dtype, FROM).to(tl.float32)
    normed = value * tl.rsqrt(tl.sum(value * value, 0) / LATENT + eps) * w
    turned = tl.reshape(_rotate(tl.reshape(key, [1, ROPE_BLOCK]), turn, 1, ROPE_BLOCK), [ROPE_BLOCK])
    store_entry(entry, normed.to(dtype), turned.to(dtype), exists, LATENT, FEATURES.rope, ENTRY)


@triton.jit
def _rope_heads(
    source,
    turn,
    target,
    first,
    BETWEEN: tl.constexpr,
    TO: tl.constexpr,
    GROUP: tl.constexpr,
    FROM: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Rotate the rope part of GROUP heads of one token. They lie BETWEEN elements apart, their results TO elements."""
    head = first + tl.arange(0, GROUP)
    o = tl.arange(0, FEATURES.rope_block)
    mask = (head < FEATURES.heads)[:, None] & (o < FEATURES.rope)[None, :]
    at = source + head[:, None] * BETWEEN + o[None, :]
    x = _projected(at, mask, target.dtype.element_ty, FROM).to(tl.float32)
    turned = _rotate(x, turn, GROUP, FEATURES.rope_block)
    at = target + head[:, None] * TO + o[None, :]
    tl.store(at, turned.to(target.dtype.element_ty), mask=mask, eviction_policy="evict_last")


@triton.jit
def _absorb(
    q,
    weight,
    weight_box,
    out,
    tokens,
    tiles,
    program,
    QUERY: tl.constexpr,
    WEIGHT: tl.constexpr,
    FEATURES: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """W_UK into a few tokens' queries of one head, for a few latent features. Weights are read before the wait."""
    HEADS: tl.constexpr = FEATURES.heads
    LATENT: tl.constexpr = FEATURES.latent
    COLUMNS: tl.constexpr = CUT.columns
    CHUNKS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    C: tl.constexpr = LATENT + FEATURES.rope
    # Tiles of tokens are neighbours, so that they share weights in L2.
    t = (program % tiles * CUT.tokens + tl.arange(0, CUT.tokens)).to(tl.int64)
    head = program // tiles // CHUNKS
    n = tl.arange(0, FEATURES.nope_block)
    c = program // tiles % CHUNKS * COLUMNS + tl.arange(0, COLUMNS)
    if CUT.boxed:
        tile = weight_box.load([head * (WEIGHT.head // WEIGHT.row), program // tiles % CHUNKS * COLUMNS])
    else:
        at = weight + head.to(tl.int64) * WEIGHT.head + n[:, None] * WEIGHT.row + c[None, :]
        tile = tl.load(at, mask=(n < FEATURES.nope)[:, None] & (c < LATENT)[None, :], other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    inside = (t < tokens)[:, None]
    source = q + t[:, None] * QUERY.token + head * QUERY.head + n[None, :]
    x = _projected(source, inside & (n < FEATURES.nope)[None, :], out.dtype.element_ty, QUERY)
    if QUERY.parts:
        # The other way round a few tokens are enough for wgmma, which takes both sides from shared memory.
        y = tl.trans(tl.dot(tl.trans(tile), tl.trans(x), input_precision=CUT.precision))
    else:
        y = tl.dot(x, tile, input_precision=CUT.precision)
    target = out + (t * HEADS + head)[:, None] * C + c[None, :]
    kept = inside & (c < LATENT)[None, :]
    tl.store(target, y.to(out.dtype.element_ty), mask=kept, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["tokens", "slots", "eps"])
def rope_absorb(
    q,
    kv,
    weight,
    weight_box,
    norm,
    rotation,
    position,
    cache_slot,
    out,
    cache,
    tokens,
    slots,
    eps,
    QUERY: tl.constexpr,
    LATENTS: tl.constexpr,
    WEIGHT: tl.constexpr,
    CACHE_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    ENTRY: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs: for every head, a few latent features and tokens (see `AbsorbCut`), W_UK into the tokens' queries; then
    for every token its cache entry, and the rope of a group of heads each. Lets its successor start only after its own
    wait, so attention may read all older cache entries before its own. Reads positions and cache slots before its wait.
    QUERY and LATENTS say where queries and latents lie, and in how many parts.
    """
    HEADS: tl.constexpr = FEATURES.heads
    LATENT: tl.constexpr = FEATURES.latent
    COLUMNS: tl.constexpr = CUT.columns
    GROUP: tl.constexpr = CUT.group
    CHUNKS: tl.constexpr = (LATENT + COLUMNS - 1) // COLUMNS
    SHARES: tl.constexpr = 1 + (HEADS + GROUP - 1) // GROUP
    C: tl.constexpr = LATENT + FEATURES.rope
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, CUT.tokens)
    if program < HEADS * CHUNKS * tiles:
        _absorb(q, weight, weight_box, out, tokens, tiles, program, QUERY, WEIGHT, FEATURES, CUT, DEPENDENT)
    else:
        program -= HEADS * CHUNKS * tiles
        token = (program // SHARES).to(tl.int64)
        share = program % SHARES
        o = tl.arange(0, FEATURES.rope_block)
        turn = tl.load(rotation + tl.load(position + token) * FEATURES.rope + o, mask=o < FEATURES.rope, other=0.0)
        slot = tl.load(cache_slot + token)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        if share == 0:
            exists = (slot >= 0) & (slot < slots)
            _write_entry(
                kv + token * LATENTS.token, norm, turn, cache + slot * CACHE_STRIDE, exists, eps, LATENTS, FEATURES,
                ENTRY,
            )  # fmt: skip
        else:
            first = (share - 1) * GROUP
            _rope_heads(
                q + token * QUERY.token + FEATURES.nope, turn, out + token * HEADS * C + LATENT, first, QUERY.head, C,
                GROUP, QUERY, FEATURES,
            )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def absorb(
    q,
    weight,
    out,
    tokens,
    QUERY: tl.constexpr,
    WEIGHT: tl.constexpr,
    FEATURES: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """The same of queries that are roped. Programs: as `rope_absorb` has them for W_UK; then for every token copies of
    the rope of a group of heads each. DEPENDENT: its successor may start early, never before this kernel itself."""
    HEADS: tl.constexpr = FEATURES.heads
    LATENT: tl.constexpr = FEATURES.latent
    GROUP: tl.constexpr = CUT.group
    CHUNKS: tl.constexpr = (LATENT + CUT.columns - 1) // CUT.columns
    SHARES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    C: tl.constexpr = LATENT + FEATURES.rope
    program = tl.program_id(0)
    tiles = tl.cdiv(tokens, CUT.tokens)
    if program < HEADS * CHUNKS * tiles:
        _absorb(q, weight, weight, out, tokens, tiles, program, QUERY, WEIGHT, FEATURES, CUT, DEPENDENT)
    else:
        program -= HEADS * CHUNKS * tiles
        token = (program // SHARES).to(tl.int64)
        if DEPENDENT:
            gdc_wait()
            gdc_launch_dependents()
        head = program % SHARES * GROUP + tl.arange(0, GROUP)
        o = tl.arange(0, FEATURES.rope_block)
        mask = (head < HEADS)[:, None] & (o < FEATURES.rope)[None, :]
        at = q + token * QUERY.token + FEATURES.nope + head[:, None] * QUERY.head + o[None, :]
        x = tl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        at = out + token * HEADS * C + LATENT + head[:, None] * C + o[None, :]
        tl.store(at, x, mask=mask, eviction_policy="evict_last")


@triton.jit(do_not_specialize=["tokens", "ctas"])
def merge_tile(
    partial,
    partial_lse,
    attended,
    plan,
    weight,
    out,
    tokens,
    ctas,
    SIZES: tl.constexpr,
    WEIGHT: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    CUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[token, head] = W_UV[head] · attention of (token, head). Grid: tiles of tokens (fastest, so that they share
    weights in L2) times tiles of values, heads.

    W_UV is linear: the product's rows are some pieces of each token's attention as they lie in memory, and their
    products are weighed. Attention is `attended` where the plan split nothing, 0 where there is none, else pieces as
    `mla_decode.merge` reads them. The plan is read before the wait. Lets its successor start only after its own wait.
    """
    LATENT: tl.constexpr = SIZES.latent
    QUERIES: tl.constexpr = SIZES.width * SIZES.heads
    TOKENS: tl.constexpr = CUT.tokens
    PIECES: tl.constexpr = CUT.pieces
    COLUMNS: tl.constexpr = CUT.columns
    BLOCK_K: tl.constexpr = CUT.block_k
    tiles = tl.cdiv(tokens, TOKENS)
    first = tl.program_id(0) % tiles * TOKENS
    v = tl.program_id(0) // tiles * COLUMNS + tl.arange(0, COLUMNS)
    head = tl.program_id(1)
    m = tl.arange(0, TOKENS * PIECES)
    k = tl.arange(0, BLOCK_K)
    row = (first + m // PIECES) // SIZES.width
    inside = first + m // PIECES < tokens
    about = plan + ctas * _CTA + row * _ROW
    slot = tl.load(about, mask=inside, other=0)
    later = tl.load(about + 1, mask=inside, other=0)
    pieces = tl.load(about + 2, mask=inside, other=0)
    split = pieces > 1
    vector = (first + m // PIECES) % SIZES.width * SIZES.heads + head
    w_at = weight + head.to(tl.int64) * WEIGHT.head + v.to(tl.int64)[None, :] * WEIGHT.row + k[:, None]
    kept = (v < SIZES.value_features)[None, :]
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    top = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    y = tl.zeros([TOKENS, COLUMNS], tl.float32)
    # Few rows have more than PIECES pieces; a running maximum serves those.
    for start in range(0, tl.max(pieces, 0), PIECES):
        piece = start + m % PIECES
        there = piece < pieces
        at = tl.where(split, tl.where(piece == 0, slot, later + piece - 1), row).to(tl.int64) * QUERIES + vector
        log = tl.load(partial_lse + at, mask=there & split, other=float("-inf"), cache_modifier=".cg")
        log = tl.reshape(tl.where(there & (pieces == 1), 0.0, log), [TOKENS, PIECES])
        new_top = tl.maximum(top, tl.max(log, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        factor = tl.exp2(log - base[:, None])
        shrink = tl.exp2(top - base)
        x_at = (tl.where(split, partial, attended) + at * LATENT)[:, None] + k[None, :]
        part = tl.zeros([TOKENS * PIECES, COLUMNS], tl.float32)
        for k0 in tl.range(0, LATENT, BLOCK_K, num_stages=CUT.stages):
            if LATENT % BLOCK_K == 0:
                x = tl.load(x_at + k0, mask=there[:, None], other=0.0, cache_modifier=".cg")
                w = tl.load(w_at + k0, mask=kept, other=0.0)
            else:
                x = tl.load(
                    x_at + k0, mask=there[:, None] & (k0 + k < LATENT)[None, :], other=0.0, cache_modifier=".cg"
                )
                w = tl.load(w_at + k0, mask=kept & (k0 + k < LATENT)[:, None], other=0.0)
            part = tl.dot(x, w, part, input_precision=CUT.precision)
        weighed = tl.reshape(part, [TOKENS, PIECES, COLUMNS]) * factor[:, :, None]
        y = y * shrink[:, None] + tl.sum(weighed, 1)
        total = total * shrink + tl.sum(factor, 1)
        top = new_top
    y = y / tl.where(total > 0, total, 1.0)[:, None]
    t = first + tl.arange(0, TOKENS)
    to = out + t.to(tl.int64)[:, None] * OUT_TOKEN + head * SIZES.value_features + v[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=(t < tokens)[:, None] & kept, eviction_policy="evict_last")
