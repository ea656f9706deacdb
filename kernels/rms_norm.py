"""Root-mean-square layer normalisation, alone and with the residual addition before it.

Shape legend: T tokens, E features, P parts.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.parts import added, sum_of_parts
from kernels.residual_streams import StreamGates, StreamMemory


@dataclass(frozen=True)
class AddNorm:
    """Treatment of a sum x: residual += x, in place and rounded to its dtype, then out = rms_norm(residual). Where
    there are several residual streams: `kernels.residual_streams.add_to_streams`."""

    residual_TE: Tensor
    """The residual stream, or several of them, [T, S, E]."""
    weight_E: Tensor
    eps: float
    gates: StreamGates | None = None
    """By which several streams are read."""
    memory: StreamMemory | None = None
    """Of several streams; None where there is one."""

    @property
    def sum_alone(self) -> AddNorm:
        """The treatment of a part of x before the last one: of several streams nothing is read then, and `out` is not
        written."""
        return replace(self, gates=None)


def rms_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    *,
    eps: float,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, computed in fp32 and rounded once (Zhang and Sennrich, 2019), each row
    times its `scale_T` (fp32) if there is one.

    Any floating dtype (on a GPU up to fp32); the last dimension of every tensor is contiguous, rows may be strided.
    `out_TE` may be `x_TE`. `dependent`: programmatic dependent launch (compute capability 9.0 and above), which is
    always safe.
    """
    if x_TE.is_cuda:
        launch_rms_norm(x_TE, weight_E, out_TE, eps, scale_T=scale_T, dependent=dependent)
    else:
        rms_norm_reference(x_TE, weight_E, out_TE, eps, scale_T)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, *, eps: float, dependent: bool = False
) -> None:
    """residual += x (in place, rounded to its dtype), then out = rms_norm(residual).

    `out_TE` may be `x_TE`, but not `residual_TE`. `x_TE` may be parts in fp32, [T, P, E], as `part_linear` leaves them:
    they are added in their order, and the sum is rounded to the residual's dtype. A dependent launch is safe then when
    the kernel before has not written the residual and lets its successor start after its own wait only.
    """
    if x_TE.is_cuda:
        launch_add_rms_norm(x_TE, residual_TE, weight_E, out_TE, eps, dependent=dependent)
    else:
        add_rms_norm_reference(x_TE, residual_TE, weight_E, out_TE, eps)


def enter_rms_norm(
    rows_YE: Tensor,
    id_T: Tensor | None,
    residual_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """residual = rows `id_T` (int64, each below Y) of `rows_YE`, or without ids `rows_YE` itself; out =
    rms_norm(residual). `residual_TE` and `out_TE` are contiguous and share no memory with anything else."""
    if rows_YE.is_cuda:
        launch_enter_rms_norm(rows_YE, id_T, residual_TE, weight_E, out_TE, eps, dependent=dependent)
    elif id_T is None:
        residual_TE.copy_(rows_YE)
        rms_norm_reference(residual_TE, weight_E, out_TE, eps)
    else:
        torch.index_select(rows_YE, 0, id_T, out=residual_TE)
        rms_norm_reference(residual_TE, weight_E, out_TE, eps)


def rms_norm_reference(
    x_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float, scale_T: Tensor | None = None
) -> None:
    """`rms_norm` in plain torch."""
    compute = torch.promote_types(x_TE.dtype, torch.float32)
    normed_TE = F.rms_norm(x_TE.to(compute), weight_E.shape, weight_E.to(compute), eps)
    out_TE.copy_(normed_TE if scale_T is None else normed_TE * scale_T.unsqueeze(1))


def add_rms_norm_reference(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float) -> None:
    """`add_rms_norm` in plain torch."""
    if x_TE.dim() == 3:
        x_TE = added(x_TE, residual_TE.dtype)
    residual_TE.add_(x_TE)
    rms_norm_reference(residual_TE, weight_E, out_TE, eps)


def launch_rms_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
    *,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """`rms_norm` as a Triton kernel."""
    _launch(x_TE, None, weight_E, out_TE, eps, dependent, scale_T)


def launch_add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, out_TE: Tensor, eps: float, *, dependent: bool = False
) -> None:
    """`add_rms_norm` as a Triton kernel."""
    _launch(x_TE, residual_TE, weight_E, out_TE, eps, dependent)


def launch_enter_rms_norm(
    rows_YE: Tensor,
    id_T: Tensor | None,
    residual_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
    *,
    dependent: bool = False,
) -> None:
    """`enter_rms_norm` as a Triton kernel."""
    _launch(rows_YE, residual_TE, weight_E, out_TE, eps, dependent, id_T=id_T, enter=True)


def _launch(
    x_TE: Tensor,
    residual_TE: Tensor | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
    dependent: bool,
    scale_T: Tensor | None = None,
    *,
    id_T: Tensor | None = None,
    enter: bool = False,
) -> None:
    _, *parts, features = x_TE.shape
    tokens = out_TE.shape[0]
    if not tokens:
        return
    block = triton.next_power_of_2(features)
    warps = min(max(block // 512, 1), 8)
    if parts:  # a thread holds all parts of its features at once, 32 values or little more
        warps = min(max(parts[0] * block // 1024, warps), 16)
    rms_norm_kernel[(tokens,)](
        x_TE,
        x_TE if residual_TE is None else residual_TE,
        weight_E,
        out_TE,
        weight_E if scale_T is None else scale_T,
        out_TE if id_T is None else id_T,
        eps,
        X_STRIDE=x_TE.stride(0),
        X_PART=x_TE.stride(1) if parts else 0,
        PARTS=parts[0] if parts else 0,
        RESIDUAL_STRIDE=0 if residual_TE is None else residual_TE.stride(0),
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        BLOCK=block,
        ADD=residual_TE is not None and not enter,
        SCALED=scale_T is not None,
        ENTER=enter,
        BY_ID=id_T is not None,
        DEPENDENT=dependent,
        num_warps=warps,
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit
def rms_norm_kernel(
    x,
    residual,
    weight,
    out,
    row_scale,
    ids,
    eps,
    X_STRIDE: tl.constexpr,
    X_PART: tl.constexpr,
    PARTS: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    SCALED: tl.constexpr,
    ENTER: tl.constexpr,
    BY_ID: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """A whole row, so that the order of the sum depends on the row's length alone. With ADD: residual += x first,
    rounded to its dtype, and the norm is of the rounded sum. With PARTS x is as many parts, whose sum is rounded
    before. Then the residual is read before the wait. With SCALED a row is multiplied by its `row_scale`. With ENTER:
    residual = x, and BY_ID x is the row of that id."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    inside = e < FEATURES
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    at = residual + row * RESIDUAL_STRIDE + e
    if PARTS:
        before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    if PARTS:
        value = sum_of_parts(x + row * X_STRIDE + e, inside, X_PART, PARTS).to(residual.dtype.element_ty).to(tl.float32)
    else:
        source = tl.load(ids + row, cache_modifier=".cg") if BY_ID else row
        value = tl.load(x + source * X_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ENTER:
        tl.store(
            at, value.to(residual.dtype.element_ty), mask=inside, eviction_policy="evict_last" if DEPENDENT else ""
        )
    if ADD:
        if not PARTS:
            before = tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        value += before
        rounded = value.to(residual.dtype.element_ty)
        tl.store(at, rounded, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / FEATURES + eps)
    if SCALED:
        scale *= tl.load(row_scale + row, cache_modifier=".cg")
    normed = (value * scale * w).to(out.dtype.element_ty)
    tl.store(out + row * OUT_STRIDE + e, normed, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
