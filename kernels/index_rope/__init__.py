"""What an indexer's products become before they are scored: LayerNorm of the keys, rope of queries and keys.

Shape legend: T tokens, J indexer heads, I features of a query or key, O <= I rope features.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.index_rope import launch, reference


def index_rope(
    q_TJI: Tensor,
    key_TI: Tensor,
    norm_I: Tensor,
    bias_I: Tensor,
    rotation_TO: Tensor,
    *,
    eps: float,
    code_TJI: Tensor | None = None,
    weight_TJ: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """Norm the keys, then rotate the first O features of queries and keys, all in place. Where a cache has FP8 entries
    the queries are rounded to FP8, too.

    - `q_TJI`, `key_TI`: outputs of the projections, in the model's dtype; a token's queries are contiguous, its key is.
      Features (2i, 2i + 1) are one pair that turns by the token's i-th angle (Su et al., RoFormer, 2021).
    - `norm_I`, `bias_I`: of the LayerNorm (Ba et al., 2016), fp32.
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1).
    - `code_TJI`: e4m3, contiguous: receives the queries as they are in their dtype by then, divided by a scale each,
      largest magnitude / 448 (see `kernels.index_entry`). `weight_TJ`: fp32, contiguous: multiplied by these scales.

    The norm and the rotation are computed in fp32 and rounded once. A token's bits depend on nothing but the token.
    `dependent`: programmatic dependent launch, see `launch`. ValueError for tensors that do not fit.
    Source: DeepSeek-V3.2 (2025), section 2.1, and the inference code published with it.
    """
    (_, heads, features), roped = q_TJI.shape, rotation_TO.shape[1]
    if key_TI.shape[1] != features or roped > features or roped % 2 or norm_I.shape != bias_I.shape:
        raise ValueError(f"{roped} roped features, which come in pairs, do not fit into {features} and a norm")
    if norm_I.shape != (features,) or {norm_I.dtype, bias_I.dtype, rotation_TO.dtype} != {torch.float32}:
        raise ValueError(f"a norm and rotations are fp32, and a norm is of {features} features")
    if q_TJI.stride()[1:] != (features, 1) or key_TI.stride(1) != 1 or rotation_TO.stride(1) != 1:
        raise ValueError(f"the {heads} queries of a token are contiguous, and so are its key and its rotations")
    if (code_TJI is None) != (weight_TJ is None):
        raise ValueError("queries in FP8 come with weights that their scales are multiplied into")
    if code_TJI is not None and weight_TJ is not None:
        if code_TJI.shape != q_TJI.shape or code_TJI.dtype != torch.float8_e4m3fn or not code_TJI.is_contiguous():
            raise ValueError(f"codes are contiguous e4m3 of {tuple(q_TJI.shape)}")
        if weight_TJ.shape != q_TJI.shape[:2] or weight_TJ.dtype != torch.float32 or not weight_TJ.is_contiguous():
            raise ValueError(f"weights are contiguous fp32 of {tuple(q_TJI.shape[:2])}")
    tensors = (q_TJI, key_TI, norm_I, bias_I, rotation_TO, code_TJI, weight_TJ)
    if q_TJI.is_cuda:
        launch.index_rope(*tensors, eps, dependent=dependent)
    else:
        reference.index_rope(*tensors, eps)
