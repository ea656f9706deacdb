"""The experts of one or two tokens: every (token, expert) pair on its own, without sorting, in fp32 on plain cores.

`gate_up` gives every program a few rows of one pair's expert, `down` a few features of one token and all its pairs in
order. All of a program's first weights are on their way before it uses any.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.moe.activation import gated


@triton.jit
def gate_up(
    x,
    weight,
    ids,
    act,
    X_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """act[pair] = silu(gate[expert] · x) * (up[expert] · x), rounded once. LIMIT: see `activation`."""
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) // blocks
    # The last block is moved back into the matrix: it computes some features that its neighbour computes as well.
    feature = tl.minimum(tl.program_id(0) % blocks * BLOCK, FEATURES - BLOCK) + tl.arange(0, BLOCK)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()  # after the wait: `down` may read the ids before its own
    expert = tl.load(ids + pair, cache_modifier=".cg")
    if (expert >= 0) & (expert < EXPERTS):
        k = tl.arange(0, BLOCK_K)
        gate_row = weight + expert * (2 * FEATURES * K) + feature[:, None] * K + k[None, :]
        up_row = gate_row + FEATURES * K
        source = x + (pair // COLUMNS).to(tl.int64) * X_STRIDE + k
        gate = tl.zeros([BLOCK, BLOCK_K], tl.float32)
        up = tl.zeros([BLOCK, BLOCK_K], tl.float32)
        for k0 in tl.static_range(0, K, BLOCK_K):
            inside = k0 + k < K
            g = tl.load(gate_row + k0, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            u = tl.load(up_row + k0, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            a = tl.load(source + k0, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)[None, :]
            gate += g.to(tl.float32) * a
            up += u.to(tl.float32) * a
        value = gated(tl.sum(gate, 1), tl.sum(up, 1), LIMIT)
        tl.store(act + pair.to(tl.int64) * FEATURES + feature, value.to(act.dtype.element_ty))


@triton.jit
def _expert(ids, pair, inside, EXPERTS: tl.constexpr):
    """The expert of a pair, -1 when it is none."""
    expert = tl.load(ids + pair, mask=inside, other=-1, cache_modifier=".cg")
    return tl.where(expert < EXPERTS, expert, -1)


@triton.jit
def _weights(weight, expert, k, feature, K: tl.constexpr, FEATURES: tl.constexpr):
    """[features, k] of an expert's weights, 0 past the end and for no expert."""
    at = weight + expert * (FEATURES * K) + feature[:, None] * K + k[None, :]
    return tl.load(at, mask=((k < K) & (expert >= 0))[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def down(
    act,
    weight,
    ids,
    factor,
    before,
    out,
    BEFORE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXPERTS: tl.constexpr,
    K: tl.constexpr,
    FEATURES: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[token] = the sum over its pairs, in order, of factor[pair] * down[expert] · act[pair], with ADD and
    before[token], rounded once.

    A step is a pair and BLOCK_K of its K features; the next step's weights and inputs are on their way during a step.
    Ids and the first weights are read before the wait: `gate_up` lets this kernel start only when the ids are there.
    """
    blocks: tl.constexpr = (FEATURES + BLOCK - 1) // BLOCK
    parts: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    steps: tl.constexpr = COLUMNS * parts
    token = (tl.program_id(0) // blocks).to(tl.int64)
    first = token * COLUMNS
    feature = tl.minimum(tl.program_id(0) % blocks * BLOCK, FEATURES - BLOCK) + tl.arange(0, BLOCK)
    lane = tl.arange(0, BLOCK_K)
    expert = _expert(ids, first, first >= 0, EXPERTS)
    after = _expert(ids, first + 1 // parts, steps > 1, EXPERTS)
    w = _weights(weight, expert, lane, feature, K, FEATURES)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    inside = (lane < K) & (expert >= 0)
    a = tl.load(act + first * K + lane, mask=inside, other=0.0, cache_modifier=".cg")
    f = tl.load(factor + first, mask=expert >= 0, other=0.0, cache_modifier=".cg")
    sum = tl.zeros([BLOCK, BLOCK_K], tl.float32)
    for step in range(steps):
        pair = first + (step + 1) // parts
        k = (step + 1) % parts * BLOCK_K + lane
        next_w = _weights(weight, after, k, feature, K, FEATURES)
        inside = (k < K) & (after >= 0)
        next_a = tl.load(act + pair * K + k, mask=inside, other=0.0, cache_modifier=".cg")
        next_f = tl.load(factor + pair, mask=after >= 0, other=0.0, cache_modifier=".cg")
        after = _expert(ids, first + (step + 2) // parts, step + 2 < steps, EXPERTS)
        sum += w.to(tl.float32) * (a.to(tl.float32) * f)[None, :]
        w = next_w
        a = next_a
        f = next_f
    total = tl.sum(sum, 1)
    if ADD:
        total += tl.load(before + token * BEFORE_STRIDE + feature, cache_modifier=".cg").to(tl.float32)
    tl.store(out + token * OUT_STRIDE + feature, total.to(out.dtype.element_ty))
