"""The device view of one step that model files read: tokens, positions, cache targets and the two kinds of rows.

Shape legend: T tokens of the step, R decode rows, W width, P pages a row may hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels.mla_decode import Workspace
from workers.memory.pinned import on_device
from workers.protocol.plan import BatchLayout


@dataclass(frozen=True)
class DecodeBatch:
    """The decode rows. Nothing here is a host value, so a captured graph reads the current ones."""

    length_R: torch.Tensor
    """int32: cache entries the last of a row's W tokens may attend to, its own included. Token j of the row sees
    length - (W - 1 - j). 0 marks a padded row: no work, zero output."""
    page_RP: torch.Tensor
    """int32 page table rows; entries past the length are arbitrary."""
    workspace: Workspace | None = None
    """How the rows' cache is dealt out on a GPU; the model makes it, once a pass."""


@dataclass(frozen=True)
class PrefillBatch:
    """The prefill rows, run eagerly: their geometry is known on the host."""

    start: tuple[int, ...]
    """Position of each row's first token; its cache holds `start` entries before this step."""
    count: tuple[int, ...]
    """Tokens each row feeds."""
    page_NP: torch.Tensor
    """int32 page table rows, N = len(start)."""


@dataclass(frozen=True)
class Batch:
    """One forward pass over the layout's tokens: decode tokens first, then prefill tokens."""

    layout: BatchLayout
    position_T: torch.Tensor
    """int64 rope positions."""
    cache_slot_T: torch.Tensor
    """int64 index into the flattened cache [pages * 64]: where each token's latent is written. Padding and suppressed
    writes point into the null page."""
    decode: DecodeBatch | None
    prefill: PrefillBatch | None
    first: int = 0
    """Cache entries before this index are never attended to (the draft layer's cache begins at entry 1)."""


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
