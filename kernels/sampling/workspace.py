"""Inputs of the sampling kernels besides logits and tables: the location of the rows' state, and memory.

Shape legend: N logits rows, R sampled rows, D decode rows, X drafts per row, S slots, P blocks or parts of a row,
A values kept aside, M masks, V vocabulary, B integers of a mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

PEAK_BLOCK = 2048
"""Ids of which one program takes the largest logit."""
DRAW_BLOCK = 1024
"""Ids one program draws noise for at a time."""
ASIDE = 4096
"""Values of a row that the search for a floor may keep aside."""


MASK_BITS = 32
"""Ids that one integer of a mask speaks for."""


def mask_words(vocab: int) -> int:
    """Integers of a mask, B."""
    return -(-vocab // MASK_BITS)


@dataclass(frozen=True)
class TokenMasks:
    """Ids that some logits rows may have. A row without a mask costs one load."""

    index_N: Tensor
    """int32, for every logits row, or more: which of the masks is its own; -1 for none."""
    bits_MB: Tensor
    """int32, contiguous: id v is allowed where bit v % 32 of integer v // 32 is set."""

    def __post_init__(self) -> None:
        assert self.index_N.dtype == self.bits_MB.dtype == torch.int32
        assert self.index_N.is_contiguous()
        assert self.bits_MB.is_contiguous()

    def of(self, row_M: Tensor) -> TokenMasks:
        """Return the masks of some logits rows (int64) alone."""
        return TokenMasks(self.index_N[row_M], self.bits_MB)


@dataclass(frozen=True)
class SampledRows:
    """Slot, position and drafts of every logits row: first `width` logits rows for each of the D decode rows, then one
    for each other sampled row. Nothing here is copied or changed."""

    slot_R: Tensor
    """int64; the slot of nobody (the tables' last, or -1) marks padding."""
    position_N: Tensor
    """int64."""
    ahead: int = 0
    """The sampled token's position less `position_N`."""
    width: int = 1
    decode_rows: int = 0
    draft: Tensor | None = None
    """int64 [D, X], the drafts a decode row feeds; with `by_slot` int64 [S, X], those of every slot. None: no row has
    drafts before it, whatever its window."""
    by_slot: bool = False
    before: int = 0
    """Drafts that lie before every row; place j of a decode row's window has j more."""
    window_N: Tensor | None = None
    """int64: still more of them, row by row."""
    masks: TokenMasks | None = None
    """Ids that the rows may have; None: any of them."""

    def __post_init__(self) -> None:
        assert self.position_N.shape == (self.logits_rows,)
        assert self.position_N.is_contiguous()
        assert self.slot_R.is_contiguous()
        assert self.window_N is None or self.window_N.shape == (self.logits_rows,)
        assert self.masks is None or self.masks.index_N.shape[0] >= self.logits_rows

    @property
    def logits_rows(self) -> int:
        """N."""
        return self.decode_rows * (self.width - 1) + self.slot_R.shape[0]

    def expanded(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Slot, position, drafts and window of every logits row, as `kernels.sampling.sample_tokens` takes them."""
        decode, width, slot_N, position_N = self.decode_rows, self.width, self.slot_R, self.position_N + self.ahead
        if width > 1:
            slot_N = torch.cat((slot_N[:decode].repeat_interleave(width), slot_N[decode:]))
        if self.draft is None:
            return slot_N, position_N, None, None
        window_N = torch.full_like(slot_N, self.before)
        if width > 1:
            window_N[: decode * width] += torch.arange(width, device=slot_N.device).repeat(decode)
        if self.window_N is not None:
            window_N += self.window_N
        if self.by_slot:
            return slot_N, position_N, self.draft[slot_N], window_N
        # Rows behind those that feed drafts have none, and are there to be indexed all the same, even with no columns.
        draft_NX = self.draft if width == 1 else self.draft.repeat_interleave(width, dim=0)
        others_FX = self.draft.new_zeros(slot_N.shape[0] - draft_NX.shape[0], self.draft.shape[1])
        return slot_N, position_N, torch.cat((draft_NX, others_FX)), window_N


@dataclass(frozen=True)
class SampleWorkspace:
    """Device memory of one call; its contents mean nothing before and after."""

    parts: int
    """Programs that share the drawing of a row."""
    peak_NP: Tensor
    peak_id_NP: Tensor
    score_NP: Tensor
    score_id_NP: Tensor
    floor_N: Tensor
    last_N: Tensor
    aside_NA: Tensor

    @staticmethod
    def allocate(rows: int, vocab: int, empty: Callable[..., Tensor]) -> SampleWorkspace:
        """Allocate memory for calls of exactly `rows` logits rows. `empty(*shape, dtype=)` gives uninitialised device
        memory."""
        blocks = -(-vocab // DRAW_BLOCK)
        # Enough programs to fill a GPU when rows are few, few where every program that has nothing to do costs time.
        parts = max(min(blocks, 512 // max(rows, 1)), min(blocks, 2))
        peaks = -(-vocab // PEAK_BLOCK)
        return SampleWorkspace(
            parts=parts,
            peak_NP=empty(rows, peaks, dtype=torch.float32),
            peak_id_NP=empty(rows, peaks, dtype=torch.int32),
            score_NP=empty(rows, parts, dtype=torch.float32),
            score_id_NP=empty(rows, parts, dtype=torch.int32),
            floor_N=empty(rows, dtype=torch.float32),
            last_N=empty(rows, dtype=torch.int32),
            aside_NA=empty(rows, ASIDE, dtype=torch.float32),
        )
