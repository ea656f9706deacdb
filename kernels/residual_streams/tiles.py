"""Residual streams of many tokens in Triton: tiles of them share the weights of gates, whose products are those of
tensor cores."""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc, var-annotated"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.residual_streams.kernel import gate_constants, mixing_matrix, new_stream, parts_of_sums, read_token


@triton.jit
def _numbers(at, there, COUNT: tl.constexpr, APART: tl.constexpr, CACHE: tl.constexpr):
    """COUNT numbers of each token, which lie so far apart from `at` on, as columns."""
    found = ()
    for number in tl.static_range(COUNT):
        found = found + (tl.load(at + number * APART, mask=there, other=0.0, cache_modifier=CACHE)[:, None],)
    return found


@triton.jit
def _weights(weight, m, e, STREAM: tl.constexpr, FEATURES: tl.constexpr, STREAMS: tl.constexpr, GATES: tl.constexpr):
    """Weights of the gates for features of a stream, 0 where there is no such gate or feature."""
    asked = (m < GATES)[:, None] & (e < FEATURES)[None, :]
    return tl.load(weight + m[:, None] * (STREAMS * FEATURES) + (STREAM * FEATURES + e)[None, :], mask=asked, other=0.0)


@triton.jit
def _weights_together(
    weight, m, first, FEATURES: tl.constexpr, STREAMS: tl.constexpr, STREAM_LANES: tl.constexpr, GATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for a block of features of all streams, stream by stream side by side."""
    k = tl.arange(0, STREAM_LANES * BLOCK)
    stream, e = k // BLOCK, first + k % BLOCK
    asked = (m < GATES)[:, None] & ((e < FEATURES) & (stream < STREAMS))[None, :]
    return tl.load(weight + m[:, None] * (STREAMS * FEATURES) + (stream * FEATURES + e)[None, :], mask=asked, other=0.0)


@triton.jit
def _together(streams, STREAMS: tl.constexpr, STREAM_LANES: tl.constexpr):
    """Blocks [T, E] of two to four streams side by side, behind three of them zeros."""
    both = tl.join(streams[0], streams[1])
    if STREAM_LANES == 2:
        both = tl.permute(both, (0, 2, 1))
    else:
        last = streams[3] if STREAMS == 4 else tl.zeros_like(streams[2])
        both = tl.permute(tl.join(both, tl.join(streams[2], last)), (0, 3, 2, 1))
    return tl.reshape(both, [streams[0].shape[0], STREAM_LANES * streams[0].shape[1]])


@triton.jit
def _into_l2(at, asked):
    """Ask for the line of the L2 cache at each address that is `asked` to be brought there."""
    tl.inline_asm_elementwise(
        """{
            .reg .pred asks;
            setp.ne.b32 asks, $2, 0;
            @asks prefetch.global.L2 [$1];
            mov.b32 $0, 0;
        }""",
        "=r,l,r",
        [at.to(tl.int64), asked.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _add_product(product, x, weight):
    """`product` and the sums of products of `x` [T, E] in bf16 with the rows of `weight` [M, E] in fp32.

    Such weights are exactly the sum of three numbers in bf16, of 8 bits each. Tensor cores multiply these exactly, but
    do not round to nearest where they add up: what they have added up of few features is added to the rest here, by
    operations that no compiler lets tensor cores do."""
    high = weight.to(tl.bfloat16)
    rest = weight - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    sums = tl.fma(tl.dot(x, tl.trans(middle)), 1.0, tl.dot(x, tl.trans(low)))
    sums = tl.fma(tl.dot(x, tl.trans(high)), 1.0, sums)
    return product + sums


@triton.jit
def _asked(
    x, residual, t, e, inside, X_STRIDE: tl.constexpr, FEATURES: tl.constexpr, STREAMS: tl.constexpr
):  # fmt: skip
    """A block of features `e` of a tile's streams, and behind them that of what is added to them; the tile begins where
    all pointers do."""
    begin = residual + (t[:, None] * (STREAMS * FEATURES) + e[None, :])
    found = ()
    for stream in tl.static_range(STREAMS):
        found = found + (tl.load(begin + stream * FEATURES, mask=inside, other=0.0, cache_modifier=".cg"),)
    added = tl.load(x + (t[:, None] * X_STRIDE + e[None, :]), mask=inside, other=0.0, cache_modifier=".cg")
    return found + (added,)


@triton.jit
def _turn(
    old,
    residual,
    open_gate,
    mix,
    t,
    there,
    e,
    inside,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    MIXED: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Add to a block of features of a tile's streams, of what `_asked` has found. Returns the streams, and behind them
    the sums of their squares."""
    begin = residual + (t[:, None] * (STREAMS * FEATURES) + e[None, :])
    added = old[STREAMS]
    squares = tl.zeros(inside.shape, tl.float32)
    made = ()
    for stream in tl.static_range(STREAMS):
        opened = _numbers(open_gate + t * STREAMS + stream, there, 1, 1, CACHE)[0]
        own = _numbers(mix + t * (STREAMS * STREAMS) + stream, there, STREAMS if MIXED else 0, STREAMS, CACHE)
        rounded = new_stream(old, own, opened, added, stream, STREAMS, MIXED).to(tl.bfloat16)
        value = rounded.to(tl.float32)
        squares += value * value
        made = made + (rounded,)
    # Behind all loads, which no compiler takes past a store that might be to the same address.
    for stream in tl.static_range(STREAMS):
        tl.store(begin + stream * FEATURES, made[stream], mask=inside)
    return made + (tl.sum(squares, 1),)


@triton.jit(do_not_specialize=["tokens", "blocks"])
def add_to_many_streams_kernel(
    x,
    residual,
    open_gate,
    mix,
    weight,
    part,
    tokens,
    blocks,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    MIXED: tl.constexpr,
    STREAM_LANES: tl.constexpr,
    EARLY: tl.constexpr,
    TOGETHER: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """As `add_to_streams_kernel`, of TOKENS tokens and `blocks` blocks of features, one after the other; streams are in
    bf16. A token's sums depend neither on its place in the tile nor on the tokens beside it. With EARLY there is one
    block, and its weights are asked for before the wait; else it is launched plainly."""
    tile = tl.program_id(0).to(tl.int64) * TOKENS
    t = tl.arange(0, TOKENS)
    m = tl.arange(0, LANES)
    s = tl.arange(0, STREAM_LANES)
    token, there = tile + t, t < tokens - tile
    first = tl.program_id(1) * blocks * BLOCK
    early = ()
    if EARLY:
        for stream in tl.static_range(STREAMS):
            early = early + (_weights(weight, m, first + tl.arange(0, BLOCK), stream, FEATURES, STREAMS, GATES),)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    x += tile * X_STRIDE
    residual += tile * STREAMS * FEATURES
    open_gate += tile * STREAMS
    if MIXED:
        mix += tile * STREAMS * STREAMS
    # Matrices are read again in each turn, from L1: registers have no room for them.
    CACHE: tl.constexpr = ".cg" if EARLY else ""
    e = first + tl.arange(0, BLOCK)
    inside = there[:, None] & (e < FEATURES)[None, :]
    asked = _asked(x, residual, t, e, inside, X_STRIDE, FEATURES, STREAMS)
    made = _turn(asked, residual, open_gate, mix, t, there, e, inside, FEATURES, STREAMS, MIXED, CACHE)
    before = ()
    if TOGETHER:
        before = before + (_together(made, STREAMS, STREAM_LANES),)
    else:
        for stream in tl.static_range(STREAMS):
            before = before + (made[stream],)
    square = made[STREAMS]
    product = tl.zeros([TOKENS, LANES], tl.float32)
    # The products of a block are made of what the turn before has left: that the compiler keeps in shared memory, where
    # tensor cores read it. What the same turn computes it would compute once more for them, in their registers.
    for block in range(1, blocks + 1):
        of_gates = early
        if TOGETHER:
            begin = first + (block - 1) * BLOCK
            of_gates = of_gates + (_weights_together(weight, m, begin, FEATURES, STREAMS, STREAM_LANES, GATES, BLOCK),)
        elif not EARLY:
            for stream in tl.static_range(STREAMS):
                of_gates = of_gates + (_weights(weight, m, e, stream, FEATURES, STREAMS, GATES),)
        if not EARLY:
            # Asked for before the products, which these wait for meanwhile.
            e = first + block * BLOCK + tl.arange(0, BLOCK)
            inside = there[:, None] & ((e < FEATURES) & (block < blocks))[None, :]
            asked = _asked(x, residual, t, e, inside, X_STRIDE, FEATURES, STREAMS)
        for piece in tl.static_range(1 if TOGETHER else STREAMS):
            product = _add_product(product, before[piece], of_gates[piece])
        streams = ()
        if EARLY:  # no other turn needs them; but only what a turn changes is kept so
            for stream in tl.static_range(STREAMS):
                streams = streams + (before[(stream + 1) % STREAMS],)
        else:
            made = _turn(asked, residual, open_gate, mix, t, there, e, inside, FEATURES, STREAMS, MIXED, CACHE)
            if TOGETHER:
                streams = streams + (_together(made, STREAMS, STREAM_LANES),)
            else:
                for stream in tl.static_range(STREAMS):
                    streams = streams + (made[stream],)
            square += made[STREAMS]
            # Memory is read by the line, of which a turn has a half: of what the next turn but one begins with.
            ahead = first + (block + 2) * BLOCK
            wanted = there & (block % 2 == 0) & (block + 2 < blocks) & (ahead < FEATURES)
            _into_l2(x + (t * X_STRIDE + ahead), wanted)
            line = t[:, None] * (STREAMS * FEATURES) + s[None, :] * FEATURES + ahead
            _into_l2(residual + line, wanted[:, None] & (s < STREAMS)[None, :])
        before = streams
    to = part + (token * PARTS + tl.program_id(1)) * PART
    tl.store(to[:, None] + m[None, :], product, mask=there[:, None] & (m < GATES)[None, :])
    tl.store(to + GATES, square, mask=there)


@triton.jit(do_not_specialize=["tokens"])
def read_many_streams_kernel(
    residual,
    open_gate,
    mix,
    base,
    scale,
    part,
    weight,
    out,
    read_sum,
    tokens,
    eps,
    gate_eps,
    norm_eps,
    magnitude,
    SIZES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """With mixing steps the first programs make the mixing matrices of TOKENS tokens each; each of the others reads the
    streams of one token, see `read_token`. Launched plainly."""
    STREAMS: tl.constexpr = SIZES.streams
    GATES: tl.constexpr = SIZES.gates
    p = tl.arange(0, SIZES.part_lanes)
    mixers = 0
    if SIZES.steps:
        mixers = tl.cdiv(tokens, TOKENS)
        if tl.program_id(0) < mixers:
            t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
            begins = part + (t[:, None] * SIZES.parts + p[None, :]) * SIZES.part
            all_there = (t < tokens)[:, None] & (p < SIZES.parts)[None, :]
            squares = tl.sum(tl.load(begins + GATES, mask=all_there, other=0.0, cache_modifier=".cg"), 1)
            inverse = tl.rsqrt(squares / (STREAMS * SIZES.features) + norm_eps)
            mixing_factor = tl.load(scale + 2)
            made = ()
            for number in tl.static_range(2 * STREAMS, GATES):
                total = tl.sum(tl.load(begins + number, mask=all_there, other=0.0, cache_modifier=".cg"), 1)
                made = made + (total * inverse * mixing_factor + tl.load(base + number),)
            matrix = mixing_matrix(made, gate_eps, STREAMS, SIZES.steps)
            for number in tl.static_range(STREAMS * STREAMS):
                tl.store(mix + t * STREAMS * STREAMS + number, matrix[number], mask=t < tokens)
    if tl.program_id(0) >= mixers:
        token = tl.program_id(0).to(tl.int64) - mixers
        sums, square = parts_of_sums(part, token, SIZES)
        factor, shift, w = gate_constants(scale, base, weight, SIZES)
        read_token(
            token, residual, open_gate, sums, square, factor, shift, w, out, read_sum,
            eps, gate_eps, norm_eps, magnitude, SIZES,
        )  # fmt: skip
