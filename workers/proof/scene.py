"""The ground on which a step is tested: random state where a row owns it, poison everywhere else.

Random are the lengths, tokens, drafts, page tables and sampling parameters of the rows and the cache entries behind
them. What no row may read is NaN (the null page, a former tenant's page, entries past a row's length and the draft
layer's entry 0) or huge (page ids past a row's pages); slots without a row hold what a former tenant left there.

What all ranks must agree on is drawn on the host; the cache's contents are drawn where they lie, in the same order
everywhere. A scene keeps one copy of what it wrote: it is restored from it, and compared with it.

Shape legend: R rows, S slots, W width, P pages in play, K = 64 entries a page, E entries, C cached features, L layers,
T page-table entries, N logits rows, V vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, pages_for
from workers.protocol.plan import Admission, GraphKey, PageGrant, SamplingParams
from workers.step.parts import StepOutput, StepParts

HUGE_PAGE = 2147480000
"""A page id no pool has; adding a few to it still fits int32."""

MOST_PAGES = {"cuda": 8, "cpu": 3}
"""Pages of the longest row: on a GPU attention deals long rows out to many workers, on a CPU they are only slow."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def differ(a: Tensor, b: Tensor) -> Tensor:
    """Whether two tensors of one shape and dtype differ in any bit: a bool on their device, not waited for."""
    bits = _BITS[a.element_size()]
    return (a.view(bits) != b.view(bits)).any()


def slot_tensors(parts: StepParts) -> list[Tensor]:
    """All that a rank knows of its slots: lengths, last tokens, drafts, page tables, then what sampling does."""
    tensors = parts.state.tensors
    found: list[Tensor] = [getattr(tensors, field.name) for field in fields(tensors)]
    if parts.sampling is not None:
        tables = parts.sampling.tables
        found += [getattr(tables, field.name) for field in fields(tables)] + [parts.sampling.fault_1]
    return found


def scrub(parts: StepParts, page_P: Tensor) -> None:
    """Leave nothing behind in slots and pages: not a NaN, not a page id, not a parameter."""
    tensors = parts.state.tensors
    for field in fields(tensors):
        getattr(tensors, field.name).zero_()
    for layer in parts.cache.layers:
        layer.index_fill_(0, page_P, 0.0)
    if parts.sampling is not None:
        greedy = SamplingParams(1, temperature=0.0)
        parts.sampling.admit([Admission(slot, greedy) for slot in range(parts.state.slots)])
        parts.sampling.fault_1.zero_()


@dataclass(frozen=True)
class Row:
    """A live row."""

    slot: int
    length: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """What one run of a step left."""

    decided_N: Tensor
    logits_NV: Tensor
    slots: list[Tensor]
    """Copies of `Scene.slot_names`."""
    own: list[Tensor]
    """[E, C] of every layer: the entries the step may write."""
    outside_L: Tensor
    """bool: other entries of the layer have changed."""
    foreign: Tensor
    """bool: a slot without a row has changed."""


class Ground:
    """One rank's slots and cache, on which one scene after the other is set."""

    def __init__(self, parts: StepParts, seed: int) -> None:
        """Equal seeds give equal scenes on every rank."""
        self._parts, self._most_pages = parts, MOST_PAGES[parts.device.type]
        self._host = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(parts.device).manual_seed(seed)
        # From the whole pool, so that large addresses occur; few, so that a CPU need not back all of it with memory.
        most = min(parts.cache.pages - 1, parts.state.slots * self._most_pages + 1)
        self._pool = random.Random(seed).sample(range(NULL_PAGE + 1, parts.cache.pages), most)
        if not self._pool:
            raise RuntimeError("the self-test needs a pool of at least 2 pages, the null page included")

    def scene(self, key: GraphKey) -> Scene:
        """New random rows for a bucket, written to slots and cache."""
        pool = [self._pool[index] for index in torch.randperm(len(self._pool), generator=self._host).tolist()]
        former = pool[:1] if len(pool) > 1 else []
        rows = self._rows(key, pool[len(former) :])
        # Every other row samples, and so hot that its noise decides.
        hot = self.number(0, 1)
        sampling = [
            SamplingParams(100, temperature=2.0 * ((hot + index) % 2), seed=self.number(0, 2**40))
            for index in range(len(rows))
        ]
        return Scene(self._parts, key, rows, sampling, former, self._host, self._noise)

    def number(self, low: int, high: int) -> int:
        """A random one, both ends included."""
        return int(torch.randint(low, high + 1, (1,), generator=self._host))

    def _rows(self, key: GraphKey, free: Sequence[int]) -> list[Row]:
        """As many live rows as slots and pages allow, one short of the bucket at times, with random lengths: short
        ones, those around a page's end, and long ones."""
        state, width = self._parts.state, self._parts.width
        overshoot = 2 * width
        slots = torch.randperm(state.slots, generator=self._host).tolist()
        most = (
            min(min(state.pages_per_row, self._most_pages) * PAGE_TOKENS, self._parts.model.max_positions) - overshoot
        )
        rows: list[Row] = []
        used = 0
        for slot in slots[: max(1, key.rows - self.number(0, 1))]:
            kind = self.number(0, 3)
            length = (1, 1 + self.number(0, 5), PAGE_TOKENS - self.number(0, width), self.number(1, most))[kind]
            length = max(1, min(length, most))
            need = pages_for(length + overshoot)
            if used + need > len(free):
                length, need = 1, 1
                if used + need > len(free):
                    break
            rows.append(Row(slot, length, tuple(free[used : used + need])))
            used += need
        return rows

    def scrub(self) -> None:
        """Leave nothing of any scene behind."""
        scrub(self._parts, torch.tensor([NULL_PAGE, *self._pool], device=self._parts.device))


class Scene:
    """Rows of one bucket in slots and cache, with a copy of all that a step may change."""

    def __init__(
        self,
        parts: StepParts,
        key: GraphKey,
        rows: Sequence[Row],
        sampling: Sequence[SamplingParams],
        former: Sequence[int],
        host: torch.Generator,
        noise: torch.Generator,
    ) -> None:
        self.parts, self.key, self.rows = parts, key, rows
        self.slot_R = self._tensor([row.slot for row in rows])
        self._set_cache(former, noise)
        self._set_slots(sampling, former, host)
        self._live = slot_tensors(parts)
        self.slot_names = ["length", "last token", "drafts", "page table"]
        self.slot_names += ["sampling tables"] * (len(self._live) - len(self.slot_names))
        self._slots = [tensor.clone() for tensor in self._live]
        self._draft_SK = self._slots[2]
        without_row_S = torch.ones(parts.state.slots + 1, dtype=torch.bool, device=parts.device)
        self._without_row = without_row_S.index_fill_(0, self.slot_R, False).nonzero().squeeze(1)
        self.restore()

    def _tensor(self, values: Sequence[object]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.parts.device)

    def _set_cache(self, former: Sequence[int], noise: torch.Generator) -> None:
        """What the pages in play hold, which of their entries the step may write, and which must stay."""
        key, rows, layers = self.key, self.rows, self.parts.cache.layers
        nobodys = [NULL_PAGE, *former]
        # Of every page in play: its id, the position it begins at, and its row's length (-1 where it has no row).
        pages = [*nobodys, *(page for row in rows for page in row.pages)]
        begins = [0] * len(nobodys) + [PAGE_TOKENS * index for row in rows for index in range(len(row.pages))]
        lengths = [-1] * len(nobodys) + [row.length for row in rows for _ in row.pages]
        self._page_P, begin_P, length_P = self._tensor([pages, begins, lengths])
        position_PK = begin_P.unsqueeze(1) + torch.arange(PAGE_TOKENS, device=self.parts.device)
        length_P1 = length_P.unsqueeze(1)
        owned_P1 = length_P1 >= 0
        own_PK = owned_P1 & (position_PK >= length_P1) & (position_PK < length_P1 + key.width)
        poison_PK = position_PK >= length_P1
        masks = [(own_PK, poison_PK)] * len(layers)
        if self.parts.width > 1:
            # The draft layer's entries lie one further, and its last draft is never fed.
            end_P1 = length_P1 + key.width + max(key.drafts, 1)
            own_PK = owned_P1 & (position_PK > length_P1) & (position_PK < end_P1)
            masks[-1] = (own_PK, (position_PK > length_P1) | (position_PK == 0) | ~owned_P1)
        self._contents, self._kept, self._own = [], [], []
        for layer, (_, poison_PK) in zip(layers, masks, strict=True):
            content_PKC = torch.empty(len(pages), *layer.shape[1:], dtype=layer.dtype, device=layer.device)
            content_PKC.uniform_(-1.7, 1.7, generator=noise).masked_fill_(poison_PK.unsqueeze(-1), torch.nan)
            self._contents.append(content_PKC)
        for own_PK, _ in masks[:1] + masks[-1:]:
            kept_PK = ~own_PK
            kept_PK[0] = False  # the null page is for everybody to write
            self._kept.append(kept_PK)
            self._own.append(own_PK.flatten().nonzero().squeeze(1))

    def _set_slots(self, sampling: Sequence[SamplingParams], former: Sequence[int], host: torch.Generator) -> None:
        parts, state, rows = self.parts, self.parts.state, self.rows
        tensors, vocab = state.tensors, parts.model.config.vocab_size
        tensors.length_S.copy_(torch.randint(1, PAGE_TOKENS // 2, tensors.length_S.shape, generator=host))
        for tensor in (tensors.last_S, tensors.draft_SK):
            tensor.copy_(torch.randint(0, vocab, tensor.shape, generator=host))
        # Newcomers take slots whose tables are full of ids that no pool has.
        tensors.page_SP[:-1] = former[0] if former else NULL_PAGE
        tensors.page_SP[self.slot_R] = HUGE_PAGE
        admissions = [Admission(row.slot, params) for row, params in zip(rows, sampling, strict=True)]
        state.admit(admissions)
        state.grant([PageGrant(row.slot, 0, row.pages) for row in rows])
        if parts.sampling is not None:
            parts.sampling.admit(admissions)
            parts.sampling.fault_1.zero_()  # of the bucket before: a fault there is none here
        row_RT = tensors.page_SP[self.slot_R]
        count_R, length_R = self._tensor([[len(row.pages) for row in rows], [row.length for row in rows]])
        past_RT = torch.arange(row_RT.shape[1], device=parts.device) >= count_R.unsqueeze(1)
        self.stale = (past_RT & (row_RT != NULL_PAGE)).any()
        """bool: a newcomer's page table kept former pages."""
        tensors.page_SP[self.slot_R] = row_RT.masked_fill(past_RT, HUGE_PAGE)
        tensors.length_S[self.slot_R] = length_R

    def propose(self, index: int, token_R: Tensor, chosen_R: Tensor) -> None:
        """Let draft number `index` of the rows in `chosen_R` (bool) be `token_R`, from the next `restore` on."""
        before_R = self._draft_SK[self.slot_R, index]
        self._draft_SK[self.slot_R, index] = torch.where(chosen_R, token_R, before_R)

    def restore(self) -> None:
        """Put everything back to where it was before any step."""
        for live, kept in zip(self._live, self._slots, strict=True):
            live.copy_(kept)
        for layer, content_PKC in zip(self.parts.cache.layers, self._contents, strict=True):
            layer.index_copy_(0, self._page_P, content_PKC)

    def outcome(self, output: StepOutput) -> Outcome:
        """What a step that began here has left."""
        assert output.logits_NV is not None
        own, outside = [], []
        layers = self.parts.cache.layers
        for index, (layer, content_PKC) in enumerate(zip(layers, self._contents, strict=True)):
            last = index == len(layers) - 1
            now_PKC = layer.index_select(0, self._page_P)
            bits = _BITS[layer.element_size()]
            changed_PK = (now_PKC.view(bits) != content_PKC.view(bits)).any(-1)
            outside.append((changed_PK & self._kept[last]).any())
            own.append(now_PKC.flatten(0, 1).index_select(0, self._own[last]))
        foreign = [
            differ(live.index_select(0, self._without_row), kept.index_select(0, self._without_row))
            for live, kept in zip(self._live, self._slots, strict=True)
            if live.shape[0] == self.parts.state.slots + 1
        ]
        return Outcome(
            decided_N=output.decided_N.clone(),
            logits_NV=output.logits_NV.clone(),
            slots=[live.clone() for live in self._live],
            own=own,
            outside_L=torch.stack(outside),
            foreign=torch.stack(foreign).any(),
        )
