"""Log-probabilities of the rows that asked for them, in memory that is taken before the cache is sized: of what was
sampled, and of tokens that prompts have.

A replica may have thousands of logits rows of a hundred thousand ids, and a temporary of that size would not fit beside
the cache. So rows are taken a piece at a time, and every tensor that is as wide as the vocabulary lies in one buffer of
at most `MOST_BYTES`.

Shape legend: N logits rows, A of them that are asked about, P rows of a piece, V vocabulary, K top logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.memory.scratch import Scratch, on_device
from workers.protocol.plan import TopLogprobs
from workers.protocol.scores import Scores

MOST_BYTES = 1 << 26
"""Most bytes of the buffer, unless one row alone needs more."""

_WIDE_BYTES = 4 + 4 + 8
"""Bytes for an id of a row: logits, log-probabilities, and keys in whose place the logits lie before."""
_TOP_BYTES = 8 + 8 + 4
"""Bytes for one of the most probable ids of a row: key, id, log-probability."""
_USUAL_TOP = 20
"""Number of most probable ids that the HTTP API allows by default."""
_ALIGNED = 8 * 256
"""Bytes that the tensors of a piece may lose to alignment."""


@dataclass(frozen=True)
class Taken:
    """Log-probabilities of some logits rows, on the host; from a GPU they are complete once the stream got there."""

    index: dict[int, int]
    """Maps a logits row to one of the A rows."""
    chosen_A: Tensor
    """float32: of each row's token."""
    ids_AK: Tensor
    """int64: the most probable ids, the lowest first among equals."""
    values_AK: Tensor
    """float32: theirs."""
    rank_A: Tensor | None = None
    """int32: 1 + how many ids are more probable than each row's token, where that was asked."""
    named_AJ: Tensor | None = None
    """float32: of the ids that rows name, where any does; a row has its own first."""
    names: tuple[int, ...] = ()
    """Number of ids that each row names, where any does."""

    def entries(self, wanted: Sequence[Sequence[int]]) -> tuple[tuple[TopLogprobs, ...], ...]:
        """Return the log-probabilities of the logits rows wanted for each sampled row; none where it did not ask."""
        chosen, ids, values = self.chosen_A.tolist(), self.ids_AK.tolist(), self.values_AK.tolist()
        index = self.index
        named: list[tuple[float, ...]] = [()] * len(chosen)
        if self.named_AJ is not None:
            named = [tuple(row[:own]) for row, own in zip(self.named_AJ.tolist(), self.names, strict=True)]
        return tuple(
            tuple(
                TopLogprobs(chosen[a], tuple(ids[a]), tuple(values[a]), named[a])
                for a in (index[n] for n in rows if n in index)
            )
            for rows in wanted
        )

    def scores(self, begin: int, end: int, top: int) -> Scores:
        """Rows `begin` to `end` (exclusive), each with the `top` most probable ids alone."""
        assert self.rank_A is not None
        rows = slice(begin, end)
        return Scores(
            top,
            _packed(self.chosen_A[rows], "<f4"),
            _packed(self.rank_A[rows], "<u4"),
            _packed(self.ids_AK[rows, :top], "<u4"),
            _packed(self.values_AK[rows, :top], "<f4"),
        )


class Logprobs:
    """The memory for a replica's log-probabilities."""

    def __init__(self, vocab: int, device: torch.device) -> None:
        self.vocab, self.device = vocab, device
        self._buffer: Tensor | None = None
        self._ids_V: Tensor | None = None

    def allocate(self, rows: int) -> None:
        """Allocate memory for steps of up to `rows` logits rows; more of them take more pieces. Once is enough."""
        if self._buffer is not None:
            return
        wanted = rows * self._row_bytes(min(_USUAL_TOP, self.vocab))
        size = max(min(wanted, MOST_BYTES), self._row_bytes(self.vocab)) + _ALIGNED
        self._buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        # What is left of the largest id: of two equal logits the lower id has more.
        self._ids_V = torch.arange(0xFFFFFFFF, 0xFFFFFFFF - self.vocab, -1, device=self.device)

    def take(
        self, logits_NV: Tensor, token_N: Tensor, rows: Sequence[int], k: int, named: Sequence[Sequence[int]] = ()
    ) -> Taken:
        """Natural log-probabilities of the unscaled model distribution, in fp32, in these logits rows: of the row's
        token of `token_N` (int64 [N]), of the `k` most probable ids, and of those that `named` has for each of `rows`,
        if it is not empty. `logits_NV`: any float dtype of at most 32 bits. ValueError for a `k` that is no number of
        ids.

        Nothing that is allocated here grows with the vocabulary, but for what a top-k takes on its way over a piece.
        """
        most = max(map(len, named), default=0)
        names = tuple(map(len, named)) if most else ()
        taken = self.room({row: index for index, row in enumerate(rows)}, len(rows), k, names=names)
        self.fill(
            taken, 0, logits_NV, token_N, rows, [[*ids, *[0] * (most - len(ids))] for ids in named] if most else ()
        )
        return taken

    def room(
        self, index: dict[int, int], rows: int, k: int, *, ranks: bool = False, names: tuple[int, ...] = ()
    ) -> Taken:
        """Room on the host for so many rows with `k` ids each, with `ranks` for those of the rows' tokens, and for as
        many named ids as `names` has for each row, for `fill` to fill. ValueError as in `take`."""
        if not 0 <= k <= self.vocab:
            raise ValueError(f"{k} top logprobs of a vocabulary of {self.vocab}")
        return Taken(
            index,
            self._host(rows, dtype=torch.float32),
            self._host(rows, k, dtype=torch.int64),
            self._host(rows, k, dtype=torch.float32),
            self._host(rows, dtype=torch.int32) if ranks else None,
            self._host(rows, max(names), dtype=torch.float32) if names else None,
            names,
        )

    def fill(
        self,
        taken: Taken,
        first: int,
        logits_NV: Tensor,
        token_N: Tensor,
        rows: Sequence[int],
        named: Sequence[Sequence[int]] = (),
    ) -> None:
        """Compute the log-probabilities of these logits rows, as `take` does, into `taken` from its row `first` on.
        `named`: the ids that each row names, as many for each, if there is room for any."""
        self.allocate(len(rows))
        assert self._buffer is not None
        k = taken.ids_AK.shape[1]
        piece = (self._buffer.numel() - _ALIGNED) // self._row_bytes(k)
        for begin in range(0, len(rows), piece):
            end = min(begin + piece, len(rows))
            row_P = on_device(rows[begin:end], torch.int64, self.device)
            part = slice(first + begin, first + end)
            self._piece(logits_NV, token_N, row_P, taken, part, k, named[begin:end])

    def _piece(
        self,
        logits_NV: Tensor,
        token_N: Tensor,
        row_P: Tensor,
        taken: Taken,
        part: slice,
        k: int,
        named: Sequence[Sequence[int]],
    ) -> None:
        rows, vocab, scratch = len(row_P), self.vocab, Scratch(self.device, self._buffer)
        logit_PV = scratch.empty(rows, vocab, dtype=torch.float32)
        logprob_PV = scratch.empty(rows, vocab, dtype=torch.float32)
        key_PV = scratch.empty(rows, vocab, dtype=torch.int64)
        token_P1, chosen_P1 = scratch.empty(rows, 1, dtype=torch.int64), scratch.empty(rows, 1, dtype=torch.float32)
        key_PK, id_PK = scratch.empty(rows, k, dtype=torch.int64), scratch.empty(rows, k, dtype=torch.int64)
        value_PK = scratch.empty(rows, k, dtype=torch.float32)

        given_PV = logit_PV if logits_NV.dtype == torch.float32 else _head(key_PV, logits_NV.dtype)
        torch.index_select(logits_NV, 0, row_P, out=given_PV)
        if given_PV is not logit_PV:
            logit_PV.copy_(given_PV)
        torch.index_select(token_N, 0, row_P, out=token_P1.squeeze(1))
        torch.log_softmax(logit_PV, -1, out=logprob_PV)
        torch.gather(logprob_PV, 1, token_P1, out=chosen_P1)
        taken.chosen_A[part].copy_(chosen_P1.squeeze(1), non_blocking=True)
        if taken.named_AJ is not None:
            named_PJ = logprob_PV.gather(1, on_device(named, torch.int64, self.device))
            taken.named_AJ[part].copy_(named_PJ, non_blocking=True)
        if taken.rank_A is not None:
            above_PV = torch.gt(logprob_PV, chosen_P1, out=_head(key_PV, torch.bool))
            taken.rank_A[part].copy_(above_PV.sum(1, dtype=torch.int32).add_(1), non_blocking=True)
        if k:
            self._keys(logit_PV, key_PV)
            torch.topk(key_PV, k, dim=-1, out=(key_PK, id_PK))
            torch.gather(logprob_PV, 1, id_PK, out=value_PK)
            taken.ids_AK[part].copy_(id_PK, non_blocking=True)
            taken.values_AK[part].copy_(value_PK, non_blocking=True)

    def _keys(self, logit_PV: Tensor, key_PV: Tensor) -> None:
        """Make keys: each float32 becomes an integer of the same order (negative floats order backwards as bits), with
        the complement of the id below it: all keys differ, so nothing depends on how a top-k treats ties. The logits
        are lost."""
        assert self._ids_V is not None
        logit_PV.add_(0.0)  # makes -0.0 equal 0.0
        bits_PV, flip_PV = logit_PV.view(torch.int32), _head(key_PV, torch.int32)
        torch.bitwise_right_shift(bits_PV, 31, out=flip_PV)
        bits_PV.bitwise_xor_(flip_PV.bitwise_and_(0x7FFFFFFF))
        key_PV.copy_(bits_PV)
        key_PV.bitwise_left_shift_(32).bitwise_or_(self._ids_V)

    def _row_bytes(self, k: int) -> int:
        return self.vocab * _WIDE_BYTES + k * _TOP_BYTES + 8 + 4

    def _host(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")


def _packed(x: Tensor, kind: str) -> bytes:
    """Numbers of the host as `kind`, a dtype of NumPy's, has them."""
    return x.contiguous().numpy().astype(kind).tobytes()


def _head(wide_PV: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, V] of a narrower dtype in the memory of `wide_PV`."""
    return wide_PV.flatten().view(dtype)[: wide_PV.numel()].view(wide_PV.shape)
