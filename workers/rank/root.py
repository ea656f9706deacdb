"""Root of the keys of a replica's cached pages: a hash of all that decides which bits a page holds, but for its tokens.

Pages of equal keys were then computed by the same model in the same way, in whatever process: in a replica beside this
one, or in one that is started again. In invariant mode their bits are equal; outside of it bits depend on what else was
in a batch, too. Rather too much is hashed than too little: pages that are computed again cost time, wrong ones cost
right answers.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any, Final

import torch

from kernels import __version__
from kernels.page import PAGE_TOKENS
from workers.config import EngineConfig
from workers.model_folder import config_values
from workers.models.model import Model
from workers.protocol.request import KEY_BYTES
from workers.weights.identity import weights_identity

KEY_FORMAT: Final = 1
"""Version of how keys are made and of what a page holds under one. Another one finds nothing of this one."""


def identities(config: EngineConfig) -> tuple[str, str | None]:
    """Return the identities of the weights in the model's folder and in that of the draft model, if there is one. Takes
    a while: samples of all files are read. WeightsError or OSError where they cannot be."""
    draft = config.draft_folder
    return weights_identity(config.folder).hex(), None if draft is None else weights_identity(draft).hex()


def cache_root(
    config: EngineConfig,
    model: Model,
    dtype: torch.dtype,
    device: torch.device,
    weights: tuple[str, str | None] | None = None,
) -> bytes:
    """Return the root, 16 bytes, of what `model` caches, as loaded with these settings on `device` in `dtype`. All
    ranks of a replica get the same, and so do all replicas that compute the same. `weights`: their `identities`, where
    these are known.

    WeightsError, OSError or ValueError where the model's files cannot be read any more.
    """
    draft = config.draft_folder
    own, drafting = weights or identities(config)
    parts: dict[str, Any] = {
        "format": KEY_FORMAT,
        "software": [__version__, torch.__version__],
        "model": config_values(config.folder),
        "weights": own,
        "draft model": None if draft is None else [config_values(draft), drafting],
        "drafter": None if model.drafter is None else type(model.drafter).__qualname__,
        "caches": [repr(spec) for spec in model.caches],  # their kinds, sizes and dtypes
        "page": PAGE_TOKENS,
        "dtype": str(dtype),
        "activations": config.activations,
        "invariant": config.invariant,
        # Sums over ranks round otherwise on other numbers of them, but in invariant mode.
        "ranks": None if config.invariant else config.mesh().world.size,
        # So does attention whose parts are merged.
        "shards": config.cache_shards,
        "device": [device.type, torch.cuda.get_device_capability(device) if device.type == "cuda" else None],
    }
    return blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=KEY_BYTES).digest()
