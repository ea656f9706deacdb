"""Reference of `kernels.index_rope` in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.index_entry import encode
from kernels.index_rope.hadamard import spread


def index_rope(
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
    """See `kernels.index_rope.index_rope`."""
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
