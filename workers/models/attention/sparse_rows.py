"""The rows of a pass where attention is sparse: what their tokens see, what they select, and attention to that.

Shape legend: T tokens, H heads of this rank, D features of a query, C cached features, L latent features, V value
features, R rows, P pages, S selected positions, N scores of a token, J heads of the indexer, I features of a key,
K = 64 entries per page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels.head_linear import head_linear
from kernels.page import PAGE_TOKENS
from kernels.runtime.dependent import launches_dependently
from kernels.sparse import (
    InvariantWorkspace,
    SparseWorkspace,
    index_scores,
    select_positions,
    sparse_decode,
    write_index_keys,
)
from workers.memory.scratch import Scratch, bytes_of, on_device
from workers.models.attention.backend import Backend, Geometry, Heads
from workers.models.attention.decode_rows import DecodeMemory, Entering, absorb
from workers.models.attention.indexer import Indexed
from workers.models.attention.sparse_shards import SharedSelection, heads_of_all, own_selection
from workers.models.attention.sparse_workspaces import (
    AtOnce,
    Workspaces,
    bytes_for_attention,
    bytes_for_candidates,
    bytes_for_selection,
    most_for_attention,
    most_for_selection,
)
from workers.models.attention.widened import Stretch, WidenedContext, Widening
from workers.models.batch import Batch, Selection
from workers.parallel.group import Group

SCORES: Final = 1 << 26
"""Most scores at once: tokens whose scores are more take turns."""
SELECTING: Final = 512
"""Most tokens at once for which positions are selected: they fill a GPU, and each takes some memory. Where ranks share
out the cache, each takes as many times the memory, and there are as many times fewer."""
QUERIES: Final = 1 << 17
"""Most query vectors of prefill rows at once, a token's on this rank each, or on all ranks that share out the cache: in
the absorbed form they are several times as wide as they were."""


def selection(batch: Batch, top_k: int, scratch: Scratch) -> Selection:
    """Compute the number of entries that each token of `batch` may attend to, and take room for its selection from
    `scratch`."""
    layout = batch.layout
    split, end = layout.decode_tokens, layout.tokens
    row_T = scratch.empty(end, dtype=torch.int32)
    bound_T = scratch.empty(end, dtype=torch.int32)
    if split:
        assert batch.decode is not None
        rows, width, length_R = layout.decode_rows, layout.width, batch.decode.length_R
        if width == 1:
            torch.arange(rows, out=row_T[:rows])
            torch.clamp(length_R, min=0, out=bound_T[:rows])
        else:
            shape = rows, width
            each_R = torch.arange(rows, out=scratch.empty(rows, dtype=torch.int32))
            row_T[:split].view(shape).copy_(each_R.unsqueeze(1).expand(shape))
            back_W = torch.arange(width - 1, -1, -1, out=scratch.empty(width, dtype=torch.int32))
            seen_RW = torch.sub(length_R.unsqueeze(1), back_W, out=bound_T[:split].view(shape))
            seen_RW.clamp_(min=0)
    if batch.prefill is not None and end > split:
        chunks = list(zip(batch.prefill.start, batch.prefill.count, strict=True))
        numbers = [
            [index for index, (_, count) in enumerate(chunks) for _ in range(count)],
            [start + place + 1 for start, count in chunks for place in range(count)],
        ]
        own_2T = on_device(numbers, torch.int32, batch.position_T.device)
        row_T[split:].copy_(own_2T[0])
        bound_T[split:].copy_(own_2T[1])
    own_TS = batch.kept_TS if batch.given_TS is None else batch.given_TS
    selected_TS = scratch.empty(end, top_k, dtype=torch.int32) if own_TS is None else own_TS[:end]
    out_of_bounds_count_1 = batch.out_of_bounds_count_1
    fault_1 = scratch.empty(1, dtype=torch.int64).zero_() if out_of_bounds_count_1 is None else out_of_bounds_count_1
    own = None if batch.group is None else own_selection(batch, row_T, bound_T, selected_TS, scratch)
    return Selection(row_T, bound_T, selected_TS, fault_1, given=batch.given_TS is not None, own=own)


def tokens_at_once(heads: Heads, tokens: int, width: int, scores: int, shards: int = 1) -> AtOnce:
    """Return the numbers of tokens that are scored and attend at once, of `tokens` tokens with `scores` scores each.
    `heads`: those of all `shards` ranks that share out the cache. `width` is that of decode rows, or 0 for prefill
    rows."""
    # Tokens of a row share what is read to score them.
    row = width or 1
    return AtOnce(
        tokens,
        scored=min(tokens, max(row, min(SELECTING // shards, SCORES // scores) // row * row)),
        attention_tokens=tokens if width else min(tokens, max(1, QUERIES // heads.count)),
    )


def spare(
    heads: Heads,
    decode: int,
    width: int,
    prefill: int,
    scores: int,
    top_k: int,
    device: torch.device,
    shards: int = 1,
) -> int:
    """Bytes that scores and workspaces of a pass may take beyond those of so many tokens of decode rows and of prefill
    rows, with so many scores each: where there are fewer of the former, where there are no more tokens in all and all
    of them prefill rows', or where contexts are shorter. `heads`, `shards`: see `tokens_at_once`."""
    alone = decode + prefill

    def at_once(tokens: int, width: int) -> AtOnce:
        return tokens_at_once(heads, tokens, width, scores, shards)

    def taken(tokens: int, width: int) -> int:
        own = at_once(tokens, width)
        selecting = sum(bytes_for_selection(heads, own.selection_turns, scores, top_k, device, shards))
        attending = bytes_for_attention(heads, own.attention_turns([tokens]), top_k, device)
        offered = bytes_for_candidates(own.scored, top_k, shards)
        return selecting + offered + attending + bytes_of((own.scored, scores), torch.float32)

    def most(tokens: int, width: int) -> int:
        # Of shorter contexts more tokens select at once.
        turn = min(tokens, max(SELECTING // shards, width))
        turns = 2 if tokens > at_once(tokens, width).scored else 1
        selecting = turns * most_for_selection(heads, turn, scores, top_k, device, shards)
        attending = most_for_attention(heads, at_once(tokens, width).attention_tokens, top_k, device)
        return selecting + bytes_for_candidates(turn, top_k, shards) + attending

    scored = sum(min(tokens * scores, max(SCORES, scores * (width or 1))) for tokens in (decode, alone))
    needed = most(decode, width) + most(alone, 0) + bytes_of((min(scored, alone * scores),), torch.float32)
    return max(0, needed - taken(decode, width) - taken(prefill, 0))


@dataclass(frozen=True)
class SparseGeometry(Geometry):
    """The prefill rows' page tables, as far as any of them is read."""

    page_NP: Tensor
    widening: Widening | None
    """Rows whose context is widened; None where all attend to the cache."""
    largest: bool = False
    """Whether it stands for all others: then memory is taken for whichever needs most."""


@dataclass(frozen=True)
class SparseRows(Backend):
    """The decode rows of a pass, or its prefill rows."""

    selection: Selection
    """Selection of these rows' tokens."""
    indexed: Indexed | None
    """Queries, keys and weights of the indexer; None where the selection is given."""
    cache_slot_T: Tensor
    page_RP: Tensor
    stretches: Sequence[Stretch]
    """Stretches, which together have all tokens."""
    widened: WidenedContext | None
    first: int
    """See `Batch`."""
    score_TN: Tensor
    """Scores of as many tokens as are scored at once."""
    width: int
    """Tokens of a row, if all rows have as many, else 0."""
    q_THD: Tensor
    """Roped, unless they are `entering`."""
    entering: Entering | None
    """Queries and latents of all tokens that are not in the cache yet; None where they are."""
    memory: DecodeMemory
    """Memory of rows of one token: as many as attend at once, or all of them if `entering` is there."""
    out_THV: Tensor
    workspaces: Workspaces
    shared: SharedSelection | None = None
    """Where ranks share out the cache."""

    @staticmethod
    def of(
        heads: Heads,
        selection: Selection,
        indexed: Indexed | None,
        cache_slot_T: Tensor,
        page_RP: Tensor,
        q_THD: Tensor,
        entering: Entering | None,
        out_THV: Tensor,
        scratch: Scratch,
        *,
        first: int,
        width: int,
        widening: Widening | None = None,
        group: Group | None = None,
    ) -> SparseRows:
        """Make the backend of these rows' tokens alone; `entering` has all tokens. `group`: see `Batch`."""
        tokens, scores = q_THD.shape[0], page_RP.shape[1] * PAGE_TOKENS
        shards = 1 if group is None else group.mesh.cache.size
        attending, top_k = heads_of_all(heads, shards), selection.selected_TS.shape[1]
        at_once = tokens_at_once(attending, tokens, width, scores, shards)
        if selection.given:
            at_once = replace(at_once, scored=0)
        stretches: Sequence[Stretch] = () if widening is None else widening.stretches
        # The largest geometry says nothing of tokens: how many attend at once is all that counts there.
        stretches = stretches or [Stretch(tokens, widened=False)]
        shared = None
        if group is not None and selection.own is not None:
            pages = selection.own.decode if width else selection.own.prefill
            numbers = at_once.scored, at_once.attention_tokens
            shared = SharedSelection.of(group, selection, pages, heads, *numbers, scratch)
        return SparseRows(
            selection=selection,
            indexed=indexed,
            cache_slot_T=cache_slot_T,
            page_RP=page_RP,
            stretches=stretches,
            widened=None if widening is None else WidenedContext.of(heads, widening, scratch),
            first=first,
            score_TN=scratch.empty(at_once.scored, scores, dtype=torch.float32),
            width=width,
            q_THD=q_THD,
            entering=entering,
            memory=DecodeMemory.of(heads, at_once.attention_tokens, 1, scratch),
            out_THV=out_THV,
            workspaces=Workspaces.of(
                attending,
                at_once.selection_turns,
                scores,
                at_once.attention_turns(stretch.tokens for stretch in stretches),
                top_k,
                out_THV.device,
                scratch.empty,
                shards=shards,
            ),
            shared=shared,
        )

    @property
    def dependent(self) -> bool:
        """Whether these rows' kernels are launched dependently: where nothing but kernels of ours, and in the draft
        layer what fills or compares, stands before and between them."""
        return self.entering is not None and launches_dependently(self.out_THV.device)

    def enter(self, heads: Heads, cache_PKC: Tensor) -> None:
        """Absorb the queries that are `entering`, and write their latents. It reads many weights and nothing of what
        the indexer leaves, so it stands where the kernels before it read little."""
        if self.entering is not None:
            q_THC = self.memory.q_RWHC.squeeze(1)
            absorb(heads, self.q_THD, self.entering, q_THC, cache_PKC, dependent=self.dependent)

    def write(self, index_PKI: Tensor) -> None:
        """The keys of these rows' tokens to the cache."""
        assert self.indexed is not None
        write_index_keys(self.indexed.key_TI, self.cache_slot_T, index_PKI, dependent=self.dependent)

    def select(self, index_PKI: Tensor, *, invariant: bool) -> None:
        """Select the positions that each token attends to; the keys of all rows must have been written."""
        where, indexed, step = self.selection, self.indexed, self.score_TN.shape[0]
        dependent, shared = self.dependent, self.shared
        assert indexed is not None
        page_RP, seen_T = self.page_RP, where.bound_T
        if shared is not None:
            page_RP, seen_T = shared.there.own_RP, shared.own.bound_T
        for begin in range(0, seen_T.shape[0], step):
            turn = slice(begin, begin + step)
            bound_T = seen_T[turn]
            score_TN = self.score_TN[: bound_T.shape[0]]
            index_scores(
                indexed.q_TJI[turn],
                indexed.weight_TJ[turn],
                index_PKI,
                page_RP,
                where.row_T[turn],
                bound_T,
                score_TN,
                where.fault_1,
                width=self.width,
                invariant=invariant,
                dependent=dependent,
            )
            if shared is not None:
                if self.first:
                    shared.leave_out(score_TN, turn, self.first)
                memory = self.workspaces.select, self.workspaces.choose
                shared.select(score_TN, turn, self.first, memory, dependent=dependent)
                continue
            if self.first:
                score_TN[:, : self.first].fill_(-torch.inf)
            workspace = self.workspaces.select.get(len(bound_T))
            selected_TS = where.selected_TS[turn]
            select_positions(score_TN, bound_T, selected_TS, where.fault_1, workspace, dependent=dependent)
        if self.first and shared is None:
            # Of a short context all are selected, those that nobody attends to included.
            torch.threshold_(where.selected_TS, self.first - 1, -1)
        if where.choices is not None:
            where.choices.select(where.selected_TS, where.bound_T)
            if shared is not None:
                shared.keep()

    @override
    def attend(self, heads: Heads, cache_PKC: Tensor) -> None:
        """Attend to what is selected, of queries that have entered. IndexError on a CPU where that is outside of the
        cache."""
        where, dependent = self.selection, self.dependent
        if self.widened is not None:
            self.widened.fill(heads, cache_PKC, self.page_RP)
        for turn, context_PKC, page_RP in self._turns(cache_PKC):
            out_THV = self.out_THV[turn]
            memory = self.memory.first(out_THV.shape[0])
            q_THC, attended_THL = memory.q_RWHC.squeeze(1), memory.attended_RWHL.squeeze(1)
            if self.entering is None:
                absorb(heads, self.q_THD[turn], None, q_THC, cache_PKC, dependent=dependent)
            lse_TH, workspace = memory.lse_RWH.squeeze(1), self.workspaces.attend.get(len(q_THC))
            if self.shared is not None and self.shared.entries is not None:
                assert not isinstance(workspace, SparseWorkspace)
                pages = cache_PKC, self.page_RP, self.shared.there.local_RP
                self.shared.entries.attend(heads, q_THC, *pages, where.of(turn), attended_THL, lse_TH, workspace)
            elif self.shared is not None:
                assert not isinstance(workspace, InvariantWorkspace)
                into = attended_THL, lse_TH
                self.shared.attend(heads, q_THC, cache_PKC, turn, *into, workspace, dependent=dependent)
            else:
                sparse_decode(
                    q_THC,
                    context_PKC,
                    page_RP,
                    where.row_T[turn],
                    where.selected_TS[turn],
                    attended_THL,
                    lse_TH,
                    where.fault_1,
                    scale=heads.scale,
                    workspace=workspace,
                    invariant=heads.invariant,
                    dependent=dependent,
                )
            value_HLV = heads.value_HVL.transpose(1, 2)
            head_linear(attended_THL, value_HLV, out_THV, invariant=heads.invariant, dependent=dependent)
            if heads.sink_H is not None:
                heads.add_sinks(out_THV, lse_TH)
        refuse_out_of_bounds(where.fault_1)

    @override
    def reserve(self, heads: Heads) -> None:
        if self.shared is not None:
            self.shared.reserve(self.memory)

    def _turns(self, cache_PKC: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yield the tokens that attend at once, with their cache and page tables."""
        step, begin = self.memory.lse_RWH.shape[0], 0
        for stretch in self.stretches:
            context = cache_PKC, self.page_RP
            if stretch.widened:
                assert self.widened is not None
                context = self.widened.cache_WKC, self.widened.page_NP
            end = begin + stretch.tokens
            for first in range(begin, end, step):
                yield slice(first, min(first + step, end)), *context
            begin = end


def refuse_out_of_bounds(fault_1: Tensor) -> None:
    """IndexError where a CPU has counted what a GPU would have to be asked for."""
    if fault_1.device.type == "cpu" and (out_of_bounds := int(fault_1)):
        fault_1.zero_()
        raise IndexError(f"{out_of_bounds} positions, pages or rows of sparse attention are outside the cache")
