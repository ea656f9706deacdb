"""Reference of `kernels.silu_mul` in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import deterministic_math


def silu_mul(gate_up_TF: Tensor, out_TI: Tensor) -> None:
    """See `kernels.silu_mul.silu_mul`."""
    compute = torch.promote_types(gate_up_TF.dtype, torch.float32)
    gate_TI, up_TI = gate_up_TF.to(compute).chunk(2, dim=-1)
    out_TI.copy_(deterministic_math.silu(gate_TI) * up_TI)
