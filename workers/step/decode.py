"""A step of decode rows alone: embedding, layers, verification, the whole draft loop and the state of the next step.

Straight-line work on the device that reads no host value but its sizes, so it can be captured into a graph as it is.

Shape legend: R rows, W width, T = R * W tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from kernels import decode_state
from kernels.decode_state import accept_drafts
from kernels.sampling import TokenMasks
from workers.memory.scratch import Scratch
from workers.models.batch import Batch, DecodeBatch
from workers.protocol.plan import BatchLayout, GraphKey
from workers.step.parts import StepOutput, StepParts


@dataclass(frozen=True)
class _Rows:
    """Tokens of this step's rows: addresses stay, contents move on with the draft passes."""

    token_RW: torch.Tensor
    position_RW: torch.Tensor
    cache_slot_RW: torch.Tensor
    length_R: torch.Tensor
    page_RP: torch.Tensor
    slot_R: torch.Tensor

    def batch(self, layout: BatchLayout, first: int, *, dense: bool) -> Batch:
        """Return the batch that the model reads."""
        return Batch(
            layout,
            self.position_RW.flatten(),
            self.cache_slot_RW.flatten(),
            DecodeBatch(self.length_R, self.page_RP, slot_R=self.slot_R),
            None,
            first,
            dense=dense,
        )


@dataclass(frozen=True)
class Passed:
    """The forward pass of a step: what the target has computed, on its way to be sampled."""

    fed: _Rows
    source_TF: torch.Tensor
    """Input of the drafter: final hidden states, or the auxiliary hidden states that it reads."""
    logits_NV: torch.Tensor


class DecodeStep:
    """One shape of decode step. Which slots its rows are is written to `slot_R` before each run; -1 pads."""

    def __init__(self, parts: StepParts, key: GraphKey, scratch: Scratch) -> None:
        """`scratch` may be shared by all steps of a rank: they run one after the other."""
        if key.width > parts.width or key.drafts >= parts.width:
            raise ValueError(f"{key} exceeds a width of {parts.width}")
        if key.dense and not parts.dense_pages:
            raise ValueError(f"{key} of a model that never attends densely to what it else selects from")
        self.parts, self.key, self._scratch = parts, key, scratch
        self._pages_per_row = parts.state.pages_per_row
        self.layout = BatchLayout(key.width, key.rows)
        self.slot_R = torch.full((key.rows,), -1, dtype=torch.int64, device=parts.device)
        self.decided_N = torch.zeros(self.layout.decision_size, dtype=torch.int64, device=parts.device)

    def drafting(self, drafts: int) -> DecodeStep:
        """The same step with so many drafts; `slot_R`, and the memory of the forward pass, are those of this one."""
        step = DecodeStep(self.parts, self.key._replace(drafts=drafts), self._scratch)
        step.slot_R = self.slot_R
        return step

    def run(self, masks: Callable[[], TokenMasks | None] | None = None) -> StepOutput:
        """Everything, from the slots' state to the slots' next state. `masks` is called between the forward pass and
        sampling, for the masks to sample under; it may wait."""
        with self.memory():
            passed = self.target()
            return self.rest(passed, None if masks is None else masks())

    @contextmanager
    def memory(self) -> Iterator[None]:
        """Keep the forward pass's results where they are, within this context."""
        with self._scratch.scope():
            yield

    def target(self) -> Passed:
        """The forward pass: what the slots hold is fed, and the target computes hidden states [T, E] and logits [T, V].
        It reads nothing of a mask, so it runs while masks are filled."""
        parts, scratch, fed = self.parts, self._scratch, self._feed()
        batch = fed.batch(self.layout, first=0, dense=self.key.dense)
        if (wanted_R := parts.wanted(self.slot_R, self.key.width, scratch)) is not None and batch.decode is not None:
            batch = replace(batch, decode=replace(batch.decode, wanted_R=wanted_R))
        aux_hidden_TF = parts.aux_hidden(self.layout.tokens, scratch)
        tokens, aux_hidden = fed.token_RW.flatten(), parts.model.aux_hidden(aux_hidden_TF)
        hidden_TE = parts.model.segments.forward(tokens, None, batch, parts.cache, scratch, aux_hidden)
        source_TF = hidden_TE if aux_hidden_TF is None else aux_hidden_TF
        return Passed(fed, source_TF, parts.model.logits(hidden_TE, scratch))

    def rest(self, passed: Passed, masks: TokenMasks | None = None) -> StepOutput:
        """The second half: tokens are sampled, drafts verified, the slots' state goes on, the next drafts are made."""
        parts, layout, scratch, fed = self.parts, self.layout, self._scratch, passed.fed
        rows, width = self.key.rows, self.key.width
        self._verify(passed.logits_NV, fed, masks)
        target_RW = self.decided_N[layout.target_slice].view(rows, width)
        newest_R = scratch.empty(rows, dtype=torch.int64)
        decode_state.advance(
            parts.state.tensors,
            self.slot_R,
            target_RW,
            self.decided_N[layout.accepted_slice],
            fed.position_RW,
            fed.cache_slot_RW,
            fed.length_R,
            newest_R,
            parts.draft_shards,
        )
        if parts.width > 1:
            # Behind the accepted tokens the target's are any valid ids: those queries' outputs are not read, and their
            # cache entries are rewritten before they are attended to.
            kept_TS = parts.kept(layout.tokens, self.key.drafts, scratch)
            batch = replace(fed.batch(layout, first=1, dense=self._drafts_densely), kept_TS=kept_TS)
            drafted_TE = parts.drafter.catch_up(target_RW.flatten(), passed.source_TF, batch, parts.cache, scratch)
            self._draft(drafted_TE, newest_R, fed, kept_TS)
        return StepOutput(layout, self.decided_N, passed.logits_NV)

    @property
    def _drafts_densely(self) -> bool:
        """Whether the drafter's passes are dense, too. Drafts that attend to what was selected for an earlier token see
        fewer entries than there are."""
        return self.key.dense and not self.parts.drafter.keeps

    def _feed(self) -> _Rows:
        """Compute the tokens, positions, cache slots, lengths and page tables that the rows feed, by the state of their
        slots."""
        rows, width, scratch = self.key.rows, self.key.width, self._scratch
        fed = _Rows(
            token_RW=scratch.empty(rows, width, dtype=torch.int64),
            position_RW=scratch.empty(rows, width, dtype=torch.int64),
            cache_slot_RW=scratch.empty(rows, width, dtype=torch.int64),
            length_R=scratch.empty(rows, dtype=torch.int32),
            page_RP=scratch.empty(rows, self._pages_per_row, dtype=torch.int32),
            slot_R=self.slot_R,
        )
        decode_state.feed(
            self.parts.state.tensors,
            self.slot_R,
            fed.token_RW,
            fed.position_RW,
            fed.cache_slot_RW,
            fed.length_R,
            fed.page_RP,
            self.parts.state.shards,
        )
        return fed

    def _verify(self, logits_NV: torch.Tensor, fed: _Rows, masks: TokenMasks | None) -> None:
        """Target tokens, accepted drafts, non-finite rows and faults, decided on rank 0, given to all ranks in one
        message."""
        parts, layout, decided_N = self.parts, self.layout, self.decided_N
        rows, width = self.key.rows, self.key.width
        if parts.sampling is not None:
            target_N, accepted_R = decided_N[layout.target_slice], decided_N[layout.accepted_slice]
            parts.sampling.target_tokens(
                logits_NV,
                layout,
                self.slot_R,
                fed.token_RW,
                fed.position_RW.flatten(),
                ahead=1,
                out=target_N,
                nonfinite=decided_N[layout.nonfinite_slice],
                scratch=self._scratch,
                masks=masks,
            )
            target_RW = target_N.view(rows, width)
            accept_drafts(
                target_RW,
                fed.token_RW[:, 1:],
                accepted_R,
                parts.model.config.vocab_size,
                parts.sampling.fault_1,
                decided_N[-1:],
                dependent=parts.sampling.dependent,
            )
            if (verified_R := parts.verified(self.slot_R, self._scratch)) is not None:
                torch.minimum(accepted_R, verified_R, out=accepted_R)
            parts.sampling.commit(self.slot_R, target_RW, accepted_R, more=1)
        parts.group.broadcast(decided_N)

    def _draft(
        self, drafted_TE: torch.Tensor | None, newest_R: torch.Tensor, fed: _Rows, kept_TS: torch.Tensor | None
    ) -> None:
        """The drafts of the next step."""
        parts, rows, scratch = self.parts, self.key.rows, self._scratch
        hidden_RE = None
        if drafted_TE is not None:
            hidden_RE = scratch.empty(rows, drafted_TE.shape[1], dtype=drafted_TE.dtype)
            torch.index_select(drafted_TE, 0, newest_R, out=hidden_RE)
        kept_RS = None
        if kept_TS is not None:
            kept_RS = scratch.empty(rows, kept_TS.shape[1], dtype=kept_TS.dtype)
            torch.index_select(kept_TS, 0, newest_R, out=kept_RS)
        # The first draft stands one position behind the newest token, whose own the draft pass had.
        position_R = scratch.empty(rows, dtype=torch.int64)
        torch.index_select(fed.position_RW.flatten(), 0, newest_R, out=position_R)
        position_R.add_(1)
        rows_R = self.slot_R, position_R, fed.length_R, fed.page_RP
        parts.draft(hidden_RE, *rows_R, self.key.drafts, scratch, kept_RS, dense=self._drafts_densely)
