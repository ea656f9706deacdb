"""Residual streams of few tokens in Triton, and what the kernels of many tokens share with these."""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class Reading(NamedTuple):
    """Sizes of what kernels read streams from and write what they have read to: one constant of a launch."""

    out_stride: int
    features: int
    streams: int
    gates: int
    lanes: int
    """Gates, padded to a power of two."""
    part: int
    """Numbers from one part of a token's sums to the next."""
    parts: int
    part_lanes: int
    """Parts, padded to a power of two."""
    steps: int
    """Steps in which a mixing matrix is made; 0: there is none."""
    keep: bool
    """Whether the sum of a token's streams is kept beside its norm."""
    block: int
    """Features, padded to a power of two."""


@triton.jit
def new_stream(old, mix, opened, added, STREAM: tl.constexpr, STREAMS: tl.constexpr, MIXED: tl.constexpr):
    """What a stream is once `added` times `opened` was added to it, before it is rounded, of all `old` streams and its
    column of the mixing matrix."""
    if MIXED:
        value = mix[0] * old[0].to(tl.float32)
        for other in tl.static_range(1, STREAMS):
            value += mix[other] * old[other].to(tl.float32)
    else:
        value = old[STREAM].to(tl.float32)
    return value + opened * added.to(tl.float32)


@triton.jit
def add_to_streams_kernel(
    x,
    residual,
    open_gate,
    mix,
    weight,
    part,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    MIXED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token and a block of features of all of its streams, which `mix` mixes if MIXED. Sums of their products with
    the rows of `weight`, which is asked for before the wait if EARLY, and behind those the sum of their squares go to
    `part`."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = block * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, LANES)
    inside = e < FEATURES
    row = weight + m[:, None] * (STREAMS * FEATURES) + e[None, :]
    asked = (m[:, None] < GATES) & inside[None, :]
    early = ()
    if GATES and EARLY:
        for stream in tl.static_range(STREAMS):
            early = early + (tl.load(row + stream * FEATURES, mask=asked, other=0.0),)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # Loads come before the first store. No compiler may take one past a store that might be to the same address, so
    # each stream's would wait for those of the stream before.
    added = tl.load(x + token * X_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg")
    begin = residual + token * STREAMS * FEATURES + e
    old = ()
    opened = ()
    for stream in tl.static_range(STREAMS):
        old = old + (tl.load(begin + stream * FEATURES, mask=inside, other=0.0, cache_modifier=".cg"),)
        opened = opened + (tl.load(open_gate + token * STREAMS + stream, cache_modifier=".cg"),)
    mixed = ()
    if MIXED:
        for number in tl.static_range(STREAMS * STREAMS):
            mixed = mixed + (tl.load(mix + token * STREAMS * STREAMS + number, cache_modifier=".cg"),)
    square = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([LANES, BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        own = ()
        for other in tl.static_range(STREAMS if MIXED else 0):
            own = own + (mixed[other * STREAMS + stream],)
        rounded = new_stream(old, own, opened[stream], added, stream, STREAMS, MIXED).to(residual.dtype.element_ty)
        tl.store(begin + stream * FEATURES, rounded, mask=inside)
        if GATES:
            value = rounded.to(tl.float32)
            square += value * value
            if EARLY:
                product += early[stream] * value[None, :]
            else:
                product += tl.load(row + stream * FEATURES, mask=asked, other=0.0) * value[None, :]
    if GATES:
        to = part + (token * PARTS + block) * PART
        tl.store(to + m, tl.sum(product, 1), mask=m < GATES)
        tl.store(to + GATES, tl.sum(square, 0))


@triton.jit
def _columns(mix, eps, STREAMS: tl.constexpr):
    """Divide the columns of a matrix, a tuple of its numbers row by row, by their sums and eps."""
    inverse = ()
    for j in tl.static_range(STREAMS):
        total = mix[j] + eps
        for i in tl.static_range(1, STREAMS):
            total += mix[i * STREAMS + j]
        inverse = inverse + (1 / total,)
    out = ()
    for i in tl.static_range(STREAMS):
        for j in tl.static_range(STREAMS):
            out = out + (mix[i * STREAMS + j] * inverse[j],)
    return out


@triton.jit
def _rows(mix, eps, STREAMS: tl.constexpr):
    """Divide the rows, as `_columns` does columns."""
    out = ()
    for i in tl.static_range(STREAMS):
        total = mix[i * STREAMS] + eps
        for j in tl.static_range(1, STREAMS):
            total += mix[i * STREAMS + j]
        inverse = 1 / total
        for j in tl.static_range(STREAMS):
            out = out + (mix[i * STREAMS + j] * inverse,)
    return out


@triton.jit
def mixing_matrix(made, eps, STREAMS: tl.constexpr, STEPS: tl.constexpr):
    """The numbers of the mixing matrix, row by row, of what was made for each of them: of one token, or of a token in
    each place of a vector. Threads share no token: sums of so few numbers over lanes would take longer."""
    mix = ()
    for i in tl.static_range(STREAMS):
        most = made[i * STREAMS]
        for j in tl.static_range(1, STREAMS):
            most = tl.maximum(most, made[i * STREAMS + j])
        power = ()
        for j in tl.static_range(STREAMS):
            power = power + (tl.exp(made[i * STREAMS + j] - most),)
        total = power[0]
        for j in tl.static_range(1, STREAMS):
            total += power[j]
        for j in tl.static_range(STREAMS):
            mix = mix + (power[j] / total + eps,)
    mix = _columns(mix, eps, STREAMS)
    for _step in range(STEPS - 1):
        mix = _columns(_rows(mix, eps, STREAMS), eps, STREAMS)
    return mix


@triton.jit
def _gates_made(sums, square, factor, shift, norm_eps, SIZES: tl.constexpr):
    """What is made of a token's streams for every gate, of the parts of its sums, [PARTS, LANES] and [PARTS]."""
    values: tl.constexpr = SIZES.streams * SIZES.features
    return tl.sum(sums, 0) * tl.rsqrt(tl.sum(square, 0) / values + norm_eps) * factor + shift


@triton.jit
def gate_constants(scale, base, weight, SIZES: tl.constexpr):
    """What gates are made with beside the sums: factors and shifts of all gates, and the weight of the norm."""
    m = tl.arange(0, SIZES.lanes)
    e = tl.arange(0, SIZES.block)
    factor = tl.load(scale + tl.minimum(m // SIZES.streams, 2), mask=m < SIZES.gates, other=0.0)
    shift = tl.load(base + m, mask=m < SIZES.gates, other=0.0)
    return factor, shift, tl.load(weight + e, mask=e < SIZES.features, other=0.0).to(tl.float32)


@triton.jit
def parts_of_sums(part, token, SIZES: tl.constexpr):
    """The parts of a token's sums: those of its products, [PARTS, LANES], and those of its squares."""
    m = tl.arange(0, SIZES.lanes)
    p = tl.arange(0, SIZES.part_lanes)
    begin = part + (token * SIZES.parts + p) * SIZES.part
    there = (p[:, None] < SIZES.parts) & (m < SIZES.gates)[None, :]
    sums = tl.load(begin[:, None] + m[None, :], mask=there, other=0.0, cache_modifier=".cg")
    return sums, tl.load(begin + SIZES.gates, mask=p < SIZES.parts, other=0.0, cache_modifier=".cg")


@triton.jit
def read_token(
    token, residual, open_gate, sums, square, factor, shift, w, out, read_sum, eps, gate_eps, norm_eps, magnitude,
    SIZES: tl.constexpr,
):  # fmt: skip
    """A token's gates, but for those of its mixing, of the parts of its sums; the sum of its streams by them, which
    `keep` leaves in `read_sum`, and the norm of that."""
    FEATURES: tl.constexpr = SIZES.features
    STREAMS: tl.constexpr = SIZES.streams
    BLOCK: tl.constexpr = SIZES.block
    m = tl.arange(0, SIZES.lanes)
    e = tl.arange(0, BLOCK)
    inside = e < FEATURES
    # Asked for before anything waits for the parts.
    values = ()
    for stream in tl.static_range(STREAMS):
        at = residual + (token * STREAMS + stream) * FEATURES + e
        values = values + (tl.load(at, mask=inside, other=0.0, cache_modifier=".cg"),)
    gate = tl.sigmoid(_gates_made(sums, square, factor, shift, norm_eps, SIZES))
    if SIZES.gates > STREAMS:
        added = magnitude * gate
        if SIZES.steps == 0:
            added += gate_eps
        opened = (m >= STREAMS) & (m < 2 * STREAMS)
        tl.store(open_gate + token * STREAMS + m - STREAMS, added, mask=opened)
    read = gate + gate_eps
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        total += tl.sum(tl.where(m == stream, read, 0.0), 0) * values[stream].to(tl.float32)
    total = total.to(residual.dtype.element_ty).to(tl.float32)
    if SIZES.keep:
        tl.store(read_sum + token * FEATURES + e, total.to(read_sum.dtype.element_ty), mask=inside)
    normed = total * tl.rsqrt(tl.sum(total * total, 0) / FEATURES + eps)
    tl.store(out + token * SIZES.out_stride + e, (normed * w).to(out.dtype.element_ty), mask=inside)


@triton.jit
def read_streams_kernel(
    residual,
    open_gate,
    mix,
    base,
    scale,
    part,
    weight,
    out,
    read_sum,
    eps,
    gate_eps,
    norm_eps,
    magnitude,
    SIZES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, 0): `read_token`; with mixing steps (token, 1): its mixing matrix, which takes as long."""
    token = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, SIZES.lanes)
    factor, shift, w = gate_constants(scale, base, weight, SIZES)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    sums, square = parts_of_sums(part, token, SIZES)
    if SIZES.steps:  # noqa: SIM102 - the first is known to the compiler
        if tl.program_id(1) == 1:
            STREAMS: tl.constexpr = SIZES.streams
            made = _gates_made(sums, square, factor, shift, norm_eps, SIZES)
            of_mixing = ()
            for number in tl.static_range(STREAMS * STREAMS):
                of_mixing = of_mixing + (tl.sum(tl.where(m == 2 * STREAMS + number, made, 0.0), 0),)
            matrix = mixing_matrix(of_mixing, gate_eps, STREAMS, SIZES.steps)
            for number in tl.static_range(STREAMS * STREAMS):
                tl.store(mix + token * STREAMS * STREAMS + number, matrix[number])
    if tl.program_id(1) == 0:
        read_token(
            token, residual, open_gate, sums, square, factor, shift, w, out, read_sum,
            eps, gate_eps, norm_eps, magnitude, SIZES,
        )  # fmt: skip
