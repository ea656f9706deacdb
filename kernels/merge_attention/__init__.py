"""Joins attention results over disjoint sets of keys into the result over their union.

Shape legend: T query tokens, H heads, V value features, Z parts.
"""

from __future__ import annotations

from torch import Tensor

from kernels.merge_attention import launch, reference


def merge_attention(
    a_THV: Tensor, a_lse_TH: Tensor, b_THV: Tensor, b_lse_TH: Tensor, out_THV: Tensor, out_lse_TH: Tensor
) -> None:
    """out = (exp(a_lse) a + exp(b_lse) b) / (exp(a_lse) + exp(b_lse)), out_lse = log of that denominator.

    LSE is the natural logarithm of the sum of exponentials of the scaled scores, fp32. A part without keys has output 0
    and LSE -inf; such parts alone give 0 and -inf, never NaN. `b_THV`, `b_lse_TH` may be `b_ZTHV` and `b_lse_ZTH`: then
    all Z parts are joined with `a`. The outputs may be `a_THV` and `a_lse_TH`. A head's features lie side by side, and
    the LSEs are contiguous.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    if a_THV.is_cuda:
        launch.merge_attention(a_THV, a_lse_TH, b_THV, b_lse_TH, out_THV, out_lse_TH)
        return
    reference.merge_attention(a_THV, a_lse_TH, b_THV, b_lse_TH, out_THV, out_lse_TH)
