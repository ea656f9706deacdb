"""Computations between an indexer's products and its scores: LayerNorm of the keys, rope of queries and keys, factors
of the heads' weights.

Shape legend: T tokens, J indexer heads, I features of a query or key, X = I + J, O <= I rope features.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from kernels.index_entry import encode
from kernels.index_rope import kernel
from kernels.index_rope.hadamard import spread, stages_of

_GROUP = 16
"""Heads a program rotates."""


def index_rope(
    q_TJI: Tensor,
    both_TX: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    rotation_TO: Tensor,
    key_TI: Tensor,
    weight_TJ: Tensor,
    *,
    eps: float,
    factor: float,
    code_TJI: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Norm the keys, rotate the first O features of keys, and of queries in place; multiply weights by a factor. Where
    a cache has INT8 entries keys and queries are spread as well (see `kernels.index_rope.hadamard`), and the queries
    rounded to INT8, which leaves `q_TJI` as it was.

    - `q_TJI`: output of a projection, in the model's dtype; a token's queries are contiguous. Features (2i, 2i + 1) are
      one pair that turns by the token's i-th angle (Su et al., RoFormer, 2021). Without heads keys alone are made.
    - `both_TX`: fp32, outputs of two projections: first a token's key, then the weights of its heads.
    - `norm_I`, `bias_I`: of the LayerNorm (Ba et al., 2016), fp32.
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1).
    - `key_TI`: receives the keys, in the model's dtype.
    - `weight_TJ`: fp32, contiguous: receives the weights times `factor`, and in INT8 times the scales of queries.
    - `code_TJI`: int8, contiguous: receives the codes of the queries, which have a scale each (see
      `kernels.index_entry`). Features are a multiple of 16 then.

    All is computed in fp32 and rounded once. A token's bits depend on nothing but the token.
    `dependent`: programmatic dependent launch, see `launch_index_rope`. ValueError for tensors that do not fit.
    Source: DeepSeek-V3.2 (2025), section 2.1, and the inference code published with it.
    """
    (tokens, heads, features), roped = q_TJI.shape, rotation_TO.shape[1]
    if both_TX.shape != (tokens, features + heads) or roped > features or roped % 2 or norm_I.shape != bias_I.shape:
        raise ValueError(f"{roped} roped features, which come in pairs, do not fit into {features} and a norm")
    if norm_I.shape != (features,) or {x.dtype for x in (norm_I, bias_I, rotation_TO, both_TX)} != {torch.float32}:
        raise ValueError(f"keys, a norm and rotations are fp32, and a norm is of {features} features")
    if q_TJI.stride()[1:] != (features, 1) or {both_TX.stride(1), rotation_TO.stride(1), key_TI.stride(1)} != {1}:
        raise ValueError(f"the {heads} queries of a token are contiguous, and so are its key and its rotations")
    if key_TI.shape != (tokens, features) or key_TI.dtype != q_TJI.dtype:
        raise ValueError(f"keys are {q_TJI.dtype} of {(tokens, features)}, as queries are")
    if weight_TJ.shape != (tokens, heads) or weight_TJ.dtype != torch.float32 or not weight_TJ.is_contiguous():
        raise ValueError(f"weights are contiguous fp32 of {(tokens, heads)}")
    if code_TJI is not None and (
        code_TJI.shape != q_TJI.shape or code_TJI.dtype != torch.int8 or not code_TJI.is_contiguous()
    ):
        raise ValueError(f"codes are contiguous int8 of {tuple(q_TJI.shape)}")
    if code_TJI is not None and features % 16:
        raise ValueError(f"{features} features are no multiple of 16")
    tensors = (q_TJI, both_TX, norm_I, bias_I, rotation_TO, key_TI, weight_TJ, code_TJI)
    if q_TJI.is_cuda:
        launch_index_rope(*tensors, eps, factor, dependent=dependent)
    else:
        index_rope_reference(*tensors, eps, factor)


def index_rope_reference(
    q_TJI: Tensor,
    both_TX: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    rotation_TO: Tensor,
    key_TI: Tensor,
    weight_TJ: Tensor,
    code_TJI: Tensor | None,
    eps: float,
    factor: float,
) -> None:
    """`index_rope` in plain torch."""
    features = norm_I.shape[0]
    turn_TX, roped = _pairs(rotation_TO), rotation_TO.shape[1]
    normed_TI = F.layer_norm(both_TX[:, :features], norm_I.shape, norm_I, bias_I, eps)
    roped_TI = torch.cat([_rotate(normed_TI[:, :roped], turn_TX), normed_TI[:, roped:]], -1)
    roped_TJO = _rotate(q_TJI[..., :roped].float(), turn_TX.unsqueeze(1))
    torch.mul(both_TX[:, features:], factor, out=weight_TJ)
    if code_TJI is None:
        key_TI.copy_(roped_TI)
        q_TJI[..., :roped].copy_(roped_TJO)
        return
    key_TI.copy_(spread(roped_TI))
    spread_TJI = spread(torch.cat([roped_TJO, q_TJI[..., roped:].float()], -1))
    code_XI, scale_X = encode(spread_TJI.flatten(0, 1))
    code_TJI.copy_(code_XI.view(code_TJI.shape))
    weight_TJ.mul_(scale_X.view(weight_TJ.shape))


def _rotate(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(_pairs(x) * turn).flatten(-2)


def _pairs(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().view(*x.shape[:-1], x.shape[-1] // 2, 2))


def launch_index_rope(
    q_TJI: Tensor,
    both_TX: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    rotation_TO: Tensor,
    key_TI: Tensor,
    weight_TJ: Tensor,
    code_TJI: Tensor | None,
    eps: float,
    factor: float,
    *,
    dependent: bool = False,
) -> None:
    """`index_rope` as a Triton kernel. Allocates nothing and waits for nothing, so it may be captured into a CUDA
    graph. `dependent`: safe when the rotation was not written by the kernel launched just before; it is read ahead of
    the wait for it."""
    tokens, heads, features = q_TJI.shape
    if not tokens:
        return
    block, rope = triton.next_power_of_2(features), rotation_TO.shape[1]
    group = min(_GROUP, triton.next_power_of_2(heads or _GROUP))
    # Features that are not roped are read where all are rounded alone.
    width = rope if code_TJI is None else features
    kernel.index_rope[(tokens, 1 + triton.cdiv(heads, group))](
        q_TJI,
        both_TX,
        norm_I,
        bias_I,
        rotation_TO,
        key_TI,
        weight_TJ,
        q_TJI if code_TJI is None else code_TJI,
        eps,
        factor,
        Q_TOKEN=q_TJI.stride(0),
        BOTH_STRIDE=both_TX.stride(0),
        KEY_STRIDE=key_TI.stride(0),
        ROTATION_STRIDE=rotation_TO.stride(0),
        HEADS=heads,
        GROUP=group,
        FEATURES=features,
        BLOCK=block,
        ROPE=rope,
        WIDTH=width,
        WIDTH_BLOCK=triton.next_power_of_2(width),
        INT8=code_TJI is not None,
        STAGES=stages_of(features),
        DEPENDENT=dependent,
        num_warps=2,
        **({"launch_pdl": True} if dependent else {}),
    )
