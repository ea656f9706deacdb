"""Router of a few tokens, in Triton."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


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
