"""Matcher of one request: the tokens that it may generate next, by those it has. Before its grammar begins, its text
may be free.

Shape legend: B integers of a mask: id v is bit v % 32 of integer v // 32.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any, Final

import numpy as np

from workers.grammar.compiler import Compiled
from workers.protocol.plan import SamplingParams

Bits = np.ndarray[Any, np.dtype[np.int32]]


COSTLY_S: Final = 0.1
"""Seconds of computing that a token, or a mask, may take. Some grammars, such as `(a*)*b`, take longer with each token;
others must not wait for them."""
OPENING: Final = 4
"""Tokens within which a text before the grammar is opened, if the model is to open it: white space may come first."""
SLOW_S: Final = 0.0005
"""Seconds for the masks of a step from which on a row's are filled beside those of others: handing them over to another
thread takes a tenth of that."""


class _Phase(Enum):
    FREE = auto()
    """The grammar has not begun."""
    OPEN = auto()
    """Phase in which nothing is asked of the text, or no more."""
    BOUND = auto()
    ENDED = auto()
    """An end-of-sequence id was generated behind a complete text."""
    LOST = auto()
    """A token was generated that the grammar does not allow, as rows generate that have ended, or it was too costly to
    follow: nothing is known of what comes next."""


class _Computing:
    """Times what the thread does next. Its own clock costs as much to read as a small mask does, so it is read at the
    beginning, and again where something takes long by the clock of all: then the thread may just have had to wait."""

    def __init__(self) -> None:
        self.begun, self._own = time.perf_counter(), time.thread_time()

    def costly(self, begun: float) -> bool:
        """Whether what was begun at `begun`, by `time.perf_counter`, and has ended now takes more than `COSTLY_S`."""
        if time.perf_counter() - begun <= COSTLY_S:
            return False
        # What came before it since the beginning has computed for as long as it took, at most.
        return time.thread_time() - self._own - (begun - self.begun) > COSTLY_S


class RequestMatcher:
    """The state of one request's grammar: a function of the generated tokens alone."""

    def __init__(self, compiled: Compiled, sampling: SamplingParams, eos_ids: Sequence[int], vocab: int) -> None:
        self._matcher = _matcher(compiled)
        self._grammar = compiled.grammar
        self._split, self._halfway = compiled.split, False
        self._begin_after = compiled.grammar.begin_after
        self._eos_ids, self._stop_ids = tuple(eos_ids), tuple(t for t in sampling.stop_ids if 0 <= t < vocab)
        self._min_tokens, self._vocab = sampling.min_tokens, vocab
        used = (vocab - 1) % 32 + 1
        self._last = None if used == 32 else np.int32((1 << used) - 1)
        self._generated = 0
        self._tail: tuple[int, ...] = ()
        self._behind = _Phase.OPEN if compiled.grammar.kind == "free" else _Phase.BOUND
        self._phase = _Phase.FREE if self._begin_after else self._behind
        self._opened = -1 if compiled.grammar.opened_by else 0
        """Tokens generated before the text before the grammar; -1: it has not begun."""
        self._lost_at: int | None = None
        """Generated tokens that stand where the one behind them is lost."""
        self.slow = False
        """Whether the masks of the last step took so long that the next ones are better filled beside others."""

    @property
    def lost(self) -> bool:
        """Whether a generated token was none that the grammar allows, or it, or a mask, took too long."""
        return self._lost_at is not None

    def accept(self, tokens: Sequence[int]) -> int:
        """Take in tokens that were generated. Return how many of them stand: where the matcher is lost, those before
        that."""
        before, computing = self._generated, _Computing()
        for token in tokens:
            self._accept(token, computing)
            if self._phase is _Phase.LOST:
                self._lose(self._generated - 1)
        return len(tokens) if self._lost_at is None else min(max(self._lost_at - before, 0), len(tokens))

    def _lose(self, kept: int) -> None:
        if self._lost_at is None or kept < self._lost_at:
            self._lost_at = kept

    def fill(self, drafts: Sequence[int], masks: Sequence[Bits]) -> tuple[int, bool]:
        """Fill the mask of the next token, then of the one behind each draft, as long as the drafts before it are
        allowed: a draft that is not cannot be what the target chooses, so no mask behind it is read. There is one mask
        more than drafts. Returns how many masks were filled, and whether the last of them allows nothing.

        The state is the same afterwards. Other matchers may do the same in other threads meanwhile.
        """
        computing = _Computing()
        kept = self._generated, self._tail, self._phase, self._halfway, self._opened
        accepted = filled = 0
        dead_end = False
        for place, bits_B in enumerate(masks):
            filled += 1
            if not self._fill(bits_B, computing):
                dead_end = True
                break
            if self.lost or place == len(drafts) or not _allows(bits_B, drafts[place], self._vocab):
                break
            accepted += self._accept(drafts[place], computing)
        if accepted:
            self._matcher.rollback(accepted)
        self._generated, self._tail, self._phase, self._halfway, self._opened = kept
        self.slow = time.perf_counter() - computing.begun > SLOW_S
        return filled, dead_end

    def _accept(self, token: int, computing: _Computing) -> bool:
        """Whether xgrammar took it, and can take it back."""
        self._generated += 1
        if self._phase is _Phase.FREE and token in self._grammar.begun_by:
            self._phase = self._behind
        if self._phase is _Phase.BOUND:
            if self._halfway and self._split is not None and self._split.ends(token):
                self._phase = _Phase.LOST
                return False
            begun = time.perf_counter()
            taken = bool(self._matcher.accept_token(token))
            self._halfway = self._split is not None and self._split.begins(token)
            if not taken or computing.costly(begun):
                self._phase = _Phase.LOST
            elif self._matcher.is_terminated():
                self._phase = _Phase.ENDED
            return taken
        if self._phase is _Phase.FREE:
            self._free(token)
        return False

    def _free(self, token: int) -> None:
        """A token before the grammar."""
        if self._opened < 0 and token in self._grammar.opened_by:
            self._opened = self._generated - 1
        self._tail = (*self._tail, token)[-len(self._begin_after) :]
        if self._tail == self._begin_after or (self._opened < 0 and self._generated >= OPENING):
            self._phase = self._behind

    def _closing(self) -> int | None:
        """The token that must come now for the text before the grammar to end in time; None if any may."""
        most, end = self._grammar.most_before, self._begin_after
        if not most or self._opened < 0 or self._generated - self._opened < most - len(end):
            return None
        begun = next((n for n in range(len(end) - 1, 0, -1) if self._tail[-n:] == end[:n]), 0)
        return end[begun]

    def _fill(self, bits_B: Bits, computing: _Computing) -> bool:
        """The mask of the next token; whether it allows any."""
        if self._phase is _Phase.BOUND:
            begun = time.perf_counter()
            self._matcher.fill_next_token_bitmask(bits_B[None])
            if computing.costly(begun):
                self._lose(self._generated)
            if self._last is not None:
                bits_B[-1] &= self._last  # xgrammar also sets bits of no id
            if self._halfway and self._split is not None:
                self._split.forbid(bits_B)
        elif self._phase is _Phase.FREE:
            if (closing := self._closing()) is not None:
                bits_B.fill(0)
                _allow(bits_B, (closing,))
            else:
                bits_B.fill(-1)
                if self._behind is _Phase.BOUND:  # the text cannot end before what it is to be has begun
                    _forbid(bits_B, self._eos_ids)
        elif self._phase is _Phase.OPEN:
            bits_B.fill(-1)
        else:
            bits_B.fill(0)
            _allow(bits_B, self._eos_ids)
        if self._generated < self._min_tokens and self._stop_ids:
            before = [token for token in self._stop_ids if _allows(bits_B, token, self._vocab)]
            _forbid(bits_B, self._stop_ids)
            if not _any(bits_B):  # the grammar is complete: it wins
                _allow(bits_B, before)
        return _any(bits_B)


def _matcher(compiled: Compiled) -> Any:
    """xgrammar's matcher; None of a text of which nothing is asked."""
    if compiled.handle is None:
        return None
    from workers.grammar.library import xgr  # most replicas never need it

    return xgr.GrammarMatcher(compiled.handle)  # type: ignore[arg-type]


def _any(bits_B: Bits) -> bool:
    # A fifth of what `any` takes.
    return bool(np.count_nonzero(bits_B))


def _allows(bits_B: Bits, token: int, vocab: int) -> bool:
    return 0 <= token < vocab and bool(int(bits_B[token >> 5]) >> (token & 31) & 1)


def _allow(bits_B: Bits, tokens: Sequence[int]) -> None:
    words = bits_B.view(np.uint32)
    for token in tokens:
        words[token >> 5] |= np.uint32(1 << (token & 31))


def _forbid(bits_B: Bits, tokens: Sequence[int]) -> None:
    words = bits_B.view(np.uint32)
    for token in tokens:
        words[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)
