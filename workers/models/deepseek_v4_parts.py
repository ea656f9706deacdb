"""Parts of the readable forward pass of DeepSeek V4 (`workers.models.deepseek_v4`): its caches, entries that stand for
several tokens, and residual streams that are mixed.

Shape legend: T tokens, R rows, P pages, K entries per page, D features of an entry, C features that a compressor makes
of a token, L tokens that a ring holds, S entries, N compressed entries, W tokens of one of them, X slots, E hidden
features, Z residual streams, M gates of the streams, O rope features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.page import PAGE_TOKENS
from kernels.residual_streams import StreamGates
from workers.models.config import CompressedLayer, ResidualStreams
from workers.models.deepseek_parts import linear, norm, rope
from workers.models.deepseek_v4_weights import Compressor


@dataclass(frozen=True)
class OwnTokens:
    """The tokens of one row in a pass: `count` neighbours from position `start` on."""

    where: slice
    """Those of the pass's tokens that they are."""
    start: int
    count: int
    slot: int
    """Where the caches of sequences have the row's."""
    page_P: Tensor
    """int32 page table of the row."""
    first: int = 0
    """Before this position there are no tokens: a layer that drafts has none at position 0. Of such a layer an entry
    that is not finite is missing, see `RingSnapshots`."""

    @property
    def end(self) -> int:
        """The position behind the last of them."""
        return self.start + self.count

    @property
    def position_T(self) -> Tensor:
        """Their positions, int64."""
        return torch.arange(self.start, self.end)


@dataclass(frozen=True)
class CompressedTokens:
    """Tokens of several rows, one row behind the other."""

    start: tuple[int, ...]
    """Position of each row's first token."""
    count: tuple[int, ...]
    """Tokens of each row."""
    slot: tuple[int, ...]
    """Place of each row in the caches of sequences."""
    page_RP: Tensor
    """int32 page tables. What stands in them behind a row's last token is never read."""
    first: int = 0
    """See `OwnTokens`."""

    @property
    def rows(self) -> Iterator[OwnTokens]:
        """The tokens of each row."""
        begin = 0
        for row, (start, count, slot) in enumerate(zip(self.start, self.count, self.slot, strict=True)):
            yield OwnTokens(slice(begin, begin + count), start, count, slot, self.page_RP[row], self.first)
            begin += count

    @property
    def position_T(self) -> Tensor:
        """Position of each token, int64."""
        return torch.cat([own.position_T for own in self.rows])


@dataclass(frozen=True)
class Ring:
    """What each sequence keeps of its newest tokens: that of the token at position p lies at p modulo the ring's
    length. So nothing needs to be taken back where drafts are rejected: the tokens that come in their place are written
    over them, before they are read."""

    data_XLC: Tensor

    def read(self, slot: int, first: int, end: int) -> Tensor:
        """What it has of the tokens from position `first` up to `end`, [tokens, C] in fp32."""
        return self.data_XLC[slot, torch.arange(first, end) % self.data_XLC.shape[1]].float()

    def write(self, own: OwnTokens, new_TC: Tensor) -> None:
        """Put in a row's tokens, or the newest that have room."""
        kept = min(own.count, self.data_XLC.shape[1])
        place_T = own.position_T[own.count - kept :] % self.data_XLC.shape[1]
        self.data_XLC[own.slot, place_T] = new_TC[own.count - kept :].to(self.data_XLC.dtype)


@dataclass(frozen=True)
class Pages:
    """Compressed entries on pages. One lies on the page that has the last of its tokens, because only with that is it
    complete: a page that prompts share has no entry that depends on what follows."""

    data_PKD: Tensor
    ratio: int

    def _place(self, page_P: Tensor, first: int, end: int) -> tuple[Tensor, Tensor]:
        last_N = torch.arange(first + 1, end + 1) * self.ratio - 1
        return page_P[last_N // PAGE_TOKENS].long(), last_N % PAGE_TOKENS // self.ratio

    def read(self, page_P: Tensor, end: int) -> Tensor:
        """The first `end` entries of a row, [N, D] in fp32."""
        return self.data_PKD[self._place(page_P, 0, end)].float()

    def write(self, page_P: Tensor, first: int, entry_ND: Tensor) -> None:
        """Put in a row's entries from number `first` on."""
        self.data_PKD[self._place(page_P, first, first + len(entry_ND))] = entry_ND.to(self.data_PKD.dtype)


@dataclass(frozen=True)
class CompressorCaches:
    """Caches of a compressor."""

    entries: Pages
    state: Ring
    """fp32 [.., 2 C]: what it has made of the newest tokens, as far as entries to come are made of them."""


@dataclass(frozen=True)
class LayerCaches:
    """Caches of a layer."""

    window: Ring
    compressor: CompressorCaches | None = None
    indexer: CompressorCaches | None = None


def state_tokens(layer: CompressedLayer) -> int:
    """Newest tokens of which a compressor needs what it has made of them, so that the next token can complete an entry,
    that one included."""
    return layer.ratio * (2 if layer.indexed else 1)


def compress(
    x_TE: Tensor, own: OwnTokens, compressor: Compressor, caches: CompressorCaches, turn_PO: Tensor, eps: float
) -> None:
    """Write the entries that a row's tokens complete, and keep what later ones are made of.

    Entry w stands for the tokens from w * ratio on, and is a mean of them, for each feature with weights of its own:
    the softmax of their logits. Where compressors overlap, the tokens of the entry before take part with other
    features; of entry 0 there is none before. Then come its norm, and rope at its first token's position.
    """
    ratio, features = compressor.ratio, compressor.norm_D.shape[0]
    value_TC, logit_TC = linear(x_TE, compressor.both_FE).chunk(2, 1)
    logit_TC = logit_TC + compressor.bias_RC[own.position_T % ratio]
    made_TC = torch.cat([value_TC, logit_TC], 1)
    first, end = own.start // ratio, own.end // ratio
    begin = max(0, first * ratio + ratio - compressor.reach)
    made_SC = torch.cat([caches.state.read(own.slot, begin, own.start), made_TC])
    caches.state.write(own, made_TC)
    if first == end:
        return
    value_NWC, logit_NWC = made_SC[: end * ratio - begin].view(-1, ratio, made_SC.shape[1]).chunk(2, 2)
    if compressor.overlapping:
        if first == 0:  # there is no entry before: logits that give no weight
            value_NWC = F.pad(value_NWC, (0, 0, 0, 0, 1, 0))
            logit_NWC = F.pad(logit_NWC, (0, 0, 0, 0, 1, 0), value=-torch.inf)
        value_NWD, logit_NWD = (
            torch.cat([x_NWC[:-1, :, :features], x_NWC[1:, :, features:]], 1) for x_NWC in (value_NWC, logit_NWC)
        )
    else:
        value_NWD, logit_NWD = value_NWC, logit_NWC
    entry_ND = norm((logit_NWD.softmax(1) * value_NWD).sum(1), compressor.norm_D, eps)
    turn_NO = turn_PO[torch.arange(first, end) * ratio]
    caches.entries.write(own.page_P, first, rope_last(entry_ND, turn_NO))


def complete(own: OwnTokens, ratio: int) -> Tensor:
    """Which of the row's compressed entries each token may see, bool [T, N]: those of whose tokens it is the last, or
    which are all before it."""
    return torch.arange(1, own.end // ratio + 1) * ratio <= own.position_T.unsqueeze(1) + 1


def rope_last(x_TD: Tensor, turn_TO: Tensor) -> Tensor:
    """Rope of the last O features; `turn_TO` as of `rope`."""
    plain = x_TD.shape[-1] - turn_TO.shape[-1]
    return torch.cat([x_TD[..., :plain], rope(x_TD[..., plain:], turn_TO)], -1)


def back(turn_TO: Tensor) -> Tensor:
    """The rotations that undo these."""
    return turn_TO * torch.tensor([1.0, -1.0]).repeat(turn_TO.shape[-1] // 2)


class MixedStreams:
    """Residual streams, [T, Z, E], which a part of a layer mixes before it adds its output (mHC, 2026, sections 2.2 and
    4)."""

    def __init__(self, h_TZE: Tensor, streams: ResidualStreams, norm_eps: float) -> None:
        self._streams, self._norm_eps = streams, norm_eps
        self.h_TZE = h_TZE
        self._add_TZ, self._mix_TZZ = torch.ones(()), torch.ones(())

    def read(self, mix: StreamGates) -> Tensor:
        """What the next part of a layer reads, [T, E]: a sum of the streams. Its weights, those of what is added next,
        and the matrix by which the streams are then mixed, are made of all streams."""
        count, eps, flat_TF = self._streams.count, self._streams.eps, self.h_TZE.flatten(1)
        m_TM = F.linear(F.rms_norm(flat_TF, flat_TF.shape[1:], None, self._norm_eps), mix.weight_MF)
        kinds = [count, count, count * count]
        m_TM = m_TM * mix.scale_G.repeat_interleave(torch.tensor(kinds)) + mix.base_M
        read_TZ, add_TZ, mix_TM = m_TM.tensor_split([count, 2 * count], 1)
        self._add_TZ = self._streams.magnitude * add_TZ.sigmoid()
        mix_TZZ = mix_TM.view(-1, count, count).softmax(2) + eps
        for step in range(self._streams.mixing_steps):  # rows and columns in turn, columns alone at first
            if step:
                mix_TZZ = mix_TZZ / (mix_TZZ.sum(2, keepdim=True) + eps)
            mix_TZZ = mix_TZZ / (mix_TZZ.sum(1, keepdim=True) + eps)
        self._mix_TZZ = mix_TZZ
        return torch.einsum("tz,tze->te", read_TZ.sigmoid() + eps, self.h_TZE)

    def end(self, gates: StreamGates) -> Tensor:
        """What the final norm reads, [T, E]: a sum of the streams."""
        flat_TF = self.h_TZE.flatten(1)
        m_TZ = F.linear(F.rms_norm(flat_TF, flat_TF.shape[1:], None, gates.norm_eps), gates.weight_MF)
        read_TZ = (m_TZ * gates.scale_G + gates.base_M).sigmoid() + gates.eps
        return torch.einsum("tz,tze->te", read_TZ, self.h_TZE)

    def add(self, x_TE: Tensor) -> None:
        """Mix the streams, and add a part's output to each of them."""
        mixed_TZE = self._mix_TZZ.transpose(1, 2) @ self.h_TZE
        self.h_TZE = mixed_TZE + self._add_TZ.unsqueeze(2) * x_TE.unsqueeze(1)
