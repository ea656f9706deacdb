"""Attention of DeepSeek V4 between the segments of a pass: decode rows, and chunks of prompts.

Both go through the same operations (`kernels.compressed`, and `workers.models.compressed_kernels` where these need
memory). What differs is where the entries of the window lie. A decode row's tokens are put into the ring of its slot
before they attend, because the ring has room for them and for all that the first of them needs. A chunk may be longer
than a ring: its tokens attend to the ring and to each other's entries, and the newest are put into the ring behind
that.

Shape legend: T tokens of these rows, R rows, P pages of a row, H heads of this rank, D features of an entry, F features
that a compressor makes of a token, J heads and I features of an indexer, O rope features, S selected entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor

from kernels import compressed
from kernels.compressed import TokenRows
from kernels.page import PAGE_TOKENS
from kernels.runtime.dependent import launches_dependently
from workers.memory.scratch import Scratch, on_device
from workers.models import compressed_kernels
from workers.models.batch import Batch
from workers.models.choices import Choices
from workers.models.config import CompressedLayer, Compression
from workers.models.deepseek_v4_parts import CompressorCaches, LayerCaches
from workers.models.deepseek_v4_weights import CompressedAttention, Compressor
from workers.models.general import dependent

FEWEST_ATTENDING: Final = 1024
"""Tokens of chunks that attend at once however many entries each of them sees: they fill a GPU."""
MOST_ATTENDING: Final = 8192
"""Most tokens of chunks that attend at once: kernels find a token's place by numbers of 32 bits."""
LISTED: Final = 1 << 24
"""Most entries of such tokens that are listed at once, if there are more than `FEWEST_ATTENDING` tokens: where they lie
takes 64 MiB for each block of heads, less than the experts of as many tokens take."""


@dataclass(frozen=True)
class CompressedInputs:
    """What the products of a layer leave for its attention."""

    q_THD: Tensor
    kv_TD: Tensor
    rotation_TO: Tensor
    """fp32."""
    made_TF: Tensor | None
    """fp32: what the compressor makes of a token; None of a layer without one."""
    index_made_TF: Tensor | None
    """fp32: the same of the indexer's compressor; None of a layer without an indexer, as the next two."""
    index_q_TJI: Tensor | None
    """Roped."""
    index_weight_TJ: Tensor | None
    """fp32, without the factor that all scores have."""

    def of(self, own: slice) -> CompressedInputs:
        """Those of some tokens alone."""
        queried = self.q_THD[own], self.kv_TD[own], self.rotation_TO[own]
        made = self.made_TF, self.index_made_TF, self.index_q_TJI, self.index_weight_TJ
        return CompressedInputs(*queried, *(None if each is None else each[own] for each in made))


@dataclass(frozen=True)
class LayerAttention:
    """What attention knows of a layer."""

    kind: CompressedLayer
    weights: CompressedAttention
    rotation_YO: Tensor
    """fp32 rotations by position."""

    def tensors(self, caches: LayerCaches) -> list[Tensor]:
        """What attention of this layer reads and writes that no other layer does, with its caches."""
        weights, own = self.weights, [caches.window.data_XLC, self.weights.kv_norm_D, self.weights.sink_H]
        of_indexer = None if weights.indexer is None else weights.indexer.compressor
        for compressor, where in ((weights.compressor, caches.compressor), (of_indexer, caches.indexer)):
            if compressor is not None and where is not None:
                own += [compressor.bias_RC, compressor.norm_D, where.state.data_XLC, where.entries.data_PKD]
        return own


class CompressedRows:
    """Attention of some rows of a pass; made once, for all of its layers."""

    def __init__(
        self,
        rows: TokenRows,
        own: slice,
        first: int,
        compression: Compression,
        eps: float,
        choices: Choices | None,
        bounds: dict[int, Tensor],
    ) -> None:
        """`own`: these rows' tokens among those of the pass. `first`: see `Batch`. `choices`: receives selections.
        `bounds`: for each number of tokens that an entry may stand for the entries that each token may see, int32."""
        self._rows, self._own, self._first, self._bounds = rows, own, first, bounds
        self._compression, self._eps, self._choices = compression, eps, choices
        # The kernels of chunks, and so the number of those that are compiled, stay what they are.
        self._early = rows.width > 0 and launches_dependently(rows.row_T.device)

    def attend(
        self,
        layer: LayerAttention,
        all_inputs: CompressedInputs,
        caches: LayerCaches,
        out_THD: Tensor,
        scratch: Scratch,
    ) -> None:
        """Write the caches of a layer, and the output of these rows' tokens into `out_THD`, which has all tokens."""
        rows, inputs = self._rows, all_inputs.of(self._own)
        weights, ring_XLD, window = layer.weights, caches.window.data_XLC, self._compression.window
        with scratch.scope():
            entry_TD = scratch.empty(*inputs.kv_TD.shape, dtype=ring_XLD.dtype)
            queried = inputs.q_THD, inputs.kv_TD, weights.kv_norm_D, inputs.rotation_TO
            into = entry_TD, ring_XLD, rows
            compressed.rope_store(*queried, *into, window=window, eps=self._eps, dependent=self._early)
            entry_PKD, selected_TS = None, None
            if weights.compressor is not None:
                assert caches.compressor is not None
                self._compress(weights.compressor, inputs.made_TF, caches.compressor, layer.rotation_YO)
                entry_PKD = caches.compressor.entries.data_PKD
                if weights.indexer is not None:
                    selected_TS = self._select(layer, inputs, caches, scratch)
            for own, few in self._turns(layer.kind.ratio, 0 if selected_TS is None else selected_TS.shape[1]):
                compressed_kernels.attend(
                    inputs.q_THD[own],
                    ring_XLD,
                    None if rows.width else entry_TD[own],
                    entry_PKD,
                    None if selected_TS is None else selected_TS[own],
                    weights.sink_H,
                    inputs.rotation_TO[own],
                    out_THD[self._own][own],
                    few,
                    scratch,
                    window=window,
                    ratio=layer.kind.ratio,
                    first=self._first,
                )
                if not rows.width:
                    compressed.keep_entries(entry_TD[own], ring_XLD, few)

    def _turns(self, ratio: int, selected: int) -> Iterator[tuple[slice, TokenRows]]:
        """The tokens that attend at once in a layer of this ratio: all of decode rows; of chunks so many in turn, each
        of which finds the newest entries of those before it in the ring. `selected`: entries of a token, 0: all."""
        rows, tokens, pages = self._rows, len(self._rows.row_T), self._rows.page_RP.shape[1]
        if rows.width:
            yield slice(0, tokens), rows
            return
        turn = attending(compressed_kernels.listed_entries(self._compression.window, ratio, pages, selected))
        for begin in range(0, tokens, turn):
            own = slice(begin, begin + turn)
            yield own, replace(rows, position_T=rows.position_T[own], row_T=rows.row_T[own])

    def _compress(
        self, compressor: Compressor, made_TF: Tensor | None, caches: CompressorCaches, rotation_YO: Tensor
    ) -> None:
        assert made_TF is not None
        made = made_TF, compressor.bias_RC, compressor.norm_D, rotation_YO
        caches_of_it = caches.state.data_XLC, caches.entries.data_PKD
        compressed.compress(*made, *caches_of_it, self._rows, eps=self._eps, dependent=self._early)

    def _select(self, layer: LayerAttention, inputs: CompressedInputs, caches: LayerCaches, scratch: Scratch) -> Tensor:
        """Write the keys of the indexer, and select entries with it: int32 [T, S]."""
        assert layer.weights.indexer is not None
        assert caches.indexer is not None
        assert inputs.index_q_TJI is not None
        assert inputs.index_weight_TJ is not None
        self._compress(layer.weights.indexer.compressor, inputs.index_made_TF, caches.indexer, layer.rotation_YO)
        ratio = layer.kind.ratio
        bound_T = self._bounds[ratio]
        selected_TS = scratch.empty(len(bound_T), self._compression.top_k, dtype=torch.int32)
        asked = inputs.index_q_TJI, inputs.index_weight_TJ, caches.indexer.entries.data_PKD, ratio
        compressed_kernels.select(*asked, bound_T, selected_TS, self._rows, scratch)
        if self._choices is not None:
            self._choices.select(selected_TS, bound_T)
        return selected_TS


def attending(entries: int) -> int:
    """Tokens of chunks that attend at once, where so many entries are listed for each: as many as the memory of lists
    allows. Every turn begins and ends with programs that wait, and the host launches each of them."""
    return min(MOST_ATTENDING, max(FEWEST_ATTENDING, LISTED // max(entries, 1)))


def reserve(
    kinds: Iterable[CompressedLayer],
    compression: Compression,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    pages: int,
    width: int,
    scratch: Scratch,
) -> None:
    """Take the memory that `CompressedRows.attend` takes on a GPU in layers of these kinds, for queries of this shape,
    [T, H, D], whose rows have at most `pages` pages. `width`: as of `TokenRows`. Nothing is computed."""
    tokens, heads, features = shape
    for kind in kinds:
        with scratch.scope():
            selected = compression.top_k if kind.indexed else 0
            scratch.empty(tokens, features, dtype=dtype)
            if selected:
                scratch.empty(tokens, selected, dtype=torch.int32)
                keys = max(1, PAGE_TOKENS // kind.ratio)
                compressed_kernels.reserve_selection(tokens, pages, keys, selected, width, scratch)
            where = compression.window, kind.ratio, pages, selected
            turn = attending(compressed_kernels.listed_entries(*where))
            own = (tokens if width else min(tokens, turn), heads, features)
            compressed_kernels.reserve_attention(own, dtype, *where, scratch)


def rows_of_pass(
    batch: Batch,
    compression: Compression,
    eps: float,
    choices: Choices | None,
    fault_1: Tensor,
    scratch: Scratch,
) -> list[CompressedRows]:
    """The rows of a pass as its layers' attention takes them: decode rows, then chunks. Memory of decode rows comes
    from `scratch`, that of chunks, which are never captured, from torch. Nothing of a decode row is read on the host.
    `fault_1`: see `TokenRows`."""
    found: list[CompressedRows] = []
    ratios = sorted({layer.ratio for layer in compression.layers if layer.indexed})
    if (rows := _decode_rows(batch, fault_1, scratch)) is not None:
        assert batch.decode is not None
        bounds = {ratio: scratch.empty(len(rows.row_T), dtype=torch.int32) for ratio in ratios or (1,)}
        whose = batch.decode.length_R, batch.decode.wanted_R, rows.row_T
        for ratio, bound_T in bounds.items():
            early = dependent(rows.row_T)
            compressed.lay_out_rows(rows.position_T, *whose, bound_T, ratio, dependent=early)
        own = slice(0, len(rows.row_T))
        found.append(CompressedRows(rows, own, batch.first, compression, eps, choices, bounds))
    if (chunks := _chunk_rows(batch, fault_1)) is not None:
        rows, own = chunks
        live_T = (rows.slot_R >= 0)[rows.row_T]
        bounds = {ratio: ((rows.position_T + 1) // ratio * live_T).int() for ratio in ratios}
        found.append(CompressedRows(rows, own, batch.first, compression, eps, choices, bounds))
    return found


def token_rows(batch: Batch, fault_1: Tensor, scratch: Scratch) -> list[tuple[TokenRows, slice]]:
    """Where the tokens of a pass belong: those of decode rows, whether or not they are wanted, then those of chunks,
    with their place among all of them. Memory and arguments as of `rows_of_pass`."""
    found: list[tuple[TokenRows, slice]] = []
    if (rows := _decode_rows(batch, fault_1, scratch)) is not None:
        fill_rows(rows.row_T, rows.width, scratch)
        found.append((rows, slice(0, len(rows.row_T))))
    chunks = _chunk_rows(batch, fault_1)
    return found if chunks is None else [*found, chunks]


def _decode_rows(batch: Batch, fault_1: Tensor, scratch: Scratch) -> TokenRows | None:
    """Those of the decode rows, where there are any; the row of each token is still to be written."""
    decode, split = batch.decode, batch.layout.decode_tokens
    if decode is None or not split:
        return None
    assert decode.slot_R is not None, "rows of such a model have slots"
    row_T = scratch.empty(split, dtype=torch.int32)
    where = batch.position_T[:split], row_T, decode.slot_R, decode.page_RP
    return TokenRows(*where, fault_1, batch.layout.width)


def _chunk_rows(batch: Batch, fault_1: Tensor) -> tuple[TokenRows, slice] | None:
    """Those of the chunks, where there are any, and their place among the tokens of the pass."""
    prefill, split, end = batch.prefill, batch.layout.decode_tokens, batch.layout.tokens
    if prefill is None or end <= split:
        return None
    assert len(prefill.slot) == len(prefill.start), "rows of such a model have slots"
    # Few numbers, whatever number of tokens there are: the device waits for the first segment meanwhile.
    slot_R, end_R = on_device([prefill.slot, tuple(accumulate(prefill.count))], torch.int64, fault_1.device)
    place_T = torch.arange(end - split, device=end_R.device)
    row_T = torch.searchsorted(end_R, place_T, right=True, out_int32=True)
    rows = TokenRows(batch.position_T[split:end], row_T, slot_R, prefill.page_NP, fault_1)
    return rows, slice(split, end)


def row_of_tokens(rows: int, width: int, scratch: Scratch) -> Tensor:
    """The row of each token where every row has as many, int32."""
    row_T = scratch.empty(rows * width, dtype=torch.int32)
    fill_rows(row_T, width, scratch)
    return row_T


def fill_rows(row_T: Tensor, width: int, scratch: Scratch) -> None:
    """Number the rows of so many tokens each."""
    rows = len(row_T) // width
    number_R = torch.arange(rows, out=scratch.empty(rows, dtype=torch.int32))
    row_T.view(rows, width).copy_(number_R.unsqueeze(1).expand(rows, width))


def live_tokens(batch: Batch, scratch: Scratch) -> Tensor | None:
    """Integers of a pass of decode rows alone, [R], or [T] where some of a row's tokens are left out: those of rows, or
    tokens, with 0 are padding. Of a prefill alone, which the self-test computes as a reference, ones, [T]: so it
    launches what mixed steps do, and compiles nothing of its own. None of a pass of both: its experts compute tokens
    that are left out, too."""
    if batch.decode is None:
        return scratch.empty(len(batch.position_T), dtype=batch.position_T.dtype).fill_(1)
    if batch.prefill is not None:
        return None
    length_R, left_out_T = batch.decode.length_R, _left_out(batch, scratch)
    if left_out_T is None:
        return length_R
    live_T = scratch.empty(len(left_out_T), dtype=length_R.dtype)
    live_T.view(len(length_R), -1).copy_(length_R.unsqueeze(1).expand(-1, batch.layout.width))
    return live_T.masked_fill_(left_out_T, 0)


def _left_out(batch: Batch, scratch: Scratch) -> Tensor | None:
    """Which tokens of decode rows are nobody's, because their hidden states are not wanted, bool; None: none is."""
    decode, width = batch.decode, batch.layout.width
    if decode is None or decode.wanted_R is None:
        return None
    rows = len(decode.length_R)
    place_W = torch.arange(width, out=scratch.empty(width, dtype=torch.int64))
    left_out_RW = scratch.empty(rows, width, dtype=torch.bool)
    return torch.ge(place_W, decode.wanted_R.unsqueeze(1), out=left_out_RW).flatten()
