"""Residual streams in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import deterministic_math
from kernels.linear.reference import invariant_linear
from kernels.residual_streams.memory import StreamGates, StreamMemory


def add_to_streams_reference(
    x_TE: Tensor,
    residual_TSE: Tensor,
    memory: StreamMemory,
    gates: StreamGates | None,
    weight_E: Tensor,
    out_TE: Tensor,
    eps: float,
) -> None:
    """`add_to_streams` in plain torch."""
    compute, streams = torch.promote_types(residual_TSE.dtype, torch.float32), residual_TSE.shape[1]
    stream_TSE = residual_TSE.to(compute)
    if memory.mix_TSS is not None:
        mix_TSS1, old_TSE = memory.mix_TSS.unsqueeze(3), stream_TSE
        stream_TSE = mix_TSS1[:, 0] * old_TSE[:, :1]
        for stream in range(1, streams):
            stream_TSE = stream_TSE + mix_TSS1[:, stream] * old_TSE[:, stream : stream + 1]
    residual_TSE.copy_(stream_TSE + memory.open_TS.unsqueeze(2) * x_TE.to(compute).unsqueeze(1))
    if gates is None:
        return
    normed_TF = residual_TSE.flatten(1).to(compute)
    normed_TF = F.rms_norm(normed_TF, normed_TF.shape[1:], None, gates.norm_eps)
    made_TM = torch.empty(len(x_TE), len(gates.base_M), dtype=compute)
    invariant_linear(normed_TF, gates.weight_MF, made_TM)
    kind_M = (torch.arange(made_TM.shape[1]) // streams).clamp(max=2)
    made_TM = made_TM * gates.scale_G[kind_M] + gates.base_M
    gate_TM = deterministic_math.sigmoid(made_TM[:, : 2 * streams])
    if gate_TM.shape[1] > streams:
        eps_of_added = 0.0 if gates.mixing_steps else gates.eps
        memory.open_TS.copy_(gates.magnitude * gate_TM[:, streams:] + eps_of_added)
    if gates.mixing_steps:
        assert memory.mix_TSS is not None
        memory.mix_TSS.copy_(_mixing(made_TM[:, 2 * streams :].reshape(memory.mix_TSS.shape), gates))
    read_TS1 = (gate_TM[:, :streams] + gates.eps).unsqueeze(2)
    # One after the other: torch's sum over a dimension has another order for few tokens.
    sum_TE = torch.zeros(x_TE.shape, dtype=compute)
    for stream in range(streams):
        sum_TE += read_TS1[:, stream] * residual_TSE[:, stream].to(compute)
    rounded_TE = sum_TE.to(residual_TSE.dtype).to(compute)
    if memory.read_TE is not None:
        memory.read_TE.copy_(rounded_TE)
    out_TE.copy_(F.rms_norm(rounded_TE, weight_E.shape, weight_E.to(compute), eps))


def _mixing(made_TSS: Tensor, gates: StreamGates) -> Tensor:
    """The matrix of the gates of the mixing."""
    power_TSS = deterministic_math.exp(made_TSS - made_TSS.amax(2, keepdim=True))
    mix_TSS = power_TSS / power_TSS.sum(2, keepdim=True) + gates.eps
    for step in range(gates.mixing_steps):
        if step:
            mix_TSS = mix_TSS / (mix_TSS.sum(2, keepdim=True) + gates.eps)
        mix_TSS = mix_TSS / (mix_TSS.sum(1, keepdim=True) + gates.eps)
    return mix_TSS
