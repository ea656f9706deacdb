"""The gate of a SwiGLU feed-forward layer.

Shape legend: T tokens, F = 2 I, I intermediate features.
"""

from __future__ import annotations

from torch import Tensor

from kernels.silu_mul import launch, reference


def silu_mul(gate_up_TF: Tensor, out_TI: Tensor, *, dependent: bool = False) -> None:
    """out = silu(gate) * up, where `gate_up_TF` holds the I gate features, then the I up features (Shazeer, 2020).

    Computed in fp32 and rounded once; the last dimension of both is contiguous, rows may be strided. `dependent`:
    programmatic dependent launch, see `launch`.
    """
    if gate_up_TF.is_cuda:
        launch.silu_mul(gate_up_TF, out_TI, dependent=dependent)
    else:
        reference.silu_mul(gate_up_TF, out_TI)
