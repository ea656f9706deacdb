"""Several residual streams in place of one: a part of a layer reads a weighted sum of them, and each stream adds the
part's output times a weight of its own. Both weights are sigmoids of a small product of all streams.

That is hyper-connections (Zhu et al., 2024) in the form of Hy4 (Tencent, 2026), without mixing of the streams among
each other, or in that of DeepSeek V4 (2026): there a nearly doubly stochastic matrix mixes them before a part's output
is added (manifold-constrained hyper-connections, 2026, sections 2.2 and 4).

Shape legend: T tokens, S streams, E features of each, F = S E, M gates (S of what is read, behind them S of what is
added, and S S of the mixing where there is any; those of a model's end are S alone), P parts of their sums, X = M
rounded up to a power of two, and one.
"""

# ruff: noqa: RUF005
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment, misc"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import deterministic_math
from kernels.linear.reference import invariant_linear

_BLOCK: Final = 512
"""Features of every stream that a program of the first kernel takes. Sums have one order, which follows from it."""
_MIXED_BLOCK: Final = 128
"""The same where streams are mixed, which takes so many gates that their sums of more would not find registers."""
_MOST_EARLY: Final = 16
"""Most tokens whose programs ask for the weights of gates before they wait for the kernel before: of more, programs
that hold them so long leave no room for others."""


@dataclass(frozen=True)
class StreamGates:
    """The weights by which streams are read before a part of a layer and added to behind it."""

    weight_MF: Tensor
    """fp32."""
    base_M: Tensor
    """fp32."""
    scale_G: Tensor
    """fp32: a factor for the gates of what is read, and one for those of what is added and of the mixing, where there
    are such."""
    magnitude: float
    """The most that a gate of what is added is, but for `eps`."""
    eps: float
    """Number that is added to every gate, with mixing to all but those of what is added."""
    norm_eps: float
    """Epsilon of the norm of all streams' features, which the product reads."""
    mixing_steps: int = 0
    """How often the columns of the mixing matrix are divided by their sums, and between two times its rows; 0: nothing
    mixes the streams."""


@dataclass(frozen=True)
class StreamMemory:
    """What a pass keeps of its streams beside them."""

    open_TS: Tensor
    """fp32: gates of what is added next."""
    part_TPX: Tensor
    """fp32: parts of sums, of one call alone."""
    mix_TSS: Tensor | None = None
    """fp32: the matrix by which the streams are mixed next, new[k] = sum over j of mix[j, k] old[j], where there is
    one."""
    read_TE: Tensor | None = None
    """Receives the sum of the streams before its norm, where somebody wants it; contiguous, in their dtype."""

    @staticmethod
    def empty(
        tokens: int, streams: int, features: int, empty: Callable[..., Tensor], *, mixing: bool = False
    ) -> StreamMemory:
        """Uninitialised; `empty(*shape, dtype=)` gives memory."""
        sums = triton.next_power_of_2((2 + streams * mixing) * streams) + 1
        return StreamMemory(
            empty(tokens, streams, dtype=torch.float32),
            empty(tokens, triton.cdiv(features, _MIXED_BLOCK if mixing else _BLOCK), sums, dtype=torch.float32),
            empty(tokens, streams, streams, dtype=torch.float32) if mixing else None,
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
    dependent: bool = False,
) -> None:
    """residual[s] += open[s] x, in place and rounded to its dtype, of streams that were mixed before where the memory
    has a matrix; then m = weight · flat(residual) / rms, and

    - read[s] = sigmoid(m[s] scale[0] + base[s]) + gates.eps
    - open[s] = magnitude sigmoid(m[S + s] scale[1] + base[S + s]) + gates.eps, where there are so many gates
    - mix = softmax of the rows of m[2S:] scale[2] + base[2S:], plus gates.eps, where the streams are mixed; then
      columns, and `mixing_steps` - 1 times rows and columns, are divided by (their sums + gates.eps)
    - out = rms_norm(sum over s of read[s] residual[s], rounded to the residual's dtype), and that sum itself is left in
      the memory, where it has room for it

    Without `gates` nothing but the first happens. All is computed in fp32; a token's bits are the same in any call.
    `residual_TSE` is contiguous, rows of `x_TE` and `out_TE` may be strided; `out_TE` may be `x_TE`. All three and
    `weight_E` may have any floating dtype, on a GPU up to fp32. `dependent`: programmatic dependent launch.
    """
    if x_TE.is_cuda:
        launch_add_to_streams(x_TE, residual_TSE, memory, gates, weight_E, out_TE, eps, dependent=dependent)
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
    stream_TSE = residual_TSE.to(compute)
    if memory.mix_TSS is not None:
        mix_TSS1, old_TSE = memory.mix_TSS.unsqueeze(3), stream_TSE
        stream_TSE = mix_TSS1[:, 0] * old_TSE[:, :1]
        for stream in range(1, streams):
            stream_TSE = stream_TSE + mix_TSS1[:, stream] * old_TSE[:, stream : stream + 1]
    residual_TSE.copy_(stream_TSE + memory.open_TS.unsqueeze(2) * x_TE.to(compute).unsqueeze(1))
    if gates is None:
        return
    normed_TF = residual_TSE.flatten(1).to(compute)
    normed_TF = F.rms_norm(normed_TF, normed_TF.shape[1:], None, gates.norm_eps)
    made_TM = torch.empty(len(x_TE), len(gates.base_M), dtype=compute)
    invariant_linear(normed_TF, gates.weight_MF, made_TM)
    kind_M = (torch.arange(made_TM.shape[1]) // streams).clamp(max=2)
    made_TM = made_TM * gates.scale_G[kind_M] + gates.base_M
    gate_TM = deterministic_math.sigmoid(made_TM[:, : 2 * streams])
    if gate_TM.shape[1] > streams:
        eps_of_added = 0.0 if gates.mixing_steps else gates.eps
        memory.open_TS.copy_(gates.magnitude * gate_TM[:, streams:] + eps_of_added)
    if gates.mixing_steps:
        assert memory.mix_TSS is not None
        memory.mix_TSS.copy_(_mixing(made_TM[:, 2 * streams :].reshape(memory.mix_TSS.shape), gates))
    read_TS1 = (gate_TM[:, :streams] + gates.eps).unsqueeze(2)
    # One after the other: torch's sum over a dimension has another order for few tokens.
    sum_TE = torch.zeros(x_TE.shape, dtype=compute)
    for stream in range(streams):
        sum_TE += read_TS1[:, stream] * residual_TSE[:, stream].to(compute)
    rounded_TE = sum_TE.to(residual_TSE.dtype).to(compute)
    if memory.read_TE is not None:
        memory.read_TE.copy_(rounded_TE)
    out_TE.copy_(F.rms_norm(rounded_TE, weight_E.shape, weight_E.to(compute), eps))


def _mixing(made_TSS: Tensor, gates: StreamGates) -> Tensor:
    """The matrix of the gates of the mixing."""
    power_TSS = deterministic_math.exp(made_TSS - made_TSS.amax(2, keepdim=True))
    mix_TSS = power_TSS / power_TSS.sum(2, keepdim=True) + gates.eps
    for step in range(gates.mixing_steps):
        if step:
            mix_TSS = mix_TSS / (mix_TSS.sum(2, keepdim=True) + gates.eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(1, keepdim=True) + gates.eps)
    return mix_TSS


def launch_add_to_streams(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    """`add_to_streams` as two Triton kernels: one adds and takes parts of the sums, the other reads."""
    tokens, streams, features = residual_TSE.shape
    if not tokens:
        return
    if x_TE.stride(1) != 1 or out_TE.stride(1) != 1 or not residual_TSE.is_contiguous():
        raise ValueError("features of tokens lie side by side, and the residual streams are contiguous")
    block = _BLOCK if memory.mix_TSS is None else _MIXED_BLOCK
    parts, made = triton.cdiv(features, block), 0 if gates is None else len(gates.base_M)
    steps = 0 if gates is None else gates.mixing_steps
    counts = ((2 + streams) * streams,) if steps else (0, streams, 2 * streams)
    if memory.part_TPX.shape[:2] != (tokens, parts) or made not in counts or (steps and memory.mix_TSS is None):
        raise ValueError(
            f"memory for {tuple(memory.part_TPX.shape[:2])} parts and {made} gates do not fit {tokens} tokens of "
            f"{streams} streams of {features} features"
        )
    read_TE = memory.read_TE
    if read_TE is not None and not (read_TE.is_contiguous() and read_TE.shape == (tokens, features)):
        raise ValueError(f"the sums of {tokens} tokens do not fit memory of {tuple(read_TE.shape)}")
    weight_MF = memory.part_TPX if gates is None else gates.weight_MF
    mix_TSS = memory.open_TS if memory.mix_TSS is None else memory.mix_TSS
    launched: dict[str, Any] = {"DEPENDENT": dependent, **({"launch_pdl": True} if dependent else {})}
    add_to_streams_kernel[(tokens, parts)](
        x_TE,
        residual_TSE,
        memory.open_TS,
        mix_TSS,
        weight_MF,
        memory.part_TPX,
        X_STRIDE=x_TE.stride(0),
        FEATURES=features,
        STREAMS=streams,
        GATES=made,
        LANES=max(triton.next_power_of_2(made), 1),
        PART=memory.part_TPX.stride(1),
        MIXED=memory.mix_TSS is not None,
        EARLY=dependent and tokens <= _MOST_EARLY,
        BLOCK=block,
        num_warps=4,
        **launched,
    )
    if gates is None:
        return
    lanes = triton.next_power_of_2(features)
    read_streams_kernel[(tokens, 2 if steps else 1)](
        residual_TSE,
        memory.open_TS,
        mix_TSS,
        gates.base_M,
        gates.scale_G,
        memory.part_TPX,
        weight_E,
        out_TE,
        out_TE if read_TE is None else read_TE,
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
        STEPS=steps,
        KEEP=read_TE is not None,
        BLOCK=lanes,
        num_warps=min(max(lanes // 512, 1), 16),
        **launched,
    )


@triton.jit
def add_to_streams_kernel(
    x,
    residual,
    open_gate,
    mix,
    weight,
    part,
    X_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    STREAMS: tl.constexpr,
    GATES: tl.constexpr,
    LANES: tl.constexpr,
    PART: tl.constexpr,
    MIXED: tl.constexpr,
    EARLY: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token and a block of features of all of its streams, which `mix` mixes if MIXED. Sums of their squares, and of
    their products with the rows of `weight`, which is asked for before the wait if EARLY, go to `part`."""
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    e = block * BLOCK + tl.arange(0, BLOCK)
    m = tl.arange(0, LANES)
    inside = e < FEATURES
    row = weight + m[:, None] * (STREAMS * FEATURES) + e[None, :]
    asked = (m[:, None] < GATES) & inside[None, :]
    early = ()
    if GATES and EARLY:
        for stream in tl.static_range(STREAMS):
            early = early + (tl.load(row + stream * FEATURES, mask=asked, other=0.0),)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    added = tl.load(x + token * X_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    product = tl.zeros([LANES, BLOCK], tl.float32)
    begin = residual + token * STREAMS * FEATURES + e
    old = ()
    if MIXED:
        for stream in tl.static_range(STREAMS):
            old_at = begin + stream * FEATURES
            old = old + (tl.load(old_at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32),)
    for stream in tl.static_range(STREAMS):
        at = begin + stream * FEATURES
        if MIXED:
            mix_at = mix + token * STREAMS * STREAMS + stream
            value = tl.load(mix_at, cache_modifier=".cg") * old[0]
            for other in tl.static_range(1, STREAMS):
                value += tl.load(mix_at + other * STREAMS, cache_modifier=".cg") * old[other]
        else:
            value = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        value += tl.load(open_gate + token * STREAMS + stream, cache_modifier=".cg") * added
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside)
        if GATES:
            value = rounded.to(tl.float32)
            square += value * value
            if EARLY:
                product += early[stream] * value[None, :]
            else:
                product += tl.load(row + stream * FEATURES, mask=asked, other=0.0) * value[None, :]
    if GATES:
        to = part + (token * tl.num_programs(1) + block) * PART
        tl.store(to + m, tl.sum(product, 1))
        tl.store(to + LANES, tl.sum(square, 0))


@triton.jit
def _columns(mix, eps, STREAMS: tl.constexpr):
    """Divide the columns of a matrix, a tuple of its numbers row by row, by their sums and eps."""
    inverse = ()
    for j in tl.static_range(STREAMS):
        total = mix[j] + eps
        for i in tl.static_range(1, STREAMS):
            total += mix[i * STREAMS + j]
        inverse = inverse + (1 / total,)
    out = ()
    for i in tl.static_range(STREAMS):
        for j in tl.static_range(STREAMS):
            out = out + (mix[i * STREAMS + j] * inverse[j],)
    return out


@triton.jit
def _rows(mix, eps, STREAMS: tl.constexpr):
    """Divide the rows, as `_columns` does columns."""
    out = ()
    for i in tl.static_range(STREAMS):
        total = mix[i * STREAMS] + eps
        for j in tl.static_range(1, STREAMS):
            total += mix[i * STREAMS + j]
        inverse = 1 / total
        for j in tl.static_range(STREAMS):
            out = out + (mix[i * STREAMS + j] * inverse,)
    return out


@triton.jit
def _mixing_matrix(made, m, eps, STREAMS: tl.constexpr, STEPS: tl.constexpr):
    """The numbers of the mixing matrix, row by row, of what was made of all gates. Every thread computes all of them:
    sums of so few numbers over lanes would take longer."""
    mix = ()
    for i in tl.static_range(STREAMS):
        row = ()
        most = float("-inf")
        for j in tl.static_range(STREAMS):
            row = row + (tl.sum(tl.where(m == (2 + i) * STREAMS + j, made, 0.0), 0),)
            most = tl.maximum(most, row[j])
        total = 0.0
        power = ()
        for j in tl.static_range(STREAMS):
            power = power + (tl.exp(row[j] - most),)
            total += power[j]
        for j in tl.static_range(STREAMS):
            mix = mix + (power[j] / total + eps,)
    mix = _columns(mix, eps, STREAMS)
    for _step in range(STEPS - 1):
        mix = _columns(_rows(mix, eps, STREAMS), eps, STREAMS)
    return mix


@triton.jit
def read_streams_kernel(
    residual,
    open_gate,
    mix,
    base,
    scale,
    part,
    weight,
    out,
    read_sum,
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
    STEPS: tl.constexpr,
    KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A token's gates, of the parts of their sums. Program (token, 0): the sum of its streams by those, which KEEP
    leaves in `read_sum`, and the norm of that; with STEPS (token, 1): its mixing matrix, which takes as long."""
    token = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, LANES)
    p = tl.arange(0, PART_LANES)
    e = tl.arange(0, BLOCK)
    made_gate, inside = m < GATES, e < FEATURES
    factor = tl.load(scale + tl.minimum(m // STREAMS, 2), mask=made_gate, other=0.0)
    shift = tl.load(base + m, mask=made_gate, other=0.0)
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    begin = part + (token * PARTS + p) * PART
    there = (p[:, None] < PARTS) & made_gate[None, :]
    sums = tl.load(begin[:, None] + m[None, :], mask=there, other=0.0, cache_modifier=".cg")
    square = tl.sum(tl.load(begin + LANES, mask=p < PARTS, other=0.0, cache_modifier=".cg"), 0)
    made = tl.sum(sums, 0) * tl.rsqrt(square / (STREAMS * FEATURES) + norm_eps)
    made = made * factor + shift
    if STEPS:  # noqa: SIM102 - the first is known to the compiler
        if tl.program_id(1) == 1:
            matrix = _mixing_matrix(made, m, gate_eps, STREAMS, STEPS)
            for number in tl.static_range(STREAMS * STREAMS):
                tl.store(mix + token * STREAMS * STREAMS + number, matrix[number])
    if tl.program_id(1) == 0:
        gate = tl.sigmoid(made)
        if GATES > STREAMS:
            added = magnitude * gate
            if STEPS == 0:
                added += gate_eps
            opened = (m >= STREAMS) & (m < 2 * STREAMS)
            tl.store(open_gate + token * STREAMS + m - STREAMS, added, mask=opened)
        read = gate + gate_eps
        total = tl.zeros([BLOCK], tl.float32)
        for stream in tl.static_range(STREAMS):
            at = residual + (token * STREAMS + stream) * FEATURES + e
            value = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg")
            total += tl.sum(tl.where(m == stream, read, 0.0), 0) * value.to(tl.float32)
        total = total.to(residual.dtype.element_ty).to(tl.float32)
        if KEEP:
            tl.store(read_sum + token * FEATURES + e, total.to(read_sum.dtype.element_ty), mask=inside)
        normed = total * tl.rsqrt(tl.sum(total * total, 0) / FEATURES + eps)
        tl.store(out + token * OUT_STRIDE + e, (normed * w).to(out.dtype.element_ty), mask=inside)
