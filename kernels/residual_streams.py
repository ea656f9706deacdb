"""Several residual streams in place of one: a part of a layer reads a weighted sum of them, and each stream adds the
part's output times a weight of its own. Both weights are sigmoids of a small product of all streams.

That is hyper-connections (Zhu et al., 2024) in the form of Hy4 (Tencent, 2026), without mixing of the streams among
each other.

Shape legend: T tokens, S streams, E features of each, F = S E, M gates (S of what is read, and behind them S of what is
added; those of a model's end are S alone), P parts of their sums, X = M rounded up to a power of two, and one.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kernels import deterministic_math
from kernels.linear.reference import invariant_linear

_BLOCK: Final = 512
"""Features of every stream that a program of the first kernel takes. Sums have one order, which follows from it."""


@dataclass(frozen=True)
class StreamGates:
    """The weights by which streams are read before a part of a layer and added to behind it."""

    weight_MF: Tensor
    """fp32."""
    base_M: Tensor
    """fp32."""
    scale_G: Tensor
    """fp32: one factor for the gates of what is read, and one for those of what is added, where there are such."""
    magnitude: float
    """The most that a gate of what is added is, but for `eps`."""
    eps: float
    """Number that is added to every gate."""
    norm_eps: float
    """Epsilon of the norm of all streams' features, which the product reads."""


@dataclass(frozen=True)
class StreamMemory:
    """What a pass keeps of its streams beside them."""

    open_TS: Tensor
    """fp32: gates of what is added next."""
    part_TPX: Tensor
    """fp32: parts of sums, of one call alone."""

    @staticmethod
    def empty(tokens: int, streams: int, features: int, empty: Callable[..., Tensor]) -> StreamMemory:
        """Uninitialised; `empty(*shape, dtype=)` gives memory."""
        sums = triton.next_power_of_2(2 * streams) + 1
        return StreamMemory(
            empty(tokens, streams, dtype=torch.float32),
            empty(tokens, triton.cdiv(features, _BLOCK), sums, dtype=torch.float32),
        )


def add_to_streams(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    *,
    eps: float,
) -> None:
    """residual[s] += open[s] x, in place and rounded to its dtype; then m = weight · flat(residual) / rms, and

    - read[s] = sigmoid(m[s] scale[0] + base[s]) + gates.eps
    - open[s] = magnitude sigmoid(m[S + s] scale[1] + base[S + s]) + gates.eps, where there are so many gates
    - out = rms_norm(sum over s of read[s] residual[s], rounded to the residual's dtype)

    Without `gates` nothing but the first happens. All is computed in fp32; a token's bits are the same in any call.
    `residual_TSE` is contiguous, rows of `x_TE` and `out_TE` may be strided; `out_TE` may be `x_TE`. All three and
    `weight_E` may have any floating dtype, on a GPU up to fp32.
    """
    if x_TE.is_cuda:
        launch_add_to_streams(x_TE, residual_TSE, memory, gates, weight_E, out_TE, eps)
    else:
        add_to_streams_reference(x_TE, residual_TSE, memory, gates, weight_E, out_TE, eps)


def add_to_streams_reference(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
) -> None:
    """`add_to_streams` in plain torch."""
    compute, streams = torch.promote_types(residual_TSE.dtype, torch.float32), residual_TSE.shape[1]
    added_TSE = memory.open_TS.unsqueeze(2) * x_TE.to(compute).unsqueeze(1)
    residual_TSE.copy_(residual_TSE.to(compute) + added_TSE)
    if gates is None:
        return
    normed_TF = residual_TSE.flatten(1).to(compute)
    normed_TF = F.rms_norm(normed_TF, normed_TF.shape[1:], None, gates.norm_eps)
    made_TM = torch.empty(len(x_TE), len(gates.base_M), dtype=compute)
    invariant_linear(normed_TF, gates.weight_MF, made_TM)
    made_TM = made_TM * gates.scale_G.repeat_interleave(streams) + gates.base_M
    gate_TM = deterministic_math.sigmoid(made_TM)
    if gate_TM.shape[1] > streams:
        memory.open_TS.copy_(gates.magnitude * gate_TM[:, streams:] + gates.eps)
    read_TS1 = (gate_TM[:, :streams] + gates.eps).unsqueeze(2)
    # One after the other: torch's sum over a dimension has another order for few tokens.
    sum_TE = torch.zeros(x_TE.shape, dtype=compute)
    for stream in range(streams):
        sum_TE += read_TS1[:, stream] * residual_TSE[:, stream].to(compute)
    rounded_TE = sum_TE.to(residual_TSE.dtype).to(compute)
    out_TE.copy_(F.rms_norm(rounded_TE, weight_E.shape, weight_E.to(compute), eps))


def launch_add_to_streams(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
) -> None:
    """`add_to_streams` as two Triton kernels: one adds and takes parts of the sums, the other reads."""
    tokens, streams, features = residual_TSE.shape
    if not tokens:
        return
    if x_TE.stride(1) != 1 or out_TE.stride(1) != 1 or not residual_TSE.is_contiguous():
        raise ValueError("features of tokens lie side by side, and the residual streams are contiguous")
    parts, made = triton.cdiv(features, _BLOCK), 0 if gates is None else len(gates.base_M)
    if memory.part_TPX.shape[:2] != (tokens, parts) or made not in (0, streams, 2 * streams):
        raise ValueError(
            f"memory for {tuple(memory.part_TPX.shape[:2])} parts and {made} gates do not fit {tokens} tokens of "
            f"{streams} streams of {features} features"
        )
    weight_MF = memory.part_TPX if gates is None else gates.weight_MF
    add_to_streams_kernel[(tokens, parts)](
        x_TE,
        residual_TSE,
        memory.open_TS,
        weight_MF,
        memory.part_TPX,
        X_STRIDE=x_TE.stride(0),
        FEATURES=features,
        STREAMS=streams,
        GATES=made,
        LANES=max(triton.next_power_of_2(made), 1),
        PART=memory.part_TPX.stride(1),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    if gates is None:
        return
    block = triton.next_power_of_2(features)
    read_streams_kernel[(tokens,)](
        residual_TSE,
        memory.open_TS,
        gates.base_M,
        gates.scale_G,
        memory.part_TPX,
        weight_E,
        out_TE,
        eps,
        gates.eps,
        gates.norm_eps,
        gates.magnitude,
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        STREAMS=streams,
        GATES=made,
        LANES=triton.next_power_of_2(made),
        PARTS=parts,
        PART_LANES=triton.next_power_of_2(parts),
        PART=memory.part_TPX.stride(1),
        BLOCK=block,
        num_warps=min(max(block // 512, 1), 16),
    )


@triton.jit
def add_to_streams_kernel(
    x,
    residual,
    open_gate,
    weight,
    part,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token and a block of features of all of its streams. Sums of their squares, and of their products with the rows
    of `weight`, go to `part`."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = block * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, LANES)
    inside = e < FEATURES
    added = tl.load(x + token * X_STRIDE + e, mask=inside, other=0.0).to(tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([LANES, BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        at = residual + (token * STREAMS + stream) * FEATURES + e
        value = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        value += tl.load(open_gate + token * STREAMS + stream) * added
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        if GATES:
            value = rounded.to(tl.float32)
            square += value * value
            row = weight + m[:, None] * (STREAMS * FEATURES) + stream * FEATURES + e[None, :]
            product += tl.load(row, mask=(m[:, None] < GATES) & inside[None, :], other=0.0) * value[None, :]
    if GATES:
        to = part + (token * tl.num_programs(1) + block) * PART
        tl.store(to + m, tl.sum(product, 1))
        tl.store(to + LANES, tl.sum(square, 0))


@triton.jit
def read_streams_kernel(
    residual,
    open_gate,
    base,
    scale,
    part,
    weight,
    out,
    eps,
    gate_eps,
    norm_eps,
    magnitude,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A token: its gates of the parts of their sums, the sum of its streams by those, and the norm of that."""
    token = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, LANES)
    p = tl.arange(0, PART_LANES)
    e = tl.arange(0, BLOCK)
    made_gate, inside = m < GATES, e < FEATURES
    begin = part + (token * PARTS + p) * PART
    sums = tl.load(begin[:, None] + m[None, :], mask=(p[:, None] < PARTS) & made_gate[None, :], other=0.0)
    square = tl.sum(tl.load(begin + LANES, mask=p < PARTS, other=0.0), 0)
    made = tl.sum(sums, 0) * tl.rsqrt(square / (STREAMS * FEATURES) + norm_eps)
    factor = tl.load(scale + m // STREAMS, mask=made_gate, other=0.0)
    gate = tl.sigmoid(made * factor + tl.load(base + m, mask=made_gate, other=0.0))
    if GATES > STREAMS:
        added = magnitude * gate + gate_eps
        tl.store(open_gate + token * STREAMS + m - STREAMS, added, mask=made_gate & (m >= STREAMS))
    read = gate + gate_eps
    total = tl.zeros([BLOCK], tl.float32)
    for stream in tl.static_range(STREAMS):
        value = tl.load(residual + (token * STREAMS + stream) * FEATURES + e, mask=inside, other=0.0)
        total += tl.sum(tl.where(m == stream, read, 0.0), 0) * value.to(tl.float32)
    total = total.to(residual.dtype.element_ty).to(tl.float32)
    normed = total * tl.rsqrt(tl.sum(total * total, 0) / FEATURES + eps)
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * OUT_STRIDE + e, (normed * w).to(out.dtype.element_ty), mask=inside)
