"""What a step of either kind works with, the draft loop both end with, and what they leave for the host.

Shape legend: R sampled rows, E hidden size, P pages a row may hold, S slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import decode_state
from workers.cache.latent import LatentCache
from workers.memory.scratch import Scratch
from workers.models import Model
from workers.models.batch import Batch, DecodeBatch
from workers.parallel.group import TensorParallel
from workers.protocol.plan import BatchLayout
from workers.step.sampling import SamplingState
from workers.step.slots import SlotState


@dataclass(frozen=True)
class StepParts:
    """The parts of one rank that every step uses."""

    model: Model
    cache: LatentCache
    state: SlotState
    sampling: SamplingState | None
    """On rank 0 only: it decides for all ranks."""
    group: TensorParallel
    width: int
    """The most tokens a decode row feeds; above 1 the draft layer's cache is kept."""

    @property
    def device(self) -> torch.device:
        """Where everything is."""
        return self.cache.layers[0].device

    def draft(
        self,
        hidden_RE: torch.Tensor,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        length_R: torch.Tensor,
        page_RP: torch.Tensor,
        drafts: int,
        scratch: Scratch,
    ) -> None:
        """Draft `drafts` tokens for every row, one pass of width 1 after the other, into the slots' state.

        `hidden_RE`: the draft layer's, of the rows' newest tokens, which it has in its cache already; their lengths in
        the slots' state are those after them. `position_R`: of the first draft. `length_R` (int32) is written,
        `page_RP` are the rows' page tables.
        """
        rows, single = slot_R.shape[0], BatchLayout(1, slot_R.shape[0])
        for index in range(drafts):
            token_R = self._draft_tokens(hidden_RE, slot_R, position_R, index, scratch)
            draft_position_R = scratch.empty(rows, dtype=torch.int64)
            cache_slot_R = scratch.empty(rows, dtype=torch.int64)
            decode_state.feed_draft(
                self.state.tensors, slot_R, token_R, index, draft_position_R, cache_slot_R, length_R
            )
            if index + 1 == drafts:
                break
            batch = Batch(single, draft_position_R, cache_slot_R, DecodeBatch(length_R, page_RP), None, first=1)
            hidden_RE = self.model.draft(token_R, hidden_RE, batch, self.cache, scratch)
            position_R = scratch.empty(rows, dtype=torch.int64)
            torch.add(draft_position_R, 1, out=position_R)

    def _draft_tokens(
        self, hidden_RE: torch.Tensor, slot_R: torch.Tensor, position_R: torch.Tensor, index: int, scratch: Scratch
    ) -> torch.Tensor:
        """Draft number `index` of every row, int64 [R], decided on rank 0 for all ranks."""
        token_R = scratch.empty(slot_R.shape[0], dtype=torch.int64)
        with scratch.scope():
            logits_RV = self.model.draft_logits(hidden_RE, scratch)
            if self.sampling is not None:
                drafted_SX = self.state.tensors.draft_SK[:, :index]
                self.sampling.draft_tokens(
                    logits_RV, slot_R, position_R, drafted_SX=drafted_SX, out=token_R, scratch=scratch
                )
        return self.group.broadcast(token_R)


@dataclass(frozen=True)
class StepOutput:
    """The decision of a step, on the device and equal on every rank."""

    layout: BatchLayout
    decided_N: torch.Tensor
    """int64, laid out as `BatchLayout.decision_size` says."""
    logits_NV: torch.Tensor | None
    """Logits of every logits row; None when nothing is sampled."""
