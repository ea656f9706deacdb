"""Common parts of both kinds of steps: what they work with, the state of the slots among it, the draft loop at their
end, and what they leave for the host.

Shape legend: R sampled rows, E hidden size, P most pages of a row, S slots, V vocabulary.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch

from kernels import decode_state
from kernels.decode_state import SlotTensors, cache_slots
from kernels.page import NULL_PAGE, PAGE_TOKENS, WHOLE, Shards
from workers.cache.paged import PagedCache
from workers.memory.scratch import Scratch, on_device
from workers.models.batch import Batch, DecodeBatch
from workers.models.drafter import Drafter
from workers.models.model import Model
from workers.models.step_pass import StepPass
from workers.parallel.group import Group
from workers.protocol.plan import MOST_DENSE_ROWS, Admission, BatchLayout, DecodeBuckets, PageGrant
from workers.protocol.request import TOKEN_BYTES
from workers.step.logprobs import Taken
from workers.step.sampling import SamplingState


class SlotState:
    """Device state of every slot, changed by plans here and by the steps themselves through `kernels.decode_state`."""

    def __init__(
        self,
        slots: int,
        drafts: int,
        pages_per_row: int,
        device: torch.device,
        *,
        tokens: bool = False,
        shards: Shards = WHOLE,
    ) -> None:
        """`tokens`: whether the tokens of every row are kept, for a drafter that reads them. `shards`: this rank's
        share of the pages, where it has not all of them."""
        self.slots, self.shards = slots, shards
        # Of slots whose tables nobody has filled by grants, any number.
        self._granted = [pages_per_row] * slots
        self.tensors = SlotTensors.allocate(slots, drafts, pages_per_row, device, tokens=tokens)

    def _live(self) -> list[torch.Tensor]:
        return [getattr(self.tensors, field.name) for field in fields(self.tensors)]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the device that `kept` takes."""
        return sum(tensor.nbytes for tensor in self._live())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all that is known of the slots back at the end of the block."""
        live = self._live()
        copies, granted = [tensor.clone() for tensor in live], [*self._granted]
        try:
            yield
        finally:
            for tensor, copy in zip(live, copies, strict=True):
                tensor.copy_(copy)
            self._granted = granted

    def clear(self) -> None:
        """Forget everything that is known of the slots, their page tables first of all."""
        for tensor in self._live():
            tensor.zero_()
        self._granted = [self.pages_per_row] * self.slots

    @property
    def pages_per_row(self) -> int:
        """Pages a row may hold."""
        return self.tensors.page_SP.shape[1]

    @property
    def keeps_tokens(self) -> bool:
        """Whether the tokens of every row are kept."""
        return self.tensors.token_SX.shape[1] > 0

    def most_granted(self, slots: Iterable[int]) -> int:
        """The most pages that any of these slots was granted: no row has entries beyond its own."""
        return max(self._granted[slot] for slot in slots)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Zero-fill the page-table rows of newly taken slots, so that no former tenant's page can be reached; and take
        in the tokens that newcomers have, where tokens are kept."""
        if admissions:
            page_SP = self.tensors.page_SP
            slot_A = on_device([admission.slot for admission in admissions], torch.int64, page_SP.device)
            page_SP.index_fill_(0, slot_A, NULL_PAGE)
        for admission in admissions:
            self._granted[admission.slot] = 0
            if admission.tokens and self.keeps_tokens:
                token_X = unpacked(admission.tokens)
                if page_SP.is_cuda:
                    token_X = token_X.pin_memory()
                self.tensors.token_SX[admission.slot, : len(token_X)].copy_(token_X, non_blocking=True)

    def grant(self, grants: Sequence[PageGrant]) -> None:
        """Append granted pages to the page tables."""
        for grant in grants:
            self._granted[grant.slot] = grant.first + len(grant.pages)
        slots = [grant.slot for grant in grants for _ in grant.pages]
        indices = [grant.first + offset for grant in grants for offset in range(len(grant.pages))]
        pages = [page for grant in grants for page in grant.pages]
        page_SP = self.tensors.page_SP
        # One copy for all three; the values are ids, exact in int64.
        grant_3G = on_device([slots, indices, pages], torch.int64, page_SP.device)
        page_SP[grant_3G[0], grant_3G[1]] = grant_3G[2].to(torch.int32)

    def cache_slots(self, slot_T: torch.Tensor, position_T: torch.Tensor, shards: Shards | None = None) -> torch.Tensor:
        """Flat cache index [T] of each (slot, position): page * 64 + offset; in the null page where none is granted, or
        where the page is not this rank's. `shards`: this rank's share in some layers, where that is another one."""
        return cache_slots(self.tensors.page_SP, slot_T, position_T, shards or self.shards)


def unpacked(packed: bytes) -> torch.Tensor:
    """Token ids as `workers.protocol.request.pack_tokens` packs them, int32 on the host; ids from 2^31 on come out
    negative."""
    ids = array("i", packed)
    assert ids.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        ids.byteswap()
    return torch.frombuffer(ids, dtype=torch.int32)


@dataclass(frozen=True)
class StepParts:
    """The parts of one rank that every step uses."""

    model: Model
    cache: PagedCache
    state: SlotState
    sampling: SamplingState | None
    """Sampling state, on rank 0 only: it decides for all ranks."""
    group: Group
    width: int
    """The most tokens a decode row feeds; above 1 a drafter's cache is kept."""
    adaptive: bool = False
    """Whether a step may feed fewer, or each feeds as many."""

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.cache.layers[0].device

    @property
    def drafter(self) -> Drafter:
        """Drafter of the model; ValueError where there is none, so where `width` is 1."""
        if self.model.drafter is None:
            raise ValueError("this model has no drafter")
        return self.model.drafter

    @property
    def draft_shards(self) -> Shards:
        """This rank's share of the pages in the drafter's layers."""
        drafter = self.model.drafter
        return self.state.shards if drafter is None or all(spec.sharded for spec in drafter.cache) else WHOLE

    @property
    def passes(self) -> list[StepPass]:
        """The passes over the tokens of a step that are cut into segments, in their order: the model's, and the
        drafter's, where that reads what the model's leaves."""
        own = self.drafter.segments if self.width > 1 else None
        return [self.model.segments, *([] if own is None else [own])]

    def most_tail_tokens(self, rows: int) -> int:
        """Return the most tokens for which a mixed step of `rows` rows needs the end of its last pass: one per row
        where that pass is the drafter's, all that are verified where it is the model's."""
        return rows if len(self.passes) > 1 else rows * self.width

    @property
    def widths(self) -> range:
        """Numbers of tokens that a decode row may feed in a step."""
        return range(1 if self.adaptive else self.width, self.width + 1)

    @property
    def dense_pages(self) -> int:
        """Most pages of a row of which sparse attention selects every entry, and decode steps attend to them densely. 0
        where attention is dense anyway, and in invariant mode, which has one way alone."""
        indexing = self.model.config.indexing
        return 0 if indexing is None or self.model.paths.invariant else indexing.top_k // PAGE_TOKENS

    def all_short(self, slots: Sequence[int]) -> bool:
        """Whether a decode step of the rows in these slots attends densely: they are few, and none can have more
        entries than sparse attention selects."""
        most = self.dense_pages
        return most > 0 and 0 < len(slots) <= MOST_DENSE_ROWS and 0 < self.state.most_granted(slots) <= most

    def buckets(self, max_rows: int) -> DecodeBuckets:
        """The keys of the decode steps of up to so many rows."""
        return DecodeBuckets(max_rows, self.width, self.adaptive, sparse=self.dense_pages > 0)

    def aux_hidden(self, tokens: int, scratch: Scratch) -> torch.Tensor | None:
        """Memory for the auxiliary hidden states that the drafter reads of so many tokens; None where it reads none."""
        drafter = self.model.drafter
        if self.width == 1 or drafter is None or not drafter.aux_hidden_state_layers:
            return None
        features = len(drafter.aux_hidden_state_layers) * self.model.config.hidden_size
        return scratch.empty(tokens, features, dtype=self.model.norm_E.dtype)

    def kept(self, tokens: int, drafts: int, scratch: Scratch) -> torch.Tensor | None:
        """Memory for what the drafter's pass over so many tokens selects; None where no draft's pass wants it."""
        if drafts < 2 or not self.drafter.keeps:
            return None
        return scratch.empty(tokens, self.drafter.keeps, dtype=torch.int32)

    def verified(self, slot_R: torch.Tensor, scratch: Scratch) -> torch.Tensor | None:
        """int64 [R]: most drafts of each row that are verified: those behind them are unlikely to be accepted.
        None where all are. Memory comes from `scratch`: decode steps are captured."""
        drafter, state = self.model.drafter, self.state.tensors
        if self.width == 1 or drafter is None or not drafter.least_confidence:
            return None
        verified_R = scratch.empty(len(slot_R), dtype=torch.int64)
        with scratch.scope():
            place_R = _places(slot_R, state.unlikely_S, scratch)
            torch.index_select(state.unlikely_S, 0, place_R, out=verified_R)
        return verified_R.neg_().add_(state.draft_SK.shape[1])

    def wanted(self, slot_R: torch.Tensor, width: int, scratch: Scratch) -> torch.Tensor | None:
        """Tokens that are wanted (`DecodeBatch.wanted_R`) of rows that feed `width` tokens, in memory of `scratch`."""
        verified_R = self.verified(slot_R, scratch)
        return None if verified_R is None else verified_R.add_(1).clamp_(max=width)

    def draft(
        self,
        hidden_RE: torch.Tensor | None,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        length_R: torch.Tensor,
        page_RP: torch.Tensor,
        drafts: int,
        scratch: Scratch,
        kept_RS: torch.Tensor | None = None,
        *,
        dense: bool = False,
    ) -> None:
        """Draft `drafts` tokens for every row into the slots' state.

        `hidden_RE`: the drafter's, of the rows' newest tokens, which it has in its cache already, if it has one; their
        lengths in the slots' state are those after them. `position_R`: of the first draft. `length_R` (int32) is
        written, `page_RP` are the rows' page tables. `kept_RS`: what was selected for the newest tokens, where all
        drafts attend to that. `dense`: see `Batch`.
        """
        rows = _Drafted(self, slot_R, position_R, length_R, page_RP, kept_RS, scratch, dense)
        self.drafter.draft(hidden_RE, rows, drafts, self.cache, scratch)


@dataclass
class _Drafted:
    """The rows of a step while they are drafted for; see `DraftedRows`."""

    parts: StepParts
    slot_R: torch.Tensor
    position_R: torch.Tensor
    """Position of the draft that is chosen first, then of the one that was fed last, behind which the next one
    stands."""
    length_R: torch.Tensor
    page_RP: torch.Tensor
    kept_RS: torch.Tensor | None
    scratch: Scratch
    dense: bool

    @property
    def state(self) -> SlotTensors:
        return self.parts.state.tensors

    def choose(self, logits: Callable[[], torch.Tensor], index: int) -> torch.Tensor:
        parts, scratch = self.parts, self.scratch
        if index:
            fed_R, self.position_R = self.position_R, scratch.empty(self.slot_R.shape[0], dtype=torch.int64)
            torch.add(fed_R, 1, out=self.position_R)
        token_R = scratch.empty(self.slot_R.shape[0], dtype=torch.int64)
        with scratch.scope():
            logits_RV = logits()
            if parts.sampling is not None:
                drafted_SX = parts.state.tensors.draft_SK[:, :index]
                parts.sampling.draft_tokens(
                    logits_RV, self.slot_R, self.position_R, drafted_SX=drafted_SX, out=token_R, scratch=scratch
                )
        return parts.group.broadcast(token_R)

    def feed(self, token_R: torch.Tensor, index: int) -> Batch:
        rows, scratch = self.slot_R.shape[0], self.scratch
        self.position_R = scratch.empty(rows, dtype=torch.int64)
        cache_slot_R = scratch.empty(rows, dtype=torch.int64)
        into = self.position_R, cache_slot_R, self.length_R, self.parts.draft_shards
        decode_state.feed_draft(self.parts.state.tensors, self.slot_R, token_R, index, *into)
        decode = DecodeBatch(self.length_R, self.page_RP, slot_R=self.slot_R)
        where = BatchLayout(1, rows), self.position_R, cache_slot_R
        return Batch(*where, decode, None, first=1, given_TS=self.kept_RS, dense=self.dense)

    def verify(self, likely_R: torch.Tensor, drafts: int) -> None:
        unlikely_S, most, scratch = self.state.unlikely_S, self.state.draft_SK.shape[1], self.scratch
        with scratch.scope():
            unlikely_R = scratch.empty(len(self.slot_R), dtype=torch.int64)
            torch.clamp(likely_R, max=drafts, out=unlikely_R).neg_().add_(most)
            # Of nobody's row nothing changes.
            nobody_R = torch.lt(self.slot_R, 0, out=scratch.empty(len(self.slot_R), dtype=torch.bool))
            torch.where(nobody_R, unlikely_S[-1], unlikely_R, out=unlikely_R)
            place_R = _places(self.slot_R, unlikely_S, scratch)
            unlikely_S.index_copy_(0, place_R, self.parts.group.broadcast(unlikely_R))


def _places(slot_R: torch.Tensor, state_S: torch.Tensor, scratch: Scratch) -> torch.Tensor:
    """Where in a tensor of all slots those of rows are, int64: the last place is nobody's, whose slot is -1."""
    return torch.remainder(slot_R, len(state_S), out=scratch.empty(len(slot_R), dtype=torch.int64))


@dataclass(frozen=True)
class StepOutput:
    """The decision of a step, on the device and equal on every rank."""

    layout: BatchLayout
    decided_N: torch.Tensor
    """int64, laid out as `BatchLayout.decision_size` says."""
    logits_NV: torch.Tensor | None
    """Logits of every logits row; None when nothing is sampled."""
    scored: Taken | None = None
    """Log-probabilities, on rank 0, of the tokens that prefill rows score, in the order of `BatchLayout.score_tokens`;
    on the host, and from a GPU complete once the stream got there."""
