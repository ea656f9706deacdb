"""The gate of a SwiGLU feed-forward layer.

Shape legend: T tokens, F = 2 I, I intermediate features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import deterministic_math
from kernels.moe.activation import clamped, gated


def silu_mul(gate_up_TF: Tensor, out_TI: Tensor, *, limit: float = 0.0, dependent: bool = False) -> None:
    """out = silu(gate) * up, where `gate_up_TF` holds the I gate features, then the I up features (Shazeer, 2020).

    Computed in fp32 and rounded once; the last dimension of both is contiguous, rows may be strided. `limit`:
    where above 0, of min(gate, limit) and clamp(up, -limit, limit); NaN stays NaN. `dependent`: programmatic dependent
    launch (compute capability 9.0 and above), which is always safe.
    """
    if gate_up_TF.is_cuda:
        launch_silu_mul(gate_up_TF, out_TI, limit=limit, dependent=dependent)
    else:
        silu_mul_reference(gate_up_TF, out_TI, limit)


def silu_mul_reference(gate_up_TF: Tensor, out_TI: Tensor, limit: float = 0.0) -> None:
    """`silu_mul` in plain torch."""
    compute = torch.promote_types(gate_up_TF.dtype, torch.float32)
    gate_TI, up_TI = gate_up_TF.to(compute).chunk(2, dim=-1)
    if limit:
        gate_TI, up_TI = clamped(gate_TI, up_TI, limit)
    out_TI.copy_(deterministic_math.silu(gate_TI) * up_TI)


def launch_silu_mul(gate_up_TF: Tensor, out_TI: Tensor, *, limit: float = 0.0, dependent: bool = False) -> None:
    """`silu_mul` as a Triton kernel."""
    tokens, features = out_TI.shape
    if not tokens:
        return
    if gate_up_TF.stride(1) != 1 or out_TI.stride(1) != 1 or gate_up_TF.shape != (tokens, 2 * features):
        raise ValueError(f"features lie side by side, twice {features} of {tokens} tokens, not {gate_up_TF.shape}")
    block = min(triton.next_power_of_2(features), 1024)
    silu_mul_kernel[(tokens, triton.cdiv(features, block))](
        gate_up_TF,
        out_TI,
        GATE_UP_STRIDE=gate_up_TF.stride(0),
        OUT_STRIDE=out_TI.stride(0),
        FEATURES=features,
        LIMIT=limit,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=max(block // 256, 1),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def silu_mul_kernel(
    gate_up,
    out,
    GATE_UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One row and a block of its columns. FEATURES intermediate features: the gate's are followed by as many of up."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = gate_up + row * GATE_UP_STRIDE + i
    gate = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    up = tl.load(at + FEATURES, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    value = gated(gate, up, LIMIT)
    tl.store(out + row * OUT_STRIDE + i, value.to(out.dtype.element_ty), mask=inside)
