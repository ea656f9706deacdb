"""Products of few tokens with MXFP8 weights, as they are stored, in portable Triton.

Weights are the left operand, which tensor cores take from registers: there their numbers become those of the tokens'
dtype, and are multiplied by the powers of 2 of their groups, neither of which rounds anything in bf16.

Allocates nothing and waits for nothing, so it may be captured into a CUDA graph.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear.launch import options
from kernels.matrix import GROUP, MicroScaled
from kernels.narrow_floats import power, wide

MOST_TOKENS: Final = 128
"""Most tokens that take it: of more, to dequantize the matrix first costs less than to widen it for each tile of
tokens. By arithmetic, with what `bench/fp8_linear.py` finds of FP8 weights in blocks."""
_MOST_OF_A_TILE: Final = 64
_PROGRAMS: Final = 128
"""Programs that there should be, as a GPU has about as many multiprocessors: with fewer rows each where there are few
rows in all."""


def launch_micro_scaled(x_TE: Tensor, weight: MicroScaled, out_TF: Tensor, *, dependent: bool = False) -> None:
    """out = x · weight^T, summed in fp32 and rounded once to the dtype of `out_TF`. Rows may be strided, features lie
    side by side. `dependent`: programmatic dependent launch."""
    tokens, features = x_TE.shape
    rows = weight.shape[0]
    if not tokens:
        return
    block_t = min(max(16, triton.next_power_of_2(tokens)), _MOST_OF_A_TILE)
    block_f = next((block for block in (64, 32) if rows // block >= _PROGRAMS), 16 if block_t == 16 else 32)
    block_k = 256 if block_f < 64 and block_t == 16 and x_TE.itemsize == 2 else 128
    micro_scaled_linear[(triton.cdiv(tokens, block_t) * triton.cdiv(rows, block_f),)](
        x_TE,
        weight.data.view(torch.uint8),
        weight.scales,
        out_TF,
        tokens,
        F=rows,
        K=features,
        X_TOKEN=x_TE.stride(0),
        OUT_TOKEN=out_TF.stride(0),
        GROUP=GROUP,
        BLOCK_T=block_t,
        BLOCK_F=block_f,
        BLOCK_K=min(block_k, max(GROUP, triton.next_power_of_2(features))),
        STAGES=4 if x_TE.itemsize == 2 else 2,
        PRECISION="ieee" if x_TE.itemsize == 4 else "tf32",
        DEPENDENT=dependent,
        num_warps=block_f // 16,
        **options(dependent),
    )


@triton.jit(do_not_specialize=["tokens"])
def micro_scaled_linear(
    x,
    data,
    scales,
    out,
    tokens,
    F: tl.constexpr,
    K: tl.constexpr,
    X_TOKEN: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """out[t] = weight · x[t]. Grid: tiles of tokens (fastest, so that they share weights in L2) times tiles of rows."""
    GROUPS: tl.constexpr = BLOCK_K // GROUP
    tiles = tl.cdiv(tokens, BLOCK_T)
    t = (tl.program_id(0) % tiles * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    f = tl.program_id(0) // tiles * BLOCK_F + tl.arange(0, BLOCK_F)
    k = tl.arange(0, BLOCK_K)
    group = tl.arange(0, GROUPS)
    x_at = x + t[:, None] * X_TOKEN + k[None, :]
    row = f.to(tl.int64)[:, None]
    data_at = data + row * K + k[None, :]
    scale_at = scales + row * (K // GROUP) + group[None, :]
    live = (t < tokens)[:, None]
    kept = (f < F)[:, None]
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    y = tl.zeros([BLOCK_F, BLOCK_T], tl.float32)
    for k0 in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            byte = tl.load(data_at + k0, mask=kept, other=0)
            scale = tl.load(scale_at + k0 // GROUP, mask=kept, other=0)
            a = tl.load(x_at + k0, mask=live, other=0.0, cache_modifier=".cg")
        else:
            byte = tl.load(data_at + k0, mask=kept & (k0 + k < K)[None, :], other=0)
            scale = tl.load(scale_at + k0 // GROUP, mask=kept & (k0 // GROUP + group < K // GROUP)[None, :], other=0)
            a = tl.load(x_at + k0, mask=live & (k0 + k < K)[None, :], other=0.0, cache_modifier=".cg")
        number = tl.reshape(wide(byte), [BLOCK_F, GROUPS, GROUP])
        if a.dtype == tl.bfloat16:
            weight = number * power(scale)[:, :, None]
        else:
            weight = (number.to(tl.float32) * power(scale).to(tl.float32)[:, :, None]).to(a.dtype)
        y = tl.dot(tl.reshape(weight, [BLOCK_F, BLOCK_K]), tl.trans(a), y, input_precision=PRECISION)
    to = out + t[:, None] * OUT_TOKEN + f[None, :]
    value = tl.trans(y).to(out.dtype.element_ty)
    tl.store(to, value, mask=live & tl.trans(kept), eviction_policy="evict_last" if DEPENDENT else "")
