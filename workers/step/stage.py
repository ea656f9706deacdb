"""Stages of mixed steps: the memory that their passes read, write and hand on.

A `Stage` holds that for steps of so many tokens: addresses stay, contents change from step to step. Tokens past a
step's own are padding: token 0 at position 0, written to the null page, for no expert; their outputs are never read.
What lives across segments lies in one memory; what a segment, or attention between two, needs on its way in another, of
which each has all while it runs.

The last pass ends for the few tokens alone whose hidden states are wanted. They are gathered, for where they lie
depends on the stage, into an `Tail`, which lies in the second memory at the same place for all stages. Here segments
and tails run eagerly; `workers.graphs.segments` has those that are graphs.

Shape legend: T tokens, padding included, N tokens that are wanted, padding included, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from workers.memory.scratch import Scratch
from workers.models.batch import Batch
from workers.models.layer import PassBuffers, PassTensors
from workers.protocol.plan import BatchLayout, TokenKey
from workers.step.buckets import TokenBuckets
from workers.step.parts import StepParts

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

    def draft(
        self,
        hidden_RE: torch.Tensor | None,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        length_R: torch.Tensor,
        page_RP: torch.Tensor,
        drafts: int,
        kept_RS: torch.Tensor | None,
    ) -> None:
        """`StepParts.draft`, behind a mixed step."""
        self.parts.draft(hidden_RE, slot_R, position_R, length_R, page_RP, drafts, self.scratch, kept_RS)

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
