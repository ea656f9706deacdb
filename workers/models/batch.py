"""The device view of one step that model files read: tokens, positions, cache targets and the two kinds of rows.

Shape legend: T tokens of the step, R decode rows, W width, P most pages of a row, S tokens that a query attends to at
most.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.mla_decode import Workspace
from kernels.own_entries import OwnEntries
from kernels.sparse_shards import OwnPages
from workers.models.choices import Choices
from workers.parallel.group import Group
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
    """Split-KV plan of the rows' cache on a GPU; the model makes it once per pass."""
    slot_R: torch.Tensor | None = None
    """int64 slots of the rows, -1 of padding; None where nobody needs them, as models of latent attention do not."""
    own: OwnEntries | None = None
    """This rank's part of the rows, where ranks share out the cache; the model finds it once per pass."""
    wanted_R: torch.Tensor | None = None
    """int64: tokens of each row, the first of its W, whose hidden states are wanted, one at least; what a pass returns
    of the others, and whether it writes their entries, is its choice. None: all."""


@dataclass(frozen=True)
class PrefillBatch:
    """The prefill rows, run eagerly: their geometry is known on the host."""

    start: tuple[int, ...]
    """Position of each row's first token; its cache holds `start` entries before this step."""
    count: tuple[int, ...]
    """Tokens each row feeds."""
    page_NP: torch.Tensor
    """int32 page table rows, N = len(start)."""
    slot: tuple[int, ...] = ()
    """Slot of each row; none where nobody needs them."""


@dataclass(frozen=True)
class OwnSelection:
    """This rank's part of a `Selection`, where ranks share out the cache."""

    decode: OwnPages | None
    """Its pages of the decode rows; None without such rows."""
    prefill: OwnPages | None
    """Its pages of the prefill rows; None without such rows."""
    bound_T: torch.Tensor
    """int32: own entries that a token may attend to."""
    first_T: torch.Tensor
    """bool: whether it has the first page of a token's row."""
    selected_TS: torch.Tensor
    """int32: the selected positions whose entries it has, -1 in the place of others."""

    def of(self, own: slice) -> OwnSelection:
        """Return the part of some tokens alone."""
        return replace(self, bound_T=self.bound_T[own], first_T=self.first_T[own], selected_TS=self.selected_TS[own])


@dataclass(frozen=True)
class Selection:
    """Entries that the tokens of a step attend to, where attention is sparse."""

    row_T: torch.Tensor
    """int32: whose page table is a token's, among the rows of its kind."""
    bound_T: torch.Tensor
    """int32: cache entries that a token may attend to, its own included; 0 for padding."""
    selected_TS: torch.Tensor
    """int32: the positions that it attends to, -1 behind the last one. Layers write and read it in turn."""
    fault_1: torch.Tensor
    """int64: counts rows, positions and pages that are outside of what they point into."""
    given: bool = False
    """Whether the positions are there already: no layer selects."""
    choices: Choices | None = None
    """Receives every selection; None unless passes are compared."""
    own: OwnSelection | None = None
    """This rank's part; None where it has the whole cache."""

    def of(self, own: slice) -> Selection:
        """Return the selection of some tokens alone."""
        part = None if self.own is None else self.own.of(own)
        row_T, bound_T, selected_TS = self.row_T[own], self.bound_T[own], self.selected_TS[own]
        return replace(self, row_T=row_T, bound_T=bound_T, selected_TS=selected_TS, own=part)


@dataclass(frozen=True)
class Batch:
    """Batch of one forward pass over the layout's tokens: decode tokens first, then prefill tokens."""

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
    kept_TS: torch.Tensor | None = None
    """int32: where a pass of sparse attention leaves what its last indexer has selected; None: nobody wants it."""
    given_TS: torch.Tensor | None = None
    """int32: what its tokens attend to; None: indexers select."""
    dense: bool = False
    """Whether decode rows alone, none of which has more entries than sparse attention selects, attend to them densely:
    they would attend to all of them."""
    out_of_bounds_count_1: torch.Tensor | None = None
    """See `PagedCache`."""
    group: Group | None = None
    """Communication with the ranks that share out the cache; None where each has all of it. Page tables have global
    ids, `cache_slot_T` is this rank's (`kernels.decode_state`)."""
    selection: Selection | None = None
    """Selection of a model with sparse attention, which makes it once per pass."""

    def noting(self, choices: Choices) -> Batch:
        """Return this batch with its selections handed to `choices`."""
        if self.selection is None:
            return self
        return replace(self, selection=replace(self.selection, choices=choices))
