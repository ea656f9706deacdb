"""A step with prefill rows beside decode rows, run eagerly: prompts are ragged, so nothing here has a fixed shape.

Shape legend: T tokens of the step, D decode rows, W width, R sampled rows, F final prefill rows, N logits rows,
E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.page import NULL_PAGE, PAGE_TOKENS
from kernels.verify import accept_drafts
from workers.batch import Batch, DecodeBatch, PrefillBatch
from workers.plan import BatchLayout, StepPlan
from workers.step import StepOutput, StepParts


@dataclass(frozen=True)
class _Rows:
    """Where this step's rows are: made once from plan and state, read by the target pass and the draft pass."""

    layout: BatchLayout
    token_T: torch.Tensor
    slot_T: torch.Tensor
    position_T: torch.Tensor
    suppressed_T: torch.Tensor | None
    decode_slot_D: torch.Tensor
    fed_DW: torch.Tensor
    prefill_slot: tuple[int, ...]
    prefill_start: tuple[int, ...]


@dataclass(frozen=True)
class _Sampled:
    """What the target pass decided; the same on every rank."""

    slot_R: torch.Tensor
    token_DW: torch.Tensor
    accepted_D: torch.Tensor
    final_F: torch.Tensor
    """Tokens sampled by the F final prefill rows."""
    length_R: torch.Tensor
    """Cache entries of each sampled row after this step."""
    decided_N: torch.Tensor
    """The packed decision: `token_DW` flattened, `final_F`, `accepted_D`, the count of faults."""
    logits_NV: torch.Tensor | None


class MixedStep:
    """Runs plans of any kind of row."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts

    def run(self, plan: StepPlan) -> StepOutput:
        """Everything, from the slots' state and the plan's prompts to the slots' next state."""
        parts = self._parts
        rows = self._rows(plan)
        hidden_TE = parts.model.forward(rows.token_T, self._batch(rows, shift=0), parts.cache)
        sampled = self._sample(plan, rows, hidden_TE)
        if parts.width > 1:
            self._draft(plan, rows, sampled, hidden_TE)
        return StepOutput(rows.layout, sampled.decided_N, sampled.logits_NV)

    def _rows(self, plan: StepPlan) -> _Rows:
        layout, device, width = plan.layout, self._parts.device, plan.width
        state = self._parts.state.tensors
        slot_D = torch.tensor(plan.decode_slots, dtype=torch.int64, device=device)
        fed_DW = torch.cat([state.last_S[slot_D].unsqueeze(1), state.draft_SK[slot_D, : width - 1]], dim=1)
        position_DW = state.length_S[slot_D].unsqueeze(1) + torch.arange(width, device=device)
        token, slot, position = [fed_DW.flatten()], [slot_D.repeat_interleave(width)], [position_DW.flatten()]
        suppressed_T = None
        if plan.prefill:
            fed = [token for row in plan.prefill for token in row.tokens]
            at = [row.start + i for row in plan.prefill for i in range(len(row.tokens))]
            of = [row.slot for row in plan.prefill for _ in row.tokens]
            token.append(torch.tensor(fed, dtype=torch.int64, device=device))
            position.append(torch.tensor(at, dtype=torch.int64, device=device))
            slot.append(torch.tensor(of, dtype=torch.int64, device=device))
            below = [row.start + i < row.write_from for row in plan.prefill for i in range(len(row.tokens))]
            if any(below):
                suppressed_T = torch.tensor([False] * layout.decode_tokens + below, device=device)
        return _Rows(
            layout=layout,
            token_T=torch.cat(token),
            slot_T=torch.cat(slot),
            position_T=torch.cat(position),
            suppressed_T=suppressed_T,
            decode_slot_D=slot_D,
            fed_DW=fed_DW,
            prefill_slot=tuple(row.slot for row in plan.prefill),
            prefill_start=tuple(row.start for row in plan.prefill),
        )

    def _batch(self, rows: _Rows, shift: int) -> Batch:
        """The target pass (shift 0), or the draft layer's pass over the same layout, whose entries lie one further."""
        layout = rows.layout
        position_T = rows.position_T + shift
        cache_slot_T = self._parts.state.cache_slots(rows.slot_T, position_T)
        if shift == 0 and rows.suppressed_T is not None:
            null_T = NULL_PAGE * PAGE_TOKENS + position_T % PAGE_TOKENS
            cache_slot_T = torch.where(rows.suppressed_T, null_T, cache_slot_T)
        decode = prefill = None
        if layout.decode_rows:
            last_D = rows.position_T[layout.width - 1 : layout.decode_tokens : layout.width]
            length_D = last_D + (1 + shift)
            decode = DecodeBatch(length_D.to(torch.int32), self._parts.state.tensors.page_SP[rows.decode_slot_D])
        if rows.prefill_slot:
            prefill = PrefillBatch(
                start=tuple(start + shift for start in rows.prefill_start),
                count=layout.prefill_tokens,
                page_NP=self._parts.state.tensors.page_SP[list(rows.prefill_slot)],
            )
        return Batch(layout, position_T, cache_slot_T, decode, prefill, first=shift)

    def _sample(self, plan: StepPlan, rows: _Rows, hidden_TE: torch.Tensor) -> _Sampled:
        """Target tokens, accepted drafts and the new state of every sampled row, decided on rank 0 for all ranks."""
        parts, layout, state = self._parts, rows.layout, self._parts.state.tensors
        ends = layout.logits_tokens()
        hidden_NE = hidden_TE if len(ends) == layout.tokens else hidden_TE[ends]
        final_slot = [plan.prefill[index].slot for index in layout.final_prefill_rows()]
        slot_R = torch.cat([rows.decode_slot_D, torch.tensor(final_slot, dtype=torch.int64, device=parts.device)])
        # Target tokens, accepted counts, and how many faults the sampling saw.
        decided_N = torch.zeros(layout.logits_rows + layout.decode_rows + 1, dtype=torch.int64, device=parts.device)
        logits_NV = None
        if ends:
            logits_NV = parts.model.logits(hidden_NE)
            if parts.sampling is not None:
                position_N = (rows.position_T if len(ends) == layout.tokens else rows.position_T[ends]) + 1
                target_N = parts.sampling.target_tokens(logits_NV, layout, slot_R, rows.fed_DW, position_N)
                target_DW = target_N[: layout.decode_tokens].view(layout.decode_rows, layout.width)
                decided_N[: layout.logits_rows] = target_N
                accept_drafts(
                    target_DW,
                    rows.fed_DW[:, 1:],
                    decided_N[layout.logits_rows : -1],
                    parts.model.config.vocab_size,
                    parts.sampling.fault_1,
                )
                decided_N[-1] = parts.sampling.fault_1[0]
            # One packed decision for every rank.
            parts.group.broadcast(decided_N)
        token_DW = decided_N[: layout.decode_tokens].view(layout.decode_rows, layout.width)
        final_F = decided_N[layout.decode_tokens : layout.logits_rows]
        accepted_D = decided_N[layout.logits_rows : -1]
        final_length = [row.start + len(row.tokens) for row in plan.prefill if row.final]
        length_R = torch.cat(
            [
                state.length_S[rows.decode_slot_D] + accepted_D + 1,
                torch.tensor(final_length, dtype=torch.int64, device=parts.device),
            ]
        )
        last_R = torch.cat([token_DW.gather(1, accepted_D.unsqueeze(1)).squeeze(1), final_F])
        state.length_S[slot_R] = length_R
        state.last_S[slot_R] = last_R
        if parts.sampling is not None and len(slot_R):
            self._commit(slot_R, token_DW, accepted_D, final_F)
        return _Sampled(slot_R, token_DW, accepted_D, final_F, length_R, decided_N, logits_NV)

    def _commit(
        self, slot_R: torch.Tensor, token_DW: torch.Tensor, accepted_D: torch.Tensor, final_F: torch.Tensor
    ) -> None:
        assert self._parts.sampling is not None
        decode_rows, width = token_DW.shape
        token_RW = token_DW.new_zeros(len(slot_R), width)
        token_RW[:decode_rows] = token_DW
        token_RW[decode_rows:, 0] = final_F
        self._parts.sampling.commit(slot_R, token_RW, torch.cat([accepted_D + 1, torch.ones_like(final_F)]))

    def _draft(self, plan: StepPlan, rows: _Rows, sampled: _Sampled, hidden_TE: torch.Tensor) -> None:
        """Bring the draft layer's cache up to the newest token of every row, then draft `plan.drafts` tokens a row."""
        parts, layout = self._parts, rows.layout
        following_T = self._following_tokens(plan, sampled)
        batch = self._batch(rows, shift=1)
        draft_TE = parts.model.draft(following_T, hidden_TE, batch, parts.cache)
        if not plan.drafts or not layout.sampled_rows:
            return
        # The query whose token is the row's newest: index `accepted` of a decode row, the end of a final prefill row.
        decode_T = torch.arange(layout.decode_rows, device=parts.device) * layout.width + sampled.accepted_D
        ends = layout.logits_tokens()[layout.decode_tokens :]
        hidden_RE = draft_TE[torch.cat([decode_T, torch.tensor(ends, dtype=torch.int64, device=parts.device)])]
        page_RP = parts.state.tensors.page_SP[sampled.slot_R]
        single = BatchLayout(width=1, decode_rows=layout.sampled_rows)
        for index in range(plan.drafts):
            position_R = sampled.length_R + index + 1
            token_R = parts.draft_tokens(hidden_RE, sampled.slot_R, position_R, index)
            parts.state.tensors.draft_SK[sampled.slot_R, index] = token_R
            if index + 1 == plan.drafts:
                break
            batch = Batch(
                layout=single,
                position_T=position_R,
                cache_slot_T=parts.state.cache_slots(sampled.slot_R, position_R),
                decode=DecodeBatch((position_R + 1).to(torch.int32), page_RP),
                prefill=None,
                first=1,
            )
            hidden_RE = parts.model.draft(token_R, hidden_RE, batch, parts.cache)

    def _following_tokens(self, plan: StepPlan, sampled: _Sampled) -> torch.Tensor:
        """[T] the token after each token of the step. Behind a decode row's accepted part it is any valid id: those
        queries' outputs are not read and their cache entries are rewritten before they are attended to."""
        following = [sampled.token_DW.flatten()]
        if plan.prefill:
            shifted = [token for row in plan.prefill for token in (*row.tokens[1:], max(row.next_token, 0))]
            token_P = torch.tensor(shifted, dtype=torch.int64, device=self._parts.device)
            if len(sampled.final_F):
                offset = plan.layout.decode_tokens
                ends = [end - offset for end in plan.layout.logits_tokens()[offset:]]
                token_P[ends] = sampled.final_F
            following.append(token_P)
        return torch.cat(following)
