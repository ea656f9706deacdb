"""A step with prefill rows beside decode rows. Its token-wise segments are replayed from graphs where there are some,
attention between them runs eagerly; decode rows attend, verify and draft as in a pure decode step.

Everything the host says about a step reaches the device in one copy, and nothing here waits for the device: the step is
launched behind the one before it.

A `Stage` holds the memory that the passes of steps of so many tokens read, write and hand on: addresses stay, contents
change from step to step. Tokens past a step's own are padding: token 0 at position 0, written to the null page, for no
expert; their outputs are never read. What lives across segments lies in one memory; what a segment, or attention
between two, needs on its way in another, of which each has all while it runs.

The last pass ends for the few tokens alone whose hidden states are wanted. They are gathered, for where they lie
depends on the stage, into a `Tail`, which lies in the second memory at the same place for all stages. Here segments
and tails run eagerly; `workers.graphs.segments` has those that are graphs.

The logits of all tokens of a chunk, which log-probabilities of prompts need, would take gigabytes. So pieces of
`at_once` tokens go through the output head (`score`), in memory that a piece gives back before the step samples, and of
each only the log-probability of the token that follows, its rank and the most probable ids leave the device.

Shape legend: T tokens of the step, or of its stage, padding included, D decode rows, W width, F final prefill rows, R =
D + F sampled rows, B prefill rows, N logits rows, or tokens that are wanted, padding included, P most pages of a row,
or tokens of a piece, E hidden size, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from kernels import decode_state
from kernels.decode_state import accept_drafts
from kernels.page import Shards
from kernels.runtime.ahead import distinct
from kernels.sampling import TokenMasks
from workers.memory.scratch import Scratch, on_device
from workers.models.batch import Batch, DecodeBatch, PrefillBatch
from workers.models.layer import PassBuffers, PassTensors
from workers.protocol.plan import BatchLayout, StepPlan, TokenBuckets, TokenKey
from workers.step.logprobs import Taken
from workers.step.parts import StepOutput, StepParts

TARGET, DRAFT = 0, 1
"""The passes of a step, in their order; some drafters have none."""

PER_TOKEN = 6
"""Numbers per token that come from the host, see `Stage`."""


class Tail:
    """The last segment of the last pass, for `tokens` tokens that are wanted; here it runs eagerly. Padding is live:
    it repeats a token of the step."""

    def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
        """Take all memory from `inner`: when a pass ends, nothing else in it is in use."""
        self.tokens, self._inner = tokens, inner
        self._segments = segments = parts.passes[-1]
        hidden, dtype = parts.model.config.hidden_size, parts.model.norm_E.dtype
        self.out_NE = inner.empty(tokens, hidden, dtype=dtype)
        """Final hidden states."""
        self.buffers = segments.buffers_to_end(tokens, inner)

    def gather(self, buffers: PassBuffers[Any], token_N: torch.Tensor) -> None:
        """Take the tokens `token_N` (int64) out of a stage's buffers."""
        self._segments.gather(buffers, token_N, self.buffers)

    def run(self) -> None:
        """Compute `out_NE` from the gathered inputs."""
        self._segments.end(self.buffers, self.out_NE, self._inner)

    def fill(self, byte: int) -> None:
        """Overwrite all memory that a logits-only tail uses, the stages' inner one with it."""
        self._inner.fill(byte)


class Stage:
    """A place for mixed steps of up to `tokens` tokens; here the segments run eagerly.

    Of the last pass only a few tokens' hidden states are wanted, so it ends with `end` instead of its last segment.
    """

    def __init__(self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch) -> None:
        """`scratch`: for what is handed on. `inner`: for what a segment, or attention, needs on its way.
        Both may be shared by stages that run one after the other."""
        self.parts, self.tokens, self.scratch, self.inner = parts, tokens, scratch, inner
        model, slots = parts.model, parts.state.slots
        # What the host says about a step arrives in one piece: of every token, then of the rows (see `MixedStep`).
        self.uploaded_X = scratch.empty(PER_TOKEN * self._stride + (5 + parts.width) * slots, dtype=torch.int64)
        uploaded_XT, self.rows_X = self.split(self.uploaded_X)
        self.token_T, self.position_T, self.live_T, self.slot_T, self.write_slot_T, self.next_T = uploaded_XT
        self.cache_slot_T = scratch.empty(tokens, dtype=torch.int64)
        hidden, dtype = model.config.hidden_size, model.norm_E.dtype
        self.segments = parts.passes
        self.hidden_TE = scratch.empty(tokens, hidden, dtype=dtype) if len(self.segments) > 1 else None
        """Hidden states of the target's pass, where the draft layer reads them."""
        self.aux_hidden_TF = parts.aux_hidden(tokens, scratch)
        """Auxiliary hidden states of the target's pass, where the drafter reads them."""
        buffers = model.segments.buffers(tokens, scratch)
        inputs = (self.token_T, self.position_T, self.cache_slot_T, self.live_T)
        self.tensors = [PassTensors(*inputs, None, self.hidden_TE, buffers, model.aux_hidden(self.aux_hidden_TF))]
        if self.hidden_TE is not None:
            # The drafter's inputs replace the target's, and its pass the target's buffers.
            self.tensors.append(PassTensors(*inputs, self.hidden_TE, None, self.segments[DRAFT].over(buffers)))

    def smaller(self, tokens: int) -> Stage:
        """A stage for fewer tokens, or as many, whose memory begins where this one's does."""
        return Stage(self.parts, tokens, self.scratch.another(), self.inner)

    @property
    def _stride(self) -> int:
        """Whole pieces of 16 bytes: kernels are compiled anew where a pointer is less aligned."""
        return self.tokens + self.tokens % 2

    def split(self, uploaded_X: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Split a tensor like `uploaded_X` into the numbers of every token, [PER_TOKEN, T], and those of the rows."""
        end = PER_TOKEN * self._stride
        return uploaded_X[:end].view(PER_TOKEN, self._stride)[:, : self.tokens], uploaded_X[end:]

    def fill(self, byte: int) -> None:
        """Overwrite all memory that steps use: nothing in it outlives one."""
        self.scratch.fill(byte)
        self.inner.fill(byte)

    def clear(self) -> None:
        """Feed padding alone: what runs then touches only the null page."""
        self.uploaded_X.zero_()
        self.cache_slot_T.zero_()

    def indices(self, which: int) -> range:
        """Indices of the segments that a pass runs for all tokens."""
        return range(len(self.segments[which]) - (self.tensors[which].out_TE is None))

    def run_pass(self, which: int, batch: Batch) -> None:
        """TARGET or DRAFT, with the rows of `batch`: `hidden_TE` is the result, or what `end` makes of the last."""
        self.segments[which].run_pass(
            self.tensors[which],
            batch,
            self.parts.cache,
            self.scratch,
            lambda index: self.run_segment(which, index),
            self.inner,
        )

    def catch_up(self, batch: Batch, newest_R: torch.Tensor) -> torch.Tensor | None:
        """The drafter's pass over the step's tokens; what it knows of `newest_R` (int64), [R, E], for
        `StepParts.draft`; None if there are none of these, or it knows nothing but what it has cached. Eager where the
        drafter has no segments."""
        if self.hidden_TE is not None:
            self.run_pass(DRAFT, batch)
            return self.end(newest_R) if len(newest_R) else None
        parts, tokens = self.parts, batch.layout.tokens
        assert self.aux_hidden_TF is not None
        own = replace(batch, position_T=batch.position_T[:tokens], cache_slot_T=batch.cache_slot_T[:tokens])
        with self.inner.scope():
            token_T, aux_hidden_TF = self.token_T[:tokens], self.aux_hidden_TF[:tokens]
            drafted_TE = parts.drafter.catch_up(token_T, aux_hidden_TF, own, parts.cache, self.inner)
            if drafted_TE is None:
                return None
            hidden_RE = self.scratch.empty(len(newest_R), drafted_TE.shape[1], dtype=drafted_TE.dtype)
            torch.index_select(drafted_TE, 0, newest_R, out=hidden_RE)
        return hidden_RE if len(newest_R) else None

    def drafts(self, rows: int, drafts: int) -> bool:
        """Whether the drafter is to draft so many tokens for so many rows, behind a mixed step: always."""
        return True

    def target_hidden(self, token_N: torch.Tensor) -> torch.Tensor:
        """Final hidden states [N, E] that the target's pass, which has run, has for some tokens, one at least."""
        if self.hidden_TE is None:
            return self.end(token_N)
        hidden_NE = self.scratch.empty(len(token_N), self.hidden_TE.shape[1], dtype=self.hidden_TE.dtype)
        return torch.index_select(self.hidden_TE, 0, token_N, out=hidden_NE)

    def end(self, token_N: torch.Tensor) -> torch.Tensor:
        """Final hidden states of some tokens of the last pass, one at least, as many rows as `token_N` has; in `inner`,
        which nothing uses behind the last pass."""
        # As many tokens as a bucket has: that is what memory was measured for, and kernels were compiled or captured.
        count = token_N.shape[0]
        key = TokenBuckets(self.tokens).key(BatchLayout(1, count))
        padded_N = self.scratch.empty(key.tokens, dtype=torch.int64).zero_()
        padded_N[:count] = token_N
        with self.inner.scope():
            tail = self.tail(key)
            tail.gather(self.tensors[-1].buffers, padded_N)
            tail.run()
        return tail.out_NE[:count]

    def tail(self, key: TokenKey) -> Tail:
        """Return the tail of the last pass for a number of tokens."""
        return Tail(self.parts, key.tokens, self.inner)

    def run_segment(self, which: int, index: int) -> None:
        """Segment `index` of a pass."""
        self.segments[which].run(index, self.tensors[which], self.parts.cache, self.inner)


LEAST_AT_ONCE = 64
"""Fewer would read the output head once more for hardly any work."""


def at_once(slots: int) -> int:
    """Tokens of a piece: as many as a step may end for anyway, where that is enough."""
    return max(slots, LEAST_AT_ONCE)


def score(parts: StepParts, plan: StepPlan, stage: Stage) -> Taken | None:
    """Score all tokens that the plan's prefill rows ask for, some of which do: how probable the token after each is.
    The result is on rank 0, None elsewhere; all ranks take part. The target's pass has run in `stage`."""
    tokens, taken = plan.layout.score_tokens(plan.prefill), None
    if parts.sampling is not None:
        most = max(row.score_top for row in plan.prefill)
        taken = parts.sampling.scorer.room({}, len(tokens), most, ranks=True)
    piece = min(at_once(parts.state.slots), stage.tokens)
    for begin in distinct(range(0, len(tokens), piece)):
        part = tokens[begin : begin + piece]
        with stage.scratch.scope():
            # Always as many, for which kernels are compiled: the last one is repeated.
            token_P = on_device(part + part[-1:] * (piece - len(part)), torch.int64, parts.device)
            logits_PV = parts.model.logits(stage.target_hidden(token_P), stage.scratch)
            if taken is not None and parts.sampling is not None:
                rows = range(len(part))
                parts.sampling.scorer.fill(taken, begin, logits_PV, stage.next_T[token_P], rows)
    return taken


@dataclass(frozen=True)
class _Rows:
    """Tensors of this step's rows. Contents move on with the draft pass, as the stage's do."""

    layout: BatchLayout
    slot_R: torch.Tensor
    end_N: torch.Tensor
    """The token of every logits row."""
    length_F: torch.Tensor
    """Cache entries of each final row after this step."""
    token_DW: torch.Tensor
    position_DW: torch.Tensor
    cache_slot_DW: torch.Tensor
    length_D: torch.Tensor
    page_DP: torch.Tensor
    page_BP: torch.Tensor
    start: tuple[int, ...]
    """Position of each prefill row's first token."""
    prefill_slot: tuple[int, ...]

    @property
    def end_F(self) -> torch.Tensor:
        """The last token of every final prefill row."""
        return self.end_N[self.layout.decode_tokens :]


def _message(plan: StepPlan, stage: Stage) -> torch.Tensor:
    """Pack the host's data about the step, laid out as `Stage.uploaded_X`; in pinned memory for a GPU.

    Of every prefill token its id, position, whether it is live, its slot, the slot it is written to (-1, whose pages
    are null pages, if it is suppressed) and the token after it; decode tokens come from the slots' state. Then, of the
    rows: sampled slots, tokens of the logits rows, lengths of final rows, slots of prefill rows.
    """
    layout = plan.layout
    pinned = stage.uploaded_X.is_cuda
    message_X = torch.zeros(stage.uploaded_X.shape, dtype=torch.int64, pin_memory=pinned)
    message_XT, rows_X = stage.split(message_X)
    token_T, position_T, live_T, slot_T, write_slot_T, next_T = message_XT
    live_T[: layout.tokens] = 1
    slot_T.fill_(-1)
    write_slot_T.fill_(-1)
    for row, begin in zip(plan.prefill, layout.prefill_offsets(), strict=False):
        count = len(row.tokens)
        end = begin + count
        # Eight times as fast as `torch.tensor`, which takes most of a millisecond for 8192 tokens.
        token_T[begin:end] = fed = torch.frombuffer(array("q", row.tokens), dtype=torch.int64)
        torch.arange(row.start, row.start + count, out=position_T[begin:end])
        slot_T[begin:end] = row.slot
        write_slot_T[begin + min(max(row.write_from - row.start, 0), count) : end] = row.slot
        next_T[begin : end - 1] = fed[1:]
        next_T[end - 1] = max(row.next_token, 0)
    finals = [row for row in plan.prefill if row.final]
    rows = [*plan.decode_slots, *(row.slot for row in finals), *layout.logits_tokens()]
    rows += [row.start + len(row.tokens) for row in finals]
    rows += [row.slot for row in plan.prefill]
    rows_X[: len(rows)] = torch.tensor(rows)
    return message_X


class MixedStep:
    """Runs plans that have prefill rows."""

    def __init__(self, parts: StepParts) -> None:
        self._parts = parts
        self._follows = parts.width > 1 and parts.drafter.follows

    def run(self, plan: StepPlan, stage: Stage, masks: Callable[[], TokenMasks | None] | None = None) -> StepOutput:
        """Everything, from the slots' state and the plan's prompts to the slots' next state. The stage holds at least
        the plan's tokens; the output lies in its memory until its next step. `masks` is called when the target's pass
        is launched, for the masks to sample under; it may wait."""
        parts = self._parts
        with stage.scratch.scope():
            rows = self._rows(plan, stage)
            stage.run_pass(TARGET, self._batch(rows, stage, first=0))
            scored = score(parts, plan, stage) if any(row.scored for row in plan.prefill) else None
            decided_N, logits_NV = self._sample(rows, stage, masks)
            newest_R = self._advance(rows, decided_N, stage)
            if parts.width > 1:
                self._draft(plan.drafts, rows, decided_N, newest_R, stage)
        return StepOutput(rows.layout, decided_N, logits_NV, scored)

    def _rows(self, plan: StepPlan, stage: Stage) -> _Rows:
        parts, layout, scratch = self._parts, plan.layout, stage.scratch
        state, split = parts.state.tensors, layout.decode_tokens
        shape = (layout.decode_rows, layout.width)
        stage.uploaded_X.copy_(_message(plan, stage), non_blocking=True)
        sizes = [layout.sampled_rows, layout.logits_rows, sum(layout.prefill_final), len(plan.prefill)]
        slot_R, end_N, length_F, slot_B = torch.split(stage.rows_X[: sum(sizes)], sizes)
        rows = _Rows(
            layout=layout,
            slot_R=slot_R,
            end_N=end_N,
            length_F=length_F,
            token_DW=stage.token_T[:split].view(shape),
            position_DW=stage.position_T[:split].view(shape),
            cache_slot_DW=stage.cache_slot_T[:split].view(shape),
            length_D=scratch.empty(layout.decode_rows, dtype=torch.int32),
            page_DP=scratch.empty(layout.decode_rows, parts.state.pages_per_row, dtype=torch.int32),
            page_BP=state.page_SP[slot_B],
            start=tuple(row.start for row in plan.prefill),
            prefill_slot=tuple(row.slot for row in plan.prefill),
        )
        if layout.decode_rows:
            decode_state.feed(
                state,
                slot_R[: layout.decode_rows],
                rows.token_DW,
                rows.position_DW,
                rows.cache_slot_DW,
                rows.length_D,
                rows.page_DP,
                parts.state.shards,
            )
        self._place(stage, split, stage.write_slot_T, parts.state.shards)
        return rows

    def _place(self, stage: Stage, split: int, slot_T: torch.Tensor, shards: Shards) -> None:
        """Cache indices of the tokens from `split` on, padding included: nobody's slot, -1, has null pages."""
        where = slot_T[split:], stage.position_T[split:]
        stage.cache_slot_T[split:] = self._parts.state.cache_slots(*where, shards)

    def _batch(self, rows: _Rows, stage: Stage, first: int) -> Batch:
        """The target pass (first 0), or the draft layer's over the same layout, whose entries lie one further."""
        layout = rows.layout
        decode = None
        if layout.decode_rows:
            slot_D = rows.slot_R[: layout.decode_rows]
            wanted_D = None if first else self._parts.wanted(slot_D, layout.width, stage.scratch)
            decode = DecodeBatch(rows.length_D, rows.page_DP, slot_R=slot_D, wanted_R=wanted_D)
        start = tuple(position + first for position in rows.start)
        prefill = PrefillBatch(start, layout.prefill_tokens, rows.page_BP, rows.prefill_slot)
        return Batch(layout, stage.position_T, stage.cache_slot_T, decode, prefill, first)

    def _sample(
        self, rows: _Rows, stage: Stage, masks: Callable[[], TokenMasks | None] | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The packed decision, made on rank 0 for all ranks: target tokens, accepted counts, which logits rows
        are bad, how many ids are none. And the logits, None if no row is sampled."""
        parts, layout, scratch = self._parts, rows.layout, stage.scratch
        count = layout.logits_rows
        decided_N = torch.zeros(layout.decision_size, dtype=torch.int64, device=parts.device)
        if not count:
            return decided_N, None
        logits_NV = parts.model.logits(stage.target_hidden(rows.end_N), scratch)
        if parts.sampling is not None:
            target_N, accepted_D = decided_N[layout.target_slice], decided_N[layout.accepted_slice]
            position_N = scratch.empty(count, dtype=torch.int64)
            torch.index_select(stage.position_T, 0, rows.end_N, out=position_N)
            parts.sampling.target_tokens(
                logits_NV,
                layout,
                rows.slot_R,
                rows.token_DW,
                position_N,
                ahead=1,
                out=target_N,
                nonfinite=decided_N[layout.nonfinite_slice],
                scratch=scratch,
                masks=None if masks is None else masks(),
            )
            target_DW = target_N[: layout.decode_tokens].view_as(rows.token_DW)
            fault_1, vocab = parts.sampling.fault_1, parts.model.config.vocab_size
            if layout.decode_rows:
                accept_drafts(target_DW, rows.token_DW[:, 1:], accepted_D, vocab, fault_1)
                if (verified_D := parts.verified(rows.slot_R[: layout.decode_rows], scratch)) is not None:
                    torch.minimum(accepted_D, verified_D, out=accepted_D)
            self._commit(rows, target_DW, accepted_D, decided_N[layout.final_slice])
            decided_N[-1:].copy_(fault_1)
        return parts.group.broadcast(decided_N), logits_NV

    def _commit(self, rows: _Rows, target_DW: torch.Tensor, accepted_D: torch.Tensor, final_F: torch.Tensor) -> None:
        """Tell the sampling what was generated."""
        assert self._parts.sampling is not None
        token_RW = target_DW.new_zeros(len(rows.slot_R), rows.layout.width)
        token_RW[: len(target_DW)] = target_DW
        token_RW[len(target_DW) :, 0] = final_F
        count_R = torch.cat([accepted_D, torch.zeros_like(final_F)])
        self._parts.sampling.commit(rows.slot_R, token_RW, count_R, more=1)

    def _advance(self, rows: _Rows, decided_N: torch.Tensor, stage: Stage) -> torch.Tensor:
        """Take the verified tokens into the slots' state; the token [R] after which each sampled row's newest comes."""
        state, layout = self._parts.state.tensors, rows.layout
        decode, split = layout.decode_rows, layout.decode_tokens
        newest_R = stage.scratch.empty(layout.sampled_rows, dtype=torch.int64)
        if decode:
            decode_state.advance(
                state,
                rows.slot_R[:decode],
                decided_N[:split].view_as(rows.token_DW),
                decided_N[layout.accepted_slice],
                rows.position_DW,
                rows.cache_slot_DW,
                rows.length_D,
                newest_R[:decode],
                self._parts.draft_shards,
            )
        if layout.sampled_rows > decode:
            newest_R[decode:] = rows.end_F
            slot_F = rows.slot_R[decode:]
            state.length_S[slot_F] = rows.length_F
            state.last_S[slot_F] = decided_N[layout.final_slice]
            if self._parts.state.keeps_tokens:
                state.token_SX[slot_F, rows.length_F] = decided_N[layout.final_slice].to(torch.int32)
        return newest_R

    def _draft(self, drafts: int, rows: _Rows, decided_N: torch.Tensor, newest_R: torch.Tensor, stage: Stage) -> None:
        """Bring the drafter's cache, if it has one, up to the newest token of every row, then draft for the next
        step."""
        parts, layout, scratch = self._parts, rows.layout, stage.scratch
        state = parts.state.tensors
        drafts = drafts if layout.sampled_rows else 0
        hidden_RE, kept_TS = None, parts.kept(layout.tokens, drafts, scratch)
        if self._follows:
            hidden_RE = self._catch_up(rows, decided_N, newest_R if drafts else newest_R[:0], stage, kept_TS)
        if not drafts:
            return
        kept_RS = None if kept_TS is None else kept_TS[newest_R]
        position_R = state.length_S[rows.slot_R] + 1
        length_R = scratch.empty(layout.sampled_rows, dtype=torch.int32)
        rows_R = rows.slot_R, position_R, length_R, state.page_SP[rows.slot_R]
        if stage.drafts(layout.sampled_rows, drafts):
            parts.draft(hidden_RE, *rows_R, drafts, scratch, kept_RS)

    def _catch_up(
        self,
        rows: _Rows,
        decided_N: torch.Tensor,
        newest_R: torch.Tensor,
        stage: Stage,
        kept_TS: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Let the drafter take the tokens of the step into its cache; what it knows of the newest ones."""
        layout, split = rows.layout, rows.layout.decode_tokens
        # Behind a decode row's accepted tokens the target's are any valid ids: those queries' outputs are not read, and
        # their cache entries are rewritten before they are attended to.
        stage.token_T[:split] = decided_N[:split]
        stage.token_T[split:] = stage.next_T[split:]
        stage.token_T.index_copy_(0, rows.end_F, decided_N[layout.final_slice])
        stage.position_T[split:] += 1
        self._place(stage, split, stage.slot_T, self._parts.draft_shards)
        return stage.catch_up(replace(self._batch(rows, stage, first=1), kept_TS=kept_TS), newest_R)
