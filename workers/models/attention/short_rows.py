"""Decode rows of sparse attention that have no more entries than it selects: they attend to all of them, densely.

Shape legend: T tokens, P pages, I features of a key, K = 64 entries per page.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from typing_extensions import override

from kernels.runtime.dependent import launches_dependently
from kernels.sparse import write_index_keys
from workers.models.attention.backend import Backend, Heads
from workers.models.attention.decode_rows import DecodeRows
from workers.models.attention.shards import ShardedRows


@dataclass(frozen=True)
class ShortRows(Backend):
    """All rows of a pass. Nothing is scored; index keys are written all the same, for later steps to score."""

    rows: DecodeRows | ShardedRows
    key_TI: Tensor
    """See `Indexed`."""
    cache_slot_T: Tensor

    def write(self, index_PKI: Tensor) -> None:
        """The keys of these rows' tokens to the cache."""
        dependent = self.rows.entering is not None and launches_dependently(self.key_TI.device)
        write_index_keys(self.key_TI, self.cache_slot_T, index_PKI, dependent=dependent)

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        self.rows.attend(heads, cache_PKC)
