"""LayerNorm of index keys, rope of keys and queries, and factors of weights, in one Triton kernel."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.index_entry import rounded
from kernels.index_rope.hadamard import spread_lanes


@triton.jit
def _rotate(x, cos, sin, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Turn the pairs (2i, 2i + 1) of every row of [ROWS, BLOCK] by the i-th angle; `cos`, `sin`: [1, BLOCK / 2]."""
    even, odd = tl.split(tl.reshape(x, [ROWS, BLOCK // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [ROWS, BLOCK])


@triton.jit
def index_rope(
    q,
    both,
    norm,
    bias,
    rotation,
    key,
    head_weight,
    code,
    eps,
    factor,
    Q_TOKEN: tl.constexpr,
    BOTH_STRIDE: tl.constexpr,
    KEY_STRIDE: tl.constexpr,
    ROTATION_STRIDE: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ROPE: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
    INT8: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Programs (token, part): part 0 makes the token's key, the others rotate GROUP heads each and make their weights.
    With INT8 both are spread, 2 ** STAGES features together, and queries become codes."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    turn = rotation + token * ROTATION_STRIDE
    if part == 0:
        f = tl.arange(0, BLOCK)
        pair = tl.arange(0, BLOCK // 2)
        inside = f < FEATURES
        weight = tl.load(norm + f, mask=inside, other=0.0)
        shift = tl.load(bias + f, mask=inside, other=0.0)
        # Features that are not roped turn by no angle.
        cos = tl.load(turn + 2 * pair, mask=2 * pair < ROPE, other=1.0)
        sin = tl.load(turn + 2 * pair + 1, mask=2 * pair < ROPE, other=0.0)
        if DEPENDENT:
            gdc_launch_dependents()  # the kernel behind may have weights to read while this one waits
            gdc_wait()
        value = tl.load(both + token * BOTH_STRIDE + f, mask=inside, other=0.0, cache_modifier=".cg")
        centred = tl.where(inside, value - tl.sum(value, 0) / FEATURES, 0.0)
        normed = centred * tl.rsqrt(tl.sum(centred * centred, 0) / FEATURES + eps) * weight + shift
        turned = _rotate(tl.reshape(normed, [1, BLOCK]), cos[None, :], sin[None, :], 1, BLOCK)
        if INT8:
            turned = spread_lanes(turned, STAGES)
        at = key + token * KEY_STRIDE + f
        tl.store(at, tl.reshape(turned, [BLOCK]).to(key.dtype.element_ty), mask=inside)
    else:
        head = (part - 1) * GROUP + tl.arange(0, GROUP)
        o = tl.arange(0, WIDTH_BLOCK)
        angle = tl.arange(0, WIDTH_BLOCK // 2)
        head_cos = tl.load(turn + 2 * angle, mask=2 * angle < ROPE, other=1.0)
        head_sin = tl.load(turn + 2 * angle + 1, mask=2 * angle < ROPE, other=0.0)
        if DEPENDENT:
            gdc_launch_dependents()  # the kernel behind may have weights to read while this one waits
            gdc_wait()
        place = head[:, None] * FEATURES + o[None, :]
        mask = (head < HEADS)[:, None] & (o < WIDTH)[None, :]
        x = tl.load(q + token * Q_TOKEN + place, mask=mask, other=0.0, cache_modifier=".cg").to(tl.float32)
        x = _rotate(x, head_cos[None, :], head_sin[None, :], GROUP, WIDTH_BLOCK)
        raw = tl.load(both + token * BOTH_STRIDE + FEATURES + head, mask=head < HEADS, other=0.0, cache_modifier=".cg")
        weighed = raw * factor
        if INT8:
            codes, scale = rounded(spread_lanes(x, STAGES))
            tl.store(code + token * HEADS * FEATURES + place, codes, mask=mask)
            weighed *= scale
        else:
            tl.store(q + token * Q_TOKEN + place, x.to(q.dtype.element_ty), mask=mask)
        tl.store(head_weight + token * HEADS + head, weighed, mask=head < HEADS)
