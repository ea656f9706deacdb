"""The plan and the result of one step, which pass between scheduler and workers, the layout of its rows and tokens, and
the CUDA-graph buckets that layouts are padded to.

`BatchLayout` is the only place that computes an offset, a slice, a gather index, a mask row or a graph key.
`DecodeBuckets` and `TokenBuckets` enumerate every graph that is captured; capture, dispatch and tests take their keys
from here. Decode steps are whole graphs, by rows. Of mixed steps the token-wise segments are graphs, by tokens, and the
tail of the last pass is one, by the tokens whose hidden states are wanted.

Pure Python on purpose: the scheduler process never imports torch. Every value here is frozen and travels as msgpack.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from workers.protocol.request import SamplingParams as SamplingParams
from workers.protocol.scores import Scores

MAX_ASKED_LOGIT_BIAS: Final = 1024
"""Most biases that a request may ask for, and most that hold for all requests to a model."""
MAX_LOGIT_BIAS: Final = 2 * MAX_ASKED_LOGIT_BIAS
"""Most `SamplingParams.logit_bias` pairs of a request, both together: what a slot's device state has room for."""
MAX_LOGPROB_TOKEN_IDS: Final = 128
"""Most `SamplingParams.logprob_token_ids` of a request."""
MAX_STOP_IDS: Final = 64
"""Most distinct `SamplingParams.stop_ids` of a request that asks for `min_tokens`, for the same reason."""


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """A request takes a slot. Its page-table row is zero_filled to the null page before the same plan's grants
    apply."""

    slot: int
    sampling: SamplingParams
    generated: int = 0
    """Tokens it had generated before a preemption; they are part of what is prefilled now."""
    history: tuple[int, ...] = ()
    """Prompt and generated tokens, only when the request has penalties: their counts live on the device. Of a request
    with a grammar alone the generated tokens: its state is a function of them."""
    grammar: int = 0
    """Id of the request's grammar (`CompileGrammar`), which `sampling` does not repeat; 0 without one."""
    tokens: bytes = b""
    """The same as `pack_tokens` packs them, only for a drafter that reads rows' tokens on the device: chunks bring
    those alone that are computed, not those of pages that others have filled."""


class PageGrant(msgspec.Struct, frozen=True, array_like=True):
    """Pages appended to a slot's page table, `first` being the table index of the first of them."""

    slot: int
    first: int
    pages: tuple[int, ...]


class PrefillRow(msgspec.Struct, frozen=True, array_like=True):
    """A chunk of a prompt: `tokens` at positions `start`, `start` + 1, ... of `slot`."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    write_from: int
    """Cache writes below this position go to the null page: those entries are shared with other requests. A prefix hit
    recomputes its last cached token this way, because the draft layer needs that token's hidden state."""
    final: bool
    """The chunk ends the prompt: its last token's logits are sampled and the row decodes from the next step on."""
    next_token: int = -1
    """The prompt token that follows the chunk (the draft layer reads it); -1 when `final`."""
    score_from: int = 0
    """Index in `tokens` of the first token behind which it is asked how probable the one that follows it was."""
    score_to: int = 0
    """End of those tokens, exclusive; they have one behind them. Nobody asks where it is `score_from`."""
    score_top: int = 0
    """Number of the most probable ids that are wanted there."""
    restore: int = -1
    """Snapshot that is put into the slot's rings before the step: made behind `start` tokens, those of the shared
    pages. -1: none."""
    save: int = -1
    """Snapshot into which the slot's rings are copied behind the step, where the chunk ends; -1: none."""

    @property
    def scored(self) -> int:
        """Number of tokens whose successors are scored."""
        return self.score_to - self.score_from


class StepPlan(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One step for every rank of a replica. Decode rows carry no lengths and no tokens: those live on the device."""

    step: int
    """Counts from 1 without gaps."""
    width: int
    """Tokens every decode row feeds: its last token and `width` - 1 drafts."""
    drafts: int
    """Drafts every sampled row makes for the next step: the next plan's width is at most 1 + this."""
    decode_slots: tuple[int, ...] = ()
    prefill: tuple[PrefillRow, ...] = ()
    admissions: tuple[Admission, ...] = ()
    grants: tuple[PageGrant, ...] = ()
    zero_fill: tuple[int, ...] = ()
    """Pages to fill with zeros before anything else: a non-finite row has written them, and others get them now."""
    logprobs: int = -1
    """The most any row of this step asks for (see `SamplingParams.logprobs`)."""
    constrained: tuple[int, ...] = ()
    """Slots of the sampled rows whose requests have a grammar. A step with some samples under masks, which rank 0 fills
    once it knows the tokens of the step before."""

    @property
    def layout(self) -> BatchLayout:
        """Layout of this plan's rows and tokens."""
        return BatchLayout(
            width=self.width,
            decode_rows=len(self.decode_slots),
            prefill_tokens=tuple(len(row.tokens) for row in self.prefill),
            prefill_final=tuple(row.final for row in self.prefill),
        )


class TopLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural, of the unscaled model distribution) at one sampled position."""

    chosen: float
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    named: tuple[float, ...] = ()
    """Log-probabilities of the ids that the request names (`SamplingParams.logprob_token_ids`), in their order."""


class StepResult(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Result of one step, rows in plan order: decode rows, then the final prefill rows."""

    step: int
    tokens: tuple[tuple[int, ...], ...]
    """Tokens that each sampled row gained: 1 + accepted for a decode row, 1 for a final prefill row, none for a
    non-finite one, and fewer, perhaps none, at a grammar's dead end."""
    duration: float
    """Seconds the step took on rank 0."""
    logprobs: tuple[tuple[TopLogprobs, ...], ...] = ()
    """Parallel to `tokens` when the plan asked for them, else empty. A row that did not ask has none."""
    nonfinite: tuple[int, ...] = ()
    """Sampled rows whose logits were no finite numbers where a token was to come from."""
    dead_ends: tuple[int, ...] = ()
    """Sampled rows whose grammar allowed no token where one was to come from; they gain those before it."""
    scores: tuple[Scores, ...] = ()
    """Scores of every prefill row that asks for them, in plan order."""


class GraphKey(NamedTuple):
    """Names one captured graph. Capture, dispatch and tests all take it from `BatchLayout.graph_key`."""

    rows: int
    width: int
    drafts: int
    dense: bool = False
    """Attention that is sparse elsewhere is dense: no row has more entries than it would select."""


class TokenKey(NamedTuple):
    """Names the captured segments of one number of tokens. Everybody takes it from `BatchLayout.token_key`."""

    tokens: int


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Layout of the rows and tokens of one step: decode rows first, in the plan's slot order, `width` tokens each; then
    the prefill rows, ragged.

    A *sampled row* is a decode row or a final prefill row. A *logits row* is one (sampled row, position): `width` for
    each decode row, one for each final prefill row.
    """

    width: int
    decode_rows: int
    prefill_tokens: tuple[int, ...] = ()
    prefill_final: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, not {self.width}")
        if len(self.prefill_tokens) != len(self.prefill_final):
            raise ValueError("prefill_tokens and prefill_final differ in length")
        if any(tokens < 1 for tokens in self.prefill_tokens):
            raise ValueError("a prefill row feeds at least one token")

    @property
    def decode_tokens(self) -> int:
        """Tokens of all decode rows; the first prefill token follows them."""
        return self.decode_rows * self.width

    @property
    def tokens(self) -> int:
        """Tokens of the whole step."""
        return self.decode_tokens + sum(self.prefill_tokens)

    @property
    def rows(self) -> int:
        """Rows of the whole step."""
        return self.decode_rows + len(self.prefill_tokens)

    @property
    def sampled_rows(self) -> int:
        """Decode rows plus final prefill rows."""
        return self.decode_rows + sum(self.prefill_final)

    @property
    def logits_rows(self) -> int:
        """(sampled row, position) pairs that need logits."""
        return self.decode_tokens + sum(self.prefill_final)

    @property
    def decision_size(self) -> int:
        """Numbers in what a step decides: the target's token of every logits row, the accepted drafts of every decode
        row, whether each logits row was bad, then the count of ids that are none."""
        return 2 * self.logits_rows + self.decode_rows + 1

    @property
    def target_slice(self) -> slice:
        """The tokens in a decision."""
        return slice(0, self.logits_rows)

    @property
    def final_slice(self) -> slice:
        """Slice of the logits rows of final prefill rows. Those before it are decode rows', `width` each."""
        return slice(self.decode_tokens, self.logits_rows)

    @property
    def accepted_slice(self) -> slice:
        """The decode rows' accepted drafts in a decision."""
        return slice(self.logits_rows, self.logits_rows + self.decode_rows)

    @property
    def nonfinite_slice(self) -> slice:
        """1 in a decision for every logits row without a finite maximum, whose token means nothing; 0 for others."""
        return slice(self.logits_rows + self.decode_rows, self.decision_size - 1)

    @property
    def fault_slice(self) -> slice:
        """Slice of the decision that is 0 in a step without any fault."""
        return slice(self.nonfinite_slice.start, self.decision_size)

    def decode_slice(self, row: int) -> slice:
        """Token range of decode row `row`; in a decision, too."""
        return slice(row * self.width, (row + 1) * self.width)

    def score_tokens(self, prefill: Sequence[PrefillRow]) -> list[int]:
        """Token index of every token behind which a prefill row scores the one that follows, in order."""
        begins = self.prefill_offsets()
        return [
            begin + index
            for begin, row in zip(begins, prefill, strict=False)
            for index in range(row.score_from, row.score_to)
        ]

    def prefill_offsets(self) -> tuple[int, ...]:
        """First token of every prefill row, and the end of the last: len(prefill rows) + 1 values."""
        return tuple(accumulate(self.prefill_tokens, initial=self.decode_tokens))

    def logits_tokens(self) -> list[int]:
        """Token index of every logits row, in order."""
        return [*range(self.decode_tokens), *self._final_ends()]

    def logits_row(self, sampled_row: int, position: int = 0) -> int:
        """Logits row of position `position` (0 ... width - 1) of a sampled row; also its grammar-mask row."""
        if sampled_row < self.decode_rows:
            if not 0 <= position < self.width:
                raise IndexError(f"position {position} of a decode row of width {self.width}")
            return sampled_row * self.width + position
        if position or sampled_row >= self.sampled_rows:
            raise IndexError(f"position {position} of sampled row {sampled_row} of {self.sampled_rows}")
        return self.decode_tokens + sampled_row - self.decode_rows

    def logits_rows_of(self, sampled_row: int) -> range:
        """Return the logits rows of a sampled row: `width` for a decode row, one for a final prefill row."""
        first = self.logits_row(sampled_row)
        return range(first, first + (self.width if sampled_row < self.decode_rows else 1))

    def _final_ends(self) -> Iterator[int]:
        ends = accumulate(self.prefill_tokens, initial=self.decode_tokens)
        next(ends)
        return (end - 1 for end, final in zip(ends, self.prefill_final, strict=True) if final)

    def graph_key(self, rows_bucket: int, drafts: int, *, dense: bool = False) -> GraphKey:
        """Key of the captured graph that serves this layout's decode rows padded to `rows_bucket`."""
        if rows_bucket < self.decode_rows:
            raise ValueError(f"{self.decode_rows} decode rows do not fit a bucket of {rows_bucket}")
        return GraphKey(rows_bucket, self.width, drafts, dense)

    def token_key(self, tokens_bucket: int) -> TokenKey:
        """Key of the captured segments that serve this layout's tokens padded to `tokens_bucket`."""
        if tokens_bucket < self.tokens:
            raise ValueError(f"{self.tokens} tokens do not fit a bucket of {tokens_bucket}")
        return TokenKey(tokens_bucket)


_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 28, 32)
"""Row buckets up to 32: close together, because small batches are where a padded row costs most."""

MOST_DENSE_ROWS = 16
"""Largest bucket of rows that also has graphs in which sparse attention is dense: with more rows that saves little, and
all of them are seldom so short."""

_TOKEN_STEPS = (16, 32, 48, 64, 96, 128)
"""Token buckets up to 128; a few tokens more or less cost nothing there, weights are read all the same."""
_TOKEN_WASTE = 0.15
"""Most of a larger bucket that may be padding."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts that have a graph, the last one `max_rows`: at most a quarter of a bucket is padding. Powers of
    two are among them, for those are the row counts that people ask for."""
    buckets = [rows for rows in _STEPS if rows < max_rows]
    rows = _STEPS[-1]
    while (rows := rows + (1 << (rows.bit_length() - 3))) < max_rows:
        buckets.append(rows)
    return (*buckets, max_rows)


def token_buckets(budget: int) -> tuple[int, ...]:
    """Token counts whose segments are captured, the last one `budget`: as few as keep padding below 15% above 128."""
    buckets = [tokens for tokens in _TOKEN_STEPS if tokens < budget]
    tokens = _TOKEN_STEPS[-1]
    while True:
        # Whole tiles of the products: 16 tokens, and more where a tile is little beside the bucket.
        unit = max(16, 1 << (tokens.bit_length() - 5))
        # The smallest step that is padded to `most` has one token more than the bucket before.
        most = int((tokens + 1) / (1 - _TOKEN_WASTE))
        tokens = max(most // unit * unit, tokens + 16)
        if tokens >= budget:
            return (*buckets, budget)
        buckets.append(tokens)


def split_row_buckets(max_rows: int) -> tuple[int, ...]:
    """Row counts whose steps are split into a forward graph and a sampling graph, between which masks are filled:
    powers of two and `max_rows`. Fewer than `row_buckets`, for every one is two graphs more, and the host works between
    the two anyway."""
    buckets = [1 << power for power in range(max_rows.bit_length()) if 1 << power < max_rows]
    return (*buckets, max_rows)


@dataclass(frozen=True)
class TokenBuckets:
    """Buckets of tokens. A mixed step runs in the smallest that holds its tokens."""

    budget: int
    """The most tokens a step feeds."""

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"a set of buckets needs tokens, not {self.budget}")

    def __iter__(self) -> Iterator[TokenKey]:
        """Every key, largest first."""
        for tokens in reversed(token_buckets(self.budget)):
            yield BatchLayout(1, tokens).token_key(tokens)

    def key(self, layout: BatchLayout) -> TokenKey:
        """Key of the segments that serve a step of this layout; ValueError when it exceeds the budget."""
        buckets = token_buckets(self.budget)
        place = bisect_left(buckets, layout.tokens)
        if place == len(buckets):
            raise ValueError(f"a step of {layout.tokens} tokens exceeds the budget of {self.budget}")
        return layout.token_key(buckets[place])

    def tails(self, tokens: int) -> Iterator[TokenKey]:
        """Keys of the tails for up to so many tokens, largest first; a step never has more than its budget."""
        most = self.key(BatchLayout(1, min(tokens, self.budget)))
        return (key for key in self if key.tokens <= most.tokens)


@dataclass(frozen=True)
class DecodeBuckets:
    """Buckets of (rows, width, drafts). A pure decode step runs in the smallest bucket that holds its rows."""

    max_rows: int
    width: int
    """The most tokens a decode row feeds."""
    adaptive: bool = False
    """Whether a step may feed fewer, or each feeds as many."""
    sparse: bool = False
    """Whether steps of few short rows have graphs of their own, in which attention is dense."""

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.width < 1:
            raise ValueError(f"a set of buckets needs rows and tokens, not {self.max_rows} x {self.width}")

    def modes(self) -> tuple[tuple[int, int], ...]:
        """(width, drafts) of the steps that occur: with as many drafts as the next step of the same width feeds; and,
        where widths change, with one more, for a wider one."""
        same = [(width, width - 1) for width in range(self.width, 0, -1)]
        if not self.adaptive:
            return (same[0],)
        return (*same, *((width, width) for width in range(self.width - 1, 0, -1)))

    def __iter__(self) -> Iterator[GraphKey]:
        """Every key, largest first: later captures reuse the memory of earlier, larger ones."""
        for rows in reversed(row_buckets(self.max_rows)):
            for width, drafts in self.modes():
                yield BatchLayout(width, rows).graph_key(rows, drafts)
                if self._has_dense(rows):
                    yield BatchLayout(width, rows).graph_key(rows, drafts, dense=True)

    def split_keys(self) -> Iterator[GraphKey]:
        """Every key of a split step, largest first."""
        for rows in reversed(split_row_buckets(self.max_rows)):
            for width, drafts in self.modes():
                yield BatchLayout(width, rows).graph_key(rows, drafts)

    def forward_graph_keys(self) -> list[list[GraphKey]]:
        """The same, keys that differ by their drafts alone together: the forward graph knows nothing of these."""
        return alike(self.split_keys())

    def key(self, layout: BatchLayout, drafts: int, *, dense: bool = False) -> GraphKey | None:
        """Key of the graph that serves a step of this layout; None, never a wrong one, when there is none. `dense`:
        whether all rows are so short that attention may be; the graph's is, where there is such a one."""
        return next(self.holding(layout, drafts, dense=dense), None)

    def holding(self, layout: BatchLayout, drafts: int, *, dense: bool = False) -> Iterator[GraphKey]:
        """Keys of all graphs that can serve a step of this layout, the smallest first. `dense`: see `key`."""
        buckets = row_buckets(self.max_rows)
        place = bisect_left(buckets, layout.decode_rows)
        dense = dense and place < len(buckets) and self._has_dense(buckets[place])
        if dense:
            buckets = tuple(rows for rows in buckets if self._has_dense(rows))
        return self._holding(layout, drafts, buckets, dense)

    def split_key(self, layout: BatchLayout, drafts: int) -> GraphKey | None:
        """Return the key of the graphs that serve a split step of this layout; None when there is none."""
        return next(self.holding_split(layout, drafts), None)

    def holding_split(self, layout: BatchLayout, drafts: int) -> Iterator[GraphKey]:
        """Return the keys of all graphs that can serve a split step of this layout, the smallest first."""
        return self._holding(layout, drafts, split_row_buckets(self.max_rows), dense=False)

    def _has_dense(self, rows: int) -> bool:
        return self.sparse and rows <= MOST_DENSE_ROWS

    def _holding(self, layout: BatchLayout, drafts: int, buckets: tuple[int, ...], dense: bool) -> Iterator[GraphKey]:
        if layout.prefill_tokens or not layout.decode_rows or (layout.width, drafts) not in self.modes():
            return
        for rows in buckets[bisect_left(buckets, layout.decode_rows) :]:
            yield layout.graph_key(rows, drafts, dense=dense)


def alike(keys: Iterable[GraphKey]) -> list[list[GraphKey]]:
    """Group keys of split steps that differ by their drafts alone: the forward graph knows nothing of these."""
    found: dict[tuple[int, int], list[GraphKey]] = {}
    for key in keys:
        found.setdefault((key.rows, key.width), []).append(key)
    return list(found.values())
