"""Between the projections and attention, in one kernel: norm of the latent, rope of query and key, cache write.

Shape legend: T tokens, H heads, O rope features, L latent features, C = L + O, P pages, K = 64 entries per page.
"""

from __future__ import annotations

from torch import Tensor

from kernels.rope_cache import launch, reference


def rope_cache(
    q_THO: Tensor,
    kv_TC: Tensor,
    weight_L: Tensor,
    rotation_TO: Tensor,
    cache_slot_T: Tensor,
    latent_TC: Tensor,
    cache_PKC: Tensor,
    *,
    eps: float,
    dependent: bool = False,
) -> None:
    """Rotate the rope part of the queries in place; norm the latent and rotate the key; write both to the cache.

    - `q_THO`: rope part of every head's query, usually a strided view. Features (2i, 2i + 1) are one pair that turns by
      the token's i-th angle (Su et al., RoFormer, 2021), the order of the published checkpoints.
    - `kv_TC`: output of the down-projection, latent then rope key, not yet normed. L = `weight_L`.shape[0].
    - `rotation_TO`: fp32, (cos, sin) of the i-th angle of each token at (2i, 2i + 1).
    - `cache_slot_T`: int64 index into the flattened cache [pages * 64]. Padding and suppressed writes point into the
      null page. A slot outside the cache, -1 included, is the caller's error and never written (on a CPU it raises).
    - `latent_TC`: receives what is read where something was written, for prefill's own keys. In the model's dtype.
    - `cache_PKC`: entries in that dtype, or FP8 entries as bytes, [P, K, E] (`kernels.latent_entry`).

    Strides between tokens and heads are even, O and L too. The norm and the rotation are computed in fp32 and rounded
    once; FP8 entries then once more. `dependent`: programmatic dependent launch, see `launch`.
    """
    tensors = (q_THO, kv_TC, weight_L, rotation_TO, cache_slot_T, latent_TC, cache_PKC)
    if q_THO.is_cuda:
        launch.rope_cache(*tensors, eps, dependent=dependent)
    else:
        reference.rope_cache(*tensors, eps)
