"""Computations between an indexer's products and its scores: LayerNorm of the keys, rope of queries and keys, factors
of the heads' weights.

Shape legend: T tokens, J indexer heads, I features of a query or key, X = I + J, O <= I rope features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.index_rope import launch, reference


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
    `dependent`: programmatic dependent launch, see `launch`. ValueError for tensors that do not fit.
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
        launch.index_rope(*tensors, eps, factor, dependent=dependent)
    else:
        reference.index_rope(*tensors, eps, factor)
