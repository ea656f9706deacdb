"""Attention of ragged query rows over expanded keys and values: the chunk itself (causal), or cached context (not).

Shape legend: T query tokens, S keys, H heads, N non-rope and O rope features of a key, D = N + O, V value features,
B rows, Z parts of the keys.
"""

from __future__ import annotations

from torch import Tensor

from kernels.mla_prefill import launch, reference
from kernels.mla_prefill.launch import key_parts, most_partial

__all__ = ["key_parts", "mla_prefill", "most_partial"]


def mla_prefill(
    q_THD: Tensor,
    k_SHN: Tensor,
    k_SO: Tensor,
    v_SHV: Tensor,
    cu_q_B1: Tensor,
    cu_k_B1: Tensor,
    out_THV: Tensor,
    lse_TH: Tensor,
    *,
    scale: float,
    causal: bool,
    max_q: int,
    max_k: int,
) -> None:
    """out = softmax(scale * (q[..., :N] · k_SHN + q[..., N:] · k_SO)) · v, row by row.

    - The roped part of a key, `k_SO`, is shared by all heads and never expanded.
    - `cu_q_B1`, `cu_k_B1`: int32 [rows + 1] on the device, where each row's queries and keys begin; row b owns
      queries cu_q[b] <= t < cu_q[b + 1] and keys cu_k[b] <= s < cu_k[b + 1]. `max_q`, `max_k`: the longest of each.
    - `causal`: bottom-right aligned, query i of a row of n queries and m keys sees keys s <= i + m - n.
    - `out_THV`: dtype of the caller's choice; `lse_TH`: fp32, natural logarithm.
    - Where they are `out_ZTHV` and `lse_ZTH`, the keys of every row are cut into Z parts, the longest first, and each
      part has results of its own, to be merged by `kernels.merge_attention`. Not causally. `key_parts` says how many
      pay.

    A query that sees no key gets output 0 and LSE -inf. `k_SHN` and `v_SHV` may be strided views of one tensor; the
    last dimension of every tensor is contiguous. On a GPU (up to fp32) nothing is allocated and nothing waited for;
    `max_q` may be too large there, and tokens that no row owns are neither read nor written.
    Source: DeepSeek-V2 (2024), section 2.1.
    """
    if q_THD.is_cuda:
        launch.mla_prefill(
            q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, cu_k_B1, out_THV, lse_TH, scale=scale, causal=causal, max_q=max_q
        )
        return
    reference.mla_prefill(q_THD, k_SHN, k_SO, v_SHV, cu_q_B1, cu_k_B1, out_THV, lse_TH, scale, causal)
