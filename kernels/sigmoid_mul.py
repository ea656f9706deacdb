"""A gate with a sigmoid: of attention's output, of a norm, and of a number itself, which is SiLU.

Shape legend: T tokens, H heads, V features of each.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import deterministic_math


def sigmoid_mul(x_THV: Tensor, gate_THV: Tensor, out_THV: Tensor, *, dependent: bool = False) -> None:
    """out = x * sigmoid(gate) (Qiu et al., "Gated Attention for Large Language Models", 2025).

    Computed in fp32 and rounded once; the last dimension of all three is contiguous, tokens and heads may be strided.
    `out_THV` may be `x_THV` or `gate_THV`, which may be the same. `dependent`: programmatic dependent launch (compute
    capability 9.0 and above), which is always safe.
    """
    if x_THV.is_cuda:
        launch_sigmoid_mul(x_THV, gate_THV, out_THV, dependent=dependent)
    else:
        sigmoid_mul_reference(x_THV, gate_THV, out_THV)


def sigmoid_mul_reference(x_THV: Tensor, gate_THV: Tensor, out_THV: Tensor) -> None:
    """`sigmoid_mul` in plain torch."""
    compute = torch.promote_types(x_THV.dtype, torch.float32)
    out_THV.copy_(x_THV.to(compute) * deterministic_math.sigmoid(gate_THV.to(compute)))


def launch_sigmoid_mul(x_THV: Tensor, gate_THV: Tensor, out_THV: Tensor, *, dependent: bool = False) -> None:
    """`sigmoid_mul` as a Triton kernel."""
    tokens, heads, features = out_THV.shape
    if not tokens:
        return
    tensors = x_THV, gate_THV, out_THV
    if any(tensor.stride(2) != 1 or tensor.shape != out_THV.shape for tensor in tensors):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
        raise ValueError(f"the features of a head lie side by side, and shapes are equal, not {shapes}")
    block = min(triton.next_power_of_2(heads * features), 1024)
    sigmoid_mul_kernel[(tokens, triton.cdiv(heads * features, block))](
        x_THV,
        gate_THV,
        out_THV,
        X_TOKEN=x_THV.stride(0),
        X_HEAD=x_THV.stride(1),
        GATE_TOKEN=gate_THV.stride(0),
        GATE_HEAD=gate_THV.stride(1),
        OUT_TOKEN=out_THV.stride(0),
        OUT_HEAD=out_THV.stride(1),
        HEADS=heads,
        FEATURES=features,
        BLOCK=block,
        DEPENDENT=dependent,
        num_warps=max(block // 256, 1),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def sigmoid_mul_kernel(
    x,
    gate,
    out,
    X_TOKEN: tl.constexpr,
    X_HEAD: tl.constexpr,
    GATE_TOKEN: tl.constexpr,
    GATE_HEAD: tl.constexpr,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """One token and a block of the features of all of its heads."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HEADS * FEATURES
    head, feature = i // FEATURES, i % FEATURES
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    at = gate + token * GATE_TOKEN + head * GATE_HEAD + feature
    open = tl.sigmoid(tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32))
    at = x + token * X_TOKEN + head * X_HEAD + feature
    value = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32) * open
    tl.store(out + token * OUT_TOKEN + head * OUT_HEAD + feature, value.to(out.dtype.element_ty), mask=inside)
