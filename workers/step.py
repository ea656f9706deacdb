"""What a step of either kind works with, and what it leaves for the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.batch import LatentCache
from workers.models import DeepseekModel
from workers.parallel import TensorParallel
from workers.plan import BatchLayout
from workers.sampling import SamplingState
from workers.scratch import Scratch
from workers.slots import SlotState


@dataclass(frozen=True)
class StepParts:
    """The parts of one rank that every step uses."""

    model: DeepseekModel
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

    def draft_tokens(
        self,
        hidden_RE: torch.Tensor,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        index: int,
        scratch: Scratch | None = None,
    ) -> torch.Tensor:
        """Draft number `index` of every sampled row, int64 [R], decided on rank 0 for all ranks."""
        scratch = scratch or Scratch(self.device)
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
    """int64: the target token of every logits row, the accepted drafts of every decode row, the count of faults."""
    logits_NV: torch.Tensor | None
    """Logits of every logits row; None when nothing is sampled."""
