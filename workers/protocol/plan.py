"""The plan and the result of one step, which pass between scheduler and workers, and the layout of its rows and tokens.

`BatchLayout` is the only place that computes an offset, a slice, a gather index, a mask row or a graph key.
Pure Python on purpose: the scheduler process never imports torch. Every value here is frozen and travels as msgpack.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

import msgspec

from workers.protocol.sampling import SamplingParams as SamplingParams
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
