"""The paged latent cache of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from workers.memory.pinned import on_device


@dataclass
class LatentCache:
    """The paged latent cache of one rank: one tensor a layer, the draft layer last.

    Each layer is [pages, 64, kv_lora_rank + qk_rope_head_dim]: the normed latent, then the roped key part. Only this is
    cached; every rank holds all of it, because heads share it.
    """

    layers: list[torch.Tensor] = field(default_factory=list)

    @property
    def pages(self) -> int:
        """Pages of every layer, the null page included."""
        return self.layers[0].shape[0]

    def scrub(self, pages: Sequence[int]) -> None:
        """Fill these pages of every layer with zeros."""
        if pages:
            page_P = on_device(pages, torch.int64, self.layers[0].device)
            for layer in self.layers:
                layer.index_fill_(0, page_P, 0.0)

    @staticmethod
    def allocate(
        layers: int, pages: int, page_tokens: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        """A cache of `layers` zeroed layers."""
        return LatentCache([torch.zeros(pages, page_tokens, width, dtype=dtype, device=device) for _ in range(layers)])
