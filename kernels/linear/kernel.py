"""Products of any number of tokens with weight matrices, in portable Triton: one matrix, or one a head.

Every output is the sum over the input features in their order, in blocks of a fixed size, accumulated in fp32. With
the same tile for every number of tokens a token's result does not depend on what it is computed with.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit(do_not_specialize=["tokens"])
def tiled_linear(
    x,
    weight,
    out,
    tokens,
    F: tl.constexpr,
    K: tl.constexpr,
    X_TOKEN: tl.constexpr,
    X_HEAD: tl.constexpr,
    W_HEAD: tl.constexpr,
    W_ROW: tl.constexpr,
    W_COLUMN: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    BEHIND: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[t, head] = weight[head] · x[t, head]. Grid: tiles of tokens (fastest, so that they share weights in L2) times
    tiles of features, heads. BEHIND: features of x behind the K, a power of two, that the first tile of features copies
    to behind the F."""
    tiles = tl.cdiv(tokens, BLOCK_T)
    t = (tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    f = tl.program_id(0) // tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    head = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    if BEHIND:  # noqa: SIM102 (compile-time)
        if tl.program_id(0) < tiles:
            b = tl.arange(0, BEHIND)
            from_x = x + head * X_HEAD + t[:, None] * X_TOKEN + K + b[None, :]
            copied = tl.load(from_x, mask=(t < tokens)[:, None], other=0.0, cache_modifier=".cg")
            to_out = out + t[:, None] * OUT_TOKEN + head * OUT_HEAD + F + b[None, :]
            tl.store(to_out, copied, mask=(t < tokens)[:, None])
    x_at = x + head * X_HEAD + t[:, None] * X_TOKEN + k[None, :]
    w_at = weight + head * W_HEAD + f.to(tl.int64)[None, :] * W_ROW + k[:, None] * W_COLUMN
    live = (t < tokens)[:, None]
    kept = (f < F)[None, :]
    y = tl.zeros([BLOCK_T, BLOCK_F], tl.float32)
    # Weights are read through L1. Those that were dequantized in the launch before were written by a plain launch
    # (the compile gate of `dequantize` holds it to that), which has emptied L1 of what lay there before.
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            a = tl.load(x_at + k0, mask=live, other=0.0, cache_modifier=".cg")
            b = tl.load(w_at + k0 * W_COLUMN, mask=kept, other=0.0)
        else:
            a = tl.load(x_at + k0, mask=live & (k0 + k < K)[None, :], other=0.0, cache_modifier=".cg")
            b = tl.load(w_at + k0 * W_COLUMN, mask=kept & (k0 + k < K)[:, None], other=0.0)
        y = tl.dot(a, b, y, input_precision=PRECISION)
    to = out + t[:, None] * OUT_TOKEN + head * OUT_HEAD + f[None, :]
    tl.store(to, y.to(out.dtype.element_ty), mask=live & kept, eviction_policy="evict_last" if DEPENDENT else "")
