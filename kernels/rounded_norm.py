"""Root-mean-square layer normalisation whose result is also rounded to FP8, for the products that read it so: with the
residual addition before it or without, in one kernel.

Shape legend: T tokens, E features, F output features, A features of a norm of the first of them, R rows: tokens to a
multiple that products want, G = E / 128 groups of features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.linear import stream_k_launch
from kernels.linear.w8a8 import w8a8_pieces, w8a8_reference
from kernels.matrix import BlockScaled
from kernels.quantize import GROUP, Fp8Rows, quantize_reference, store_rounded
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference

_GROUP = tl.constexpr(GROUP)


def rounded_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    rounded: Fp8Rows,
    *,
    eps: float,
    residual_TE: Tensor | None = None,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """`kernels.rms_norm.rms_norm`, or `add_rms_norm` where there is a residual, and of its result
    `kernels.quantize.quantize`: to the bit, but for the order of the sum of squares.

    E is a multiple of 128. `out_TE` may be `x_TE`; all else as there. ValueError where shapes do not fit.
    """
    tokens, features = x_TE.shape
    if features % GROUP:
        raise ValueError(f"{features} features are no whole groups of {GROUP}")
    if rounded.number_RK.shape[0] < tokens or rounded.number_RK.shape[1] != features:
        raise ValueError(f"{tuple(x_TE.shape)} numbers do not go into {tuple(rounded.number_RK.shape)}")
    if not x_TE.is_cuda:
        if residual_TE is None:
            rms_norm_reference(x_TE, weight_E, out_TE, eps, scale_T)
        else:
            add_rms_norm_reference(x_TE, residual_TE, weight_E, out_TE, eps)
        quantize_reference(out_TE, *rounded.of(tokens))
        if rounded.by_token_TG is not None:
            rounded.by_token_TG.copy_(rounded.scale_RG[:tokens])
        return
    launch_rounded_norm(x_TE, weight_E, out_TE, rounded, eps, residual_TE, scale_T, dependent=dependent)


def w8a8_latent(
    x: Fp8Rows,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    norm_A: Tensor,
    normed_TA: Tensor,
    rounded: Fp8Rows,
    *,
    pieces: Tensor,
    eps: float,
    scale_T: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """`kernels.linear.w8a8_linear` with pieces, and `rounded_norm` of the first A columns of what it makes, in
    one launch less than that takes where blocks have few pieces: A is a multiple of 128."""
    if tuple(pieces.shape) != w8a8_pieces(out_TF.shape[0], weight_FE) or norm_A.shape[0] % GROUP:
        raise ValueError(f"no norm of {norm_A.shape[0]} features behind pieces {tuple(pieces.shape)}")
    if x.number_RK.is_cuda:
        product = x.number_RK, x.scale_RG, weight_FE, out_TF, pieces
        if stream_k_launch.norms_pieces(weight_FE):
            stream_k_launch.stream_k_norm(*product, norm_A, normed_TA, rounded, eps, scale_T, dependent=dependent)
            return
        stream_k_launch.stream_k(*product, dependent=dependent)
        made_TA = out_TF[:, : norm_A.shape[0]]
        launch_rounded_norm(made_TA, norm_A, normed_TA, rounded, eps, scale_T=scale_T, dependent=dependent)
        return
    w8a8_reference(*x.of(out_TF.shape[0]), weight_FE, out_TF)
    rounded_norm(out_TF[:, : norm_A.shape[0]], norm_A, normed_TA, rounded, eps=eps, scale_T=scale_T)


def w8a8_add_norm(
    x: Fp8Rows,
    weight_EF: BlockScaled,
    residual_TE: Tensor,
    norm_E: Tensor,
    out_TE: Tensor,
    rounded: Fp8Rows,
    *,
    pieces: Tensor,
    eps: float,
    dependent: bool = False,
) -> None:
    """`kernels.linear.w8a8_linear` with pieces, and `rounded_norm` of what it makes with that residual, in one launch
    less than that takes, to the bit but for the order of the sum of squares. E is a multiple of 128; `out_TE` is
    contiguous."""
    if tuple(pieces.shape) != w8a8_pieces(out_TE.shape[0], weight_EF) or norm_E.shape[0] % GROUP:
        raise ValueError(f"no norm of {norm_E.shape[0]} features behind pieces {tuple(pieces.shape)}")
    if x.number_RK.is_cuda:
        product = x.number_RK, x.scale_RG, weight_EF, out_TE, pieces
        into = norm_E, out_TE, rounded, eps
        stream_k_launch.stream_k_norm(*product, *into, residual_TF=residual_TE, dependent=dependent)
        return
    w8a8_reference(*x.of(out_TE.shape[0]), weight_EF, out_TE)
    rounded_norm(out_TE, norm_E, out_TE, rounded, eps=eps, residual_TE=residual_TE)


def launch_rounded_norm(
    x_TE: Tensor,
    weight_E: Tensor,
    out_TE: Tensor,
    rounded: Fp8Rows,
    eps: float,
    residual_TE: Tensor | None = None,
    scale_T: Tensor | None = None,
    *,
    dependent: bool = False,
) -> None:
    """`rounded_norm` as a Triton kernel."""
    tokens, features = x_TE.shape
    if not tokens:
        return
    groups = triton.next_power_of_2(features // GROUP)
    rounded_norm_kernel[(tokens,)](
        x_TE,
        x_TE if residual_TE is None else residual_TE,
        weight_E,
        weight_E if scale_T is None else scale_T,
        out_TE,
        rounded.number_RK,
        rounded.scale_RG,
        rounded.scale_RG if rounded.by_token_TG is None else rounded.by_token_TG,
        eps,
        rounded.scale_RG.stride(1),
        X_STRIDE=x_TE.stride(0),
        RESIDUAL_STRIDE=0 if residual_TE is None else residual_TE.stride(0),
        OUT_STRIDE=out_TE.stride(0),
        FEATURES=features,
        GROUPS=groups,
        ADD=residual_TE is not None,
        SCALED=scale_T is not None,
        TWICE=rounded.by_token_TG is not None,
        DEPENDENT=dependent,
        num_warps=min(max(groups // 4, 1), 16),
        **({"launch_pdl": True} if dependent else {}),
    )


@triton.jit(do_not_specialize=["scale_column"])
def rounded_norm_kernel(
    x, residual, weight, row_scale, out, number, scale, by_token, eps, scale_column,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr, FEATURES: tl.constexpr,
    GROUPS: tl.constexpr, ADD: tl.constexpr, SCALED: tl.constexpr, TWICE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A whole row. With ADD: residual += x first, rounded to its dtype, and the norm is of the rounded sum. With SCALED
    a row is multiplied by its `row_scale`. The scale of a token's group lies at token + group * `scale_column`; TWICE
    also at token * groups + group of `by_token`."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, GROUPS)
    e = group[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    inside = e < FEATURES
    w = tl.load(weight + e, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    # .cg: a dependent launch may find lines of an earlier kernel in L1.
    value = tl.load(x + row * X_STRIDE + e, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    if ADD:
        at = residual + row * RESIDUAL_STRIDE + e
        value += tl.load(at, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
        kept = value.to(residual.dtype.element_ty)
        tl.store(at, kept, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
        value = kept.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / FEATURES + eps)
    if SCALED:
        factor *= tl.load(row_scale + row, cache_modifier=".cg")
    normed = (value * factor * w).to(out.dtype.element_ty)
    tl.store(out + row * OUT_STRIDE + e, normed, mask=inside, eviction_policy="evict_last" if DEPENDENT else "")
    to = scale + row + group.to(tl.int64) * scale_column
    there = group * _GROUP < FEATURES
    factor = store_rounded(normed.to(tl.float32), number + row * FEATURES + e, to, inside, there)
    if TWICE:
        tl.store(by_token + row * (FEATURES // _GROUP) + group, factor, mask=there)
