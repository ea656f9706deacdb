"""The state that a step of either kind is proven on: random where a row owns it, poison everywhere else.

Random are the tokens and drafts of the slots and the cache entries behind the rows, those of their rings among them.
What no row may read is NaN (the null page, a former tenant's page, entries that are not cached yet and the draft
layer's entry 0; in rings the null slot, slots without a row, and tokens that a row's next one does not need) or huge
(page ids past a row's pages); slots without a row hold what a former tenant left there, its page among it.

What all ranks must agree on is drawn on the host; the cache's contents are drawn where they lie, in the same order
everywhere. A fixture keeps one copy of what it wrote: it is restored from it, and compared with it.

Shape legend: R rows, S slots, P pages in play, K entries per page, E entries, C cached features, L layers, G rings, T
page-table entries, N logits rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS
from workers.cache.paged import PagedCache
from workers.cache.random_pages import RandomPages
from workers.cache.random_rings import RandomRings, RingRow
from workers.memory.bits import differ
from workers.memory.scratch import on_device
from workers.proof.rows import Row, draft_entries, pages_in_play, target_entries
from workers.protocol.plan import Admission, BatchLayout, PageGrant, SamplingParams
from workers.step.parts import StepOutput, StepParts

HUGE_PAGE = 2147480000
"""A page id no pool has; adding a few to it still fits int32."""


def slot_tensors(parts: StepParts) -> list[Tensor]:
    """All that a rank knows of its slots: lengths, last tokens, drafts, page tables, then what sampling does."""
    tensors = parts.state.tensors
    found: list[Tensor] = [getattr(tensors, field.name) for field in fields(tensors)]
    if parts.sampling is not None:
        tables = parts.sampling.tables
        found += [getattr(tables, field.name) for field in fields(tables)] + [parts.sampling.fault_1]
    return found


@dataclass(frozen=True)
class Outcome:
    """Outcome of one run of a step."""

    layout: BatchLayout
    decided_N: Tensor
    logits_NV: Tensor
    slots: list[Tensor]
    """Copies of `StepFixture.slot_names`."""
    own: list[Tensor]
    """[E, C] of every layer, as integers: the entries the step may write."""
    outside_L: Tensor
    """bool: other entries of the layer have changed."""
    unwritten_L: Tensor
    """bool, of the target's layers: not all entries that the step has to write have changed."""
    rings: list[Tensor]
    """[E, C] of every ring, as integers: the tokens that the step writes."""
    rings_outside_G: Tensor
    """bool: other tokens of the ring have changed."""
    rings_unwritten_G: Tensor
    """bool: not all tokens of the step have changed."""
    foreign: Tensor
    """bool: a slot has changed that is of no row, or of one that was not sampled."""
    invalid_drafts: Tensor
    """bool: logits of a row's draft, in this run, were no finite numbers. Padded rows count nothing."""


class StepFixture:
    """Rows in slots and cache, with a copy of all that a step may change."""

    def __init__(
        self,
        parts: StepParts,
        rows: Sequence[Row],
        sampling: Sequence[SamplingParams],
        former: Sequence[int],
        host: torch.Generator,
        noise: torch.Generator,
    ) -> None:
        """`sampling`: of every row. `former`: pages that slots without a row have in their tables, one at most."""
        self.parts, self.rows = parts, rows
        self.slot_R = self._on_device([row.slot for row in rows])
        self._set_cache([NULL_PAGE, *former], noise)
        self._set_slots(sampling, former, host)
        self._live = slot_tensors(parts)
        self.slot_names = ["length", "last token", "drafts", "page table", "tokens", "unlikely drafts"]
        self.slot_names += ["sampling tables"] * (len(self._live) - len(self.slot_names))
        self._slots = [tensor.clone() for tensor in self._live]
        self._draft_SK = self._slots[2]
        sampled = {row.slot for row in rows if row.logits_rows}
        self._not_sampled = self._on_device([slot for slot in range(parts.state.slots + 1) if slot not in sampled])
        self.restore()

    def _on_device(self, values: Sequence[object]) -> Tensor:
        return on_device(values, torch.int64, self.parts.device)

    def _set_cache(self, unowned: Sequence[int], noise: torch.Generator) -> None:
        """Fill the pages in play, and note which of their entries the step may write and which must stay."""
        rows, cache, device = self.rows, self.parts.cache, self.parts.device
        shards, drafted = self.parts.state.shards, self.parts.draft_shards
        of_sizes = {
            tokens: target_entries(rows, unowned, shards, tokens).to(device)
            for tokens in {spec.tokens_of_entry for spec in cache.specs}
        }
        self._entries = [of_sizes[spec.tokens_of_entry] for spec in cache.specs]
        if self.parts.width > 1:
            drafter = slice(len(self.parts.model.cache), None)
            self._entries[drafter] = [draft_entries(rows, unowned, drafted).to(device)] * len(self.parts.drafter.cache)
        self._in_play = pages_in_play(rows, unowned)
        self._pages = RandomPages(cache, self._in_play, noise)
        for layer, entries in enumerate(self._entries):
            self._pages.poison(layer, entries.poison_PK)
        slots = {row.slot for row in rows}
        unowned_slots = [slot for slot in range(self.parts.state.slots) if slot not in slots]
        of_rows = [
            RingRow(row.slot, row.start, row.end, row.drafts, prompt=row.end - row.start > max(row.logits_rows, 1))
            for row in rows
        ]
        self._rings = RandomRings(cache, of_rows, unowned_slots, noise)

    def _set_slots(self, sampling: Sequence[SamplingParams], former: Sequence[int], host: torch.Generator) -> None:
        parts, state, rows = self.parts, self.parts.state, self.rows
        tensors, vocab = state.tensors, parts.model.config.vocab_size
        tensors.length_S.copy_(torch.randint(1, PAGE_TOKENS // 2, tensors.length_S.shape, generator=host))
        for tensor in (tensors.last_S, tensors.draft_SK):
            tensor.copy_(torch.randint(0, vocab, tensor.shape, generator=host))
        tensors.unlikely_S.zero_()  # all drafts are verified
        # Few different ones, so that what a drafter looks for is found.
        tensors.token_SX.copy_(torch.randint(0, min(vocab, 3), tensors.token_SX.shape[1:], generator=host))
        # Newcomers take slots whose tables are full of ids that no pool has.
        tensors.page_SP[:-1] = former[0] if former else NULL_PAGE
        tensors.page_SP[self.slot_R] = HUGE_PAGE
        admissions = [Admission(row.slot, params) for row, params in zip(rows, sampling, strict=True)]
        state.admit(admissions)
        state.grant([PageGrant(row.slot, 0, row.pages) for row in rows])
        if parts.sampling is not None:
            parts.sampling.admit(admissions)
            parts.sampling.fault_1.zero_()  # of the step before: a fault there is none here
        parts.cache.out_of_bounds_count_1.zero_()
        row_RT = tensors.page_SP[self.slot_R]
        count_R, cached_R = self._on_device([[len(row.pages) for row in rows], [row.cached for row in rows]])
        past_RT = torch.arange(row_RT.shape[1], device=parts.device) >= count_R.unsqueeze(1)
        self._stale = (past_RT & (row_RT != NULL_PAGE)).any()
        tensors.page_SP[self.slot_R] = row_RT.masked_fill(past_RT, HUGE_PAGE)
        tensors.length_S[self.slot_R] = cached_R

    def propose(self, index: int, token_R: Tensor, chosen_R: Tensor) -> None:
        """Let draft number `index` of the rows in `chosen_R` (bool) be `token_R`, from the next `restore` on."""
        before_R = self._draft_SK[self.slot_R, index]
        self._draft_SK[self.slot_R, index] = torch.where(chosen_R, token_R, before_R)

    def restore(self) -> None:
        """Put everything back to where it was before any step."""
        for live, kept in zip(self._live, self._slots, strict=True):
            live.copy_(kept)
        if self.parts.sampling is not None:
            self.parts.sampling.invalid_drafts_1.zero_()  # it counts over all steps, and runs that nobody looks at
        self._pages.restore()
        self._rings.restore()

    def whole_cache(self) -> tuple[PagedCache, Tensor]:
        """Return a copy of the caches of all ranks, as `restore` leaves them, and the rows' page tables for it (int32):
        pages are numbered as they come there. Rings are in the order of the rows."""
        number = {page: index for index, page in enumerate(self._in_play)}
        columns = max(len(row.pages) for row in self.rows)
        tables = [[*map(number.__getitem__, row.pages), *[HUGE_PAGE] * (columns - len(row.pages))] for row in self.rows]
        whole = self._pages.whole()
        whole.rings, whole.ring_specs = self._rings.copies(), self.parts.cache.ring_specs
        return whole, on_device(tables, torch.int32, self.parts.device)

    def outcome(self, output: StepOutput) -> Outcome:
        """Return the outcome of a step that began here."""
        assert output.logits_NV is not None
        own, outside, unwritten = [], [], []
        for layer, entries in enumerate(self._entries):
            changed_PK, kept_PK = self._pages.changed(layer), self._pages.own(layer, entries.kept_PK)
            outside.append((changed_PK & kept_PK).any())
            if layer < len(self.parts.model.cache):  # the null page, which comes first, is nobody's
                unwritten.append((~changed_PK & ~kept_PK)[1:].any())
            own.append(self.parts.cache.entry_bits(layer, entries.own_E))
        foreign = [
            differ(live.index_select(0, self._not_sampled), kept.index_select(0, self._not_sampled))
            for live, kept in zip(self._live, self._slots, strict=True)
            if live.shape[0] == self.parts.state.slots + 1
        ]
        sampling = self.parts.sampling
        rings, nothing = range(len(self.parts.cache.rings)), torch.zeros(0, dtype=torch.bool)
        return Outcome(
            layout=output.layout,
            decided_N=output.decided_N.clone(),
            logits_NV=output.logits_NV.clone(),
            slots=[live.clone() for live in self._live],
            own=own,
            outside_L=torch.stack(outside),
            unwritten_L=torch.stack(unwritten),
            rings=[self._rings.own_bits(ring) for ring in rings],
            rings_outside_G=torch.stack([self._rings.outside(ring) for ring in rings]) if rings else nothing,
            rings_unwritten_G=torch.stack([self._rings.unwritten(ring) for ring in rings]) if rings else nothing,
            foreign=torch.stack(foreign).any(),
            invalid_drafts=nothing.any() if sampling is None else sampling.invalid_drafts_1 != 0,
        )

    def problems(self, eager: Outcome, replay: Outcome) -> list[str]:
        """Return the differences between two runs that began here, and the changes that neither should have made."""
        layout, rows, live = eager.layout, len(self.rows), sum(row.logits_rows for row in self.rows)
        # Padded rows, which decode steps have, are behind the others.
        eager_N, replay_N = (outcome.decided_N[layout.target_slice][:live] for outcome in (eager, replay))
        eager_R, replay_R = (outcome.decided_N[layout.accepted_slice][:rows] for outcome in (eager, replay))
        eager_F, replay_F = (outcome.decided_N[layout.fault_slice] != 0 for outcome in (eager, replay))
        found = [
            ("a newcomer's page table keeps former pages", self._stale),
            ("target tokens differ", differ(eager_N, replay_N)),
            ("accepted counts differ", differ(eager_R, replay_R)),
            ("logits or ids were out of range", eager_F.any() | replay_F.any()),
            ("logits differ", differ(eager.logits_NV[:live], replay.logits_NV[:live])),
            ("a slot without a sampled row changed", eager.foreign | replay.foreign),
            (
                "attention met rows, positions or pages outside of the cache",
                self.parts.cache.out_of_bounds_count_1 != 0,
            ),
        ]
        if self.parts.sampling is not None:
            found.append(("logits of drafts were no numbers", eager.invalid_drafts | replay.invalid_drafts))
        found += [
            (f"{name} differs", differ(a, b))
            for name, a, b in zip(self.slot_names, eager.slots, replay.slots, strict=True)
        ]
        for layer, (a, b) in enumerate(zip(eager.own, replay.own, strict=True)):
            found.append((f"cache of layer {layer} differs", differ(a, b)))
        outside_L = eager.outside_L | replay.outside_L
        for layer in range(len(outside_L)):
            found.append((f"cache of layer {layer} changed outside the rows' own entries", outside_L[layer]))
        unwritten_L = eager.unwritten_L | replay.unwritten_L
        for layer in range(len(unwritten_L)):
            found.append((f"cache of layer {layer} lacks entries of the step", unwritten_L[layer]))
        outside_G = eager.rings_outside_G | replay.rings_outside_G
        unwritten_G = eager.rings_unwritten_G | replay.rings_unwritten_G
        for ring, (a, b) in enumerate(zip(eager.rings, replay.rings, strict=True)):
            found += [
                (f"ring {ring} differs", differ(a, b)),
                (f"ring {ring} changed outside the rows' own tokens", outside_G[ring]),
                (f"ring {ring} lacks tokens of the step", unwritten_G[ring]),
            ]
        # One wait for all of them.
        told = torch.stack([wrong.view(()) for _, wrong in found]).tolist()
        return [
            *(f"ring {ring} has no room for drafts that are rejected" for ring in self._rings.crowded),
            *(text for (text, _), wrong in zip(found, told, strict=True) if wrong),
        ]
