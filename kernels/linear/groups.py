"""Products of groups of input features with FP8 weights of their own, as they are stored, in portable Triton: of more
tokens than `stream` takes.

Weights are the left operand, which tensor cores take from registers: there they become numbers of the tokens' dtype,
exactly. Sums of a block's features are multiplied by the block's scale in fp32.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.matrix import BlockScaled

_FEW: int = 16
"""Tokens up to which programs have few rows of weights, so that there are many of them."""
_MOST: int = 64
"""Most tokens of a program."""


def launch_group_linear(x_TGE: Tensor, weight: BlockScaled, out_TGU: Tensor) -> None:
    """`kernels.linear.group_linear` with FP8 weights as a Triton kernel."""
    tokens, groups, features = x_TGE.shape
    rows = out_TGU.shape[2]
    if not tokens:
        return
    block_t = min(max(16, triton.next_power_of_2(tokens)), _MOST)
    block_f = min(32 if tokens <= _FEW else 64, weight.rows)
    group_linear_kernel[(triton.cdiv(tokens, block_t) * triton.cdiv(rows, block_f), groups)](
        x_TGE,
        weight.data,
        weight.scales,
        out_TGU,
        tokens,
        F=rows,
        K=features,
        X_TOKEN=x_TGE.stride(0),
        X_GROUP=x_TGE.stride(1),
        OUT_TOKEN=out_TGU.stride(0),
        OUT_GROUP=out_TGU.stride(1),
        BLOCK_ROWS=weight.rows,
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_K=weight.features,
        PRECISION="ieee" if x_TGE.itemsize == 4 else "tf32",
        num_warps=4,
        num_stages=4 if x_TGE.itemsize == 2 else 2,
    )


@triton.jit(do_not_specialize=["tokens"])
def group_linear_kernel(
    x,
    weight,
    scales,
    out,
    tokens,
    F: tl.constexpr,
    K: tl.constexpr,
    X_TOKEN: tl.constexpr,
    X_GROUP: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_GROUP: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out[t, group] = weight[group] · x[t, group]. Grid: tiles of tokens (fastest, so that they share weights in L2)
    times tiles of rows, groups. A tile of rows lies in one row of blocks, and BLOCK_K is a block's features."""
    tiles = tl.cdiv(tokens, BLOCK_T)
    t = (tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    first = tl.program_id(0) // tiles * BLOCK_F
    f = first + tl.arange(0, BLOCK_F)
    group = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x_at = x + group * X_GROUP + t[None, :] * X_TOKEN + k[:, None]
    w_at = weight + (group * F + f)[:, None] * K + k[None, :]
    scale_at = scales + (group * F + first) // BLOCK_ROWS * tl.cdiv(K, BLOCK_K)
    live = (t < tokens)[None, :]
    kept = (f < F)[:, None]
    y = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for block in range(tl.cdiv(K, BLOCK_K)):
        k0 = block * BLOCK_K
        if K % BLOCK_K == 0:
            a = tl.load(w_at + k0, mask=kept, other=0.0)
            b = tl.load(x_at + k0, mask=live, other=0.0)
        else:
            a = tl.load(w_at + k0, mask=kept & (k0 + k < K)[None, :], other=0.0)
            b = tl.load(x_at + k0, mask=live & (k0 + k < K)[:, None], other=0.0)
        y += tl.dot(a.to(x.dtype.element_ty), b, input_precision=PRECISION) * tl.load(scale_at + block)
    to = out + t[:, None] * OUT_TOKEN + group * OUT_GROUP + f[None, :]
    tl.store(to, tl.trans(y).to(out.dtype.element_ty), mask=tl.trans(live & kept))
