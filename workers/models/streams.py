"""The weights by which parts of a layer read several residual streams and add to them."""

from __future__ import annotations

import torch

from kernels.residual_streams import StreamGates
from workers.models.config import ModelConfig
from workers.weights.source import WeightSource


def load_streams(source: WeightSource, prefix: str, config: ModelConfig, *, added: bool) -> StreamGates | None:
    """Load `prefix` + fn, base and scale; None of a model with one residual stream. `added`: whether there are gates of
    what is added, too, as everywhere but at the model's end; and of the mixing, where the streams are mixed."""
    if config.streams is None:
        return None
    streams, steps = config.streams.count, config.streams.mixing_steps if added else 0
    kinds = 1 if not added else 3 if steps else 2
    gates = streams * ((2 if added else 1) + (streams if steps else 0))
    return StreamGates(
        # They decide how much of everything there is: in fp32, however they are stored.
        source.load(f"{prefix}fn", gates, streams * config.hidden_size, dtype=torch.float32),
        source.load(f"{prefix}base", gates, dtype=torch.float32),
        source.load(f"{prefix}scale", kinds, dtype=torch.float32),
        magnitude=config.streams.magnitude,
        eps=config.streams.eps,
        norm_eps=config.rms_norm_eps,
        mixing_steps=steps,
    )
