"""Attention sinks: a learned logit for each head, which takes part in the denominator of attention's softmax alone.

Attention with a sink s over keys whose scores have log-sum-exp l is attention without it times
exp(l) / (exp(l) + exp(s)), which is sigmoid(l - s). So no kernel of attention knows of sinks: once all keys' parts are
merged, a sink is one factor for each token and head.

Shape legend: T tokens, H heads, V features of each.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import deterministic_math


def attention_sink(out_THV: Tensor, lse_TH: Tensor, sink_H: Tensor) -> None:
    """out *= sigmoid(lse - sink), in place (Xiao et al., "Efficient Streaming Language Models with Attention Sinks",
    2023; as a learned logit: OpenAI, gpt-oss, 2025).

    `out_THV`: attention's output, or what is linear in it; any floating dtype, a head's features side by side, tokens
    and heads may be strided. `lse_TH`: natural log-sum-exp of the scaled scores of all keys, fp32, contiguous; -inf of
    a token without keys, whose output is 0 and stays so; NaN in an output stays. `sink_H`: fp32. Computed
    in fp32 and rounded once.
    """
    if out_THV.is_cuda:
        launch_attention_sink(out_THV, lse_TH, sink_H)
    else:
        attention_sink_reference(out_THV, lse_TH, sink_H)


def attention_sink_reference(out_THV: Tensor, lse_TH: Tensor, sink_H: Tensor) -> None:
    """`attention_sink` in plain torch."""
    compute = torch.promote_types(out_THV.dtype, torch.float32)
    factor_TH1 = deterministic_math.sigmoid(lse_TH - sink_H).unsqueeze(-1)
    out_THV.copy_(out_THV.to(compute) * factor_TH1)


def launch_attention_sink(out_THV: Tensor, lse_TH: Tensor, sink_H: Tensor) -> None:
    """`attention_sink` as a Triton kernel."""
    tokens, heads, features = out_THV.shape
    if not tokens:
        return
    if out_THV.stride(2) != 1 or lse_TH.shape != (tokens, heads) or not lse_TH.is_contiguous():
        raise ValueError(
            f"the features of a head lie side by side and log-sum-exps are contiguous [T, H], not {out_THV.stride()} "
            f"and {tuple(lse_TH.shape)} with strides {lse_TH.stride()}"
        )
    if sink_H.shape != (heads,) or sink_H.dtype != torch.float32 or not sink_H.is_contiguous():
        raise ValueError(f"sinks are {heads} numbers in fp32, not {tuple(sink_H.shape)} in {sink_H.dtype}")
    block = min(triton.next_power_of_2(heads * features), 1024)
    attention_sink_kernel[(tokens, triton.cdiv(heads * features, block))](
        out_THV,
        lse_TH,
        sink_H,
        OUT_TOKEN=out_THV.stride(0),
        OUT_HEAD=out_THV.stride(1),
        HEADS=heads,
        FEATURES=features,
        BLOCK=block,
        num_warps=max(block // 256, 1),
    )


@triton.jit
def attention_sink_kernel(
    out,
    lse,
    sink,
    OUT_TOKEN: tl.constexpr,
    OUT_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token and a block of the features of all of its heads."""
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < HEADS * FEATURES
    head, feature = i // FEATURES, i % FEATURES
    found = tl.load(lse + token * HEADS + head, mask=inside, other=0.0)
    factor = tl.sigmoid(found - tl.load(sink + head, mask=inside, other=0.0))
    at = out + token * OUT_TOKEN + head * OUT_HEAD + feature
    value = tl.load(at, mask=inside, other=0.0).to(tl.float32) * factor
    tl.store(at, value.to(out.dtype.element_ty), mask=inside)
