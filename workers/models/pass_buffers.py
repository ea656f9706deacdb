"""Buffers that the segments of a pass and the attention between them read, write and hand on.

Shape legend: T tokens, padding included, E hidden features, H heads of this rank, V value features, O rope features,
R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic

from torch import Tensor

from kernels.residual_streams import StreamGates, StreamMemory
from kernels.rms_norm import AddNorm
from workers.models.attention.latent import MlaInputs
from workers.models.layer_ops import LayerOps, N


@dataclass(frozen=True)
class PassBuffers(Generic[N]):
    """Buffers that segments and attention hand on to each other. There is one set for all layers: each part is dead
    when the next layer writes it."""

    ops: LayerOps[N]
    """Token-wise work of the pass; the memory here is made for it."""
    normed: N
    """The norm of `residual_TE` that the next layer reads."""
    residual_TE: Tensor
    """The residual stream, or several of them, [T, S, E]."""
    rotation_TO: Tensor | None
    """Rotations of the tokens. None in passes of decode rows alone, whose attention rotates."""
    query_scale_T: Tensor | None
    """fp32: what each token's query is multiplied by, of models whose queries are scaled by their position."""
    projected: MlaInputs
    attended_THV: Tensor
    streams: StreamMemory | None = None
    """Of several residual streams; None where there is one."""

    def norm(self, weight_E: Tensor, eps: float, gates: StreamGates | None) -> AddNorm:
        """What is read next of the residual stream or, by `gates`, of several."""
        return AddNorm(self.residual_TE, weight_E, eps, gates, self.streams)

    @property
    def finished(self) -> tuple[Tensor, ...]:
        """What `DecoderLayer.finish` reads of a token: its residual, what it attended to, and the gates of that, and of
        residual streams, where there are such."""
        gate_THV, streams = self.projected.gate_THV, self.streams
        gates = () if gate_THV is None else (gate_THV,)
        return (self.residual_TE, self.attended_THV, *gates, *(() if streams is None else (streams.open_TS,)))


@dataclass(frozen=True)
class PassTensors:
    """The inputs, the output and the memory of one pass."""

    token_T: Tensor
    """int64 ids below the vocabulary size; padding feeds any."""
    position_T: Tensor
    """int64 rope positions; padding has any."""
    cache_slot_T: Tensor
    """int64 index into the flattened cache; padding points into the null page."""
    live_R: Tensor | None
    """Integers: token t belongs to row t // (T // R), and the tokens of rows with 0 or less are padding, which no
    expert computes. None: no token is padding."""
    source_TE: Tensor | None
    """Hidden states that the draft layer reads beside the tokens."""
    out_TE: Tensor | None
    """Hidden states after the final norm; None where `gather` and `end` take the last segment's place."""
    buffers: PassBuffers[Any]
    aux_hidden: tuple[tuple[int, Tensor], ...] = ()
    """Layers, and where the residual stream that enters each is copied to, [T, E]. None of several streams."""
