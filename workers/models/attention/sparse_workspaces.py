"""Workspaces of the kernels of sparse attention on a GPU, by the number of tokens in a turn.

Few tokens are dealt out to many programs, which leave pieces. So fewer tokens may need more memory than many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import ClassVar, Final

import torch
from torch import Tensor

from kernels.page import PAGE_TOKENS
from kernels.runtime.hopper import is_hopper, multiprocessors
from kernels.sparse import InvariantWorkspace, SelectWorkspace, SparseWorkspace
from kernels.sparse_shards import Candidates, candidate_columns
from workers.cache.spec import latent_spec
from workers.memory.scratch import Scratch, bytes_of
from workers.models.attention.backend import Heads

MULTIPROCESSORS: Final = 132
"""Multiprocessors where there is no GPU to ask: those of an H200."""
GROWING_FROM: Final = 1024
"""Tokens from which on memory grows with their number."""


@dataclass(frozen=True)
class Workspaces:
    """Workspaces of kernels on a GPU, by the number of tokens in a turn."""

    select: dict[int, SelectWorkspace]
    choose: dict[int, SelectWorkspace]
    """Workspaces of selection among what all shards offer, where ranks share out the cache."""
    attend: dict[int, SparseWorkspace | InvariantWorkspace]

    @staticmethod
    def of(
        heads: Heads,
        selection_turns: set[int],
        scores: int,
        attention_turns: set[int],
        top_k: int,
        device: torch.device,
        empty: Callable[..., Tensor],
        *,
        shards: int = 1,
    ) -> Workspaces:
        """Allocate workspaces for turns of these numbers of tokens, with so many scores and selected positions each; on
        a CPU there are none. `empty(*shape, dtype=)` gives uninitialised memory. Turns of attention follow one another,
        and so share it. `shards`: ranks that share out the cache."""
        if not works_in_memory(heads, device):
            return Workspaces({}, {}, {})
        turns, columns = sorted(selection_turns), candidate_columns(shards, top_k)
        select = {size: _for_selection(size, scores, top_k, device, empty) for size in turns}
        chosen_from = turns if shards > 1 else []
        choose = {size: _for_selection(size, columns, top_k, device, empty) for size in chosen_from}
        shared = empty(bytes_for_attention(heads, attention_turns, top_k, device), dtype=torch.uint8)
        attend = {
            size: _for_attention(heads, size, top_k, device, Scratch(shared.device, shared).empty)
            for size in sorted(attention_turns)
        }
        return Workspaces(select, choose, attend)


def works_in_memory(heads: Heads, device: torch.device) -> bool:
    """Whether there are kernels on the device, and not references."""
    return device.type != "cpu"


def _for_selection(
    tokens: int, scores: int, top_k: int, device: torch.device, empty: Callable[..., Tensor]
) -> SelectWorkspace:
    """Allocate the selection's workspace for a turn of this number of tokens."""
    return SelectWorkspace.allocate(tokens, scores, empty, selected=top_k, hopper=is_hopper(device))


def _for_attention(
    heads: Heads, tokens: int, top_k: int, device: torch.device, empty: Callable[..., Tensor]
) -> SparseWorkspace | InvariantWorkspace:
    """Allocate attention's workspace for a turn of this number of tokens."""
    dtype, shape = heads.norm_L.dtype, (tokens, heads.count, heads.latent)
    if heads.invariant and device.type == "cuda":
        like_PKC = latent_spec(heads.latent, heads.rope, dtype, fp8=heads.fp8_cache).allocate(0, device)
        return InvariantWorkspace.allocate(*shape, heads.rope, top_k, dtype, like_PKC, empty)
    programs = multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS
    fp8, hopper = heads.fp8_cache, is_hopper(device)
    return SparseWorkspace.allocate(*shape, top_k, dtype, empty, fp8=fp8, multiprocessors=programs, hopper=hopper)


class _Counted:
    """Counts what is asked for, and gives no memory."""

    _nothing: ClassVar = torch.empty(0)

    def __init__(self) -> None:
        self.bytes = 0
        """Bytes taken of a `Scratch`."""

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Nothing."""
        self.bytes += bytes_of(shape, dtype)
        return self._nothing


@dataclass(frozen=True)
class AtOnce:
    """Numbers of tokens that are processed in one turn, of some tokens."""

    tokens: int
    scored: int
    attention_tokens: int

    @property
    def selection_turns(self) -> set[int]:
        """Tokens of every turn in which scores are computed and selected from."""
        return _turns(self.tokens, self.scored)

    def attention_turns(self, stretches: Iterable[int]) -> set[int]:
        """Tokens of every turn in which they attend, of stretches of so many."""
        return {size for tokens in stretches for size in _turns(tokens, self.attention_tokens)}


def bytes_for_selection(
    heads: Heads, turns: Iterable[int], scores: int, top_k: int, device: torch.device, shards: int = 1
) -> list[int]:
    """Return the bytes that the selection's workspaces for each turn take of a `Scratch`. `turns`: tokens of each."""
    if not works_in_memory(heads, device):
        return [0]
    found = []
    for size in turns:
        counted = _Counted()
        _for_selection(size, scores, top_k, device, counted.empty)
        if shards > 1:
            _for_selection(size, candidate_columns(shards, top_k), top_k, device, counted.empty)
        found.append(counted.bytes)
    return found


def bytes_for_candidates(tokens: int, top_k: int, shards: int) -> int:
    """Return the bytes that the candidates of a turn of so many tokens take of a `Scratch`."""
    counted = _Counted()
    if shards > 1:
        Candidates.allocate(tokens, shards, top_k, counted.empty)
    return counted.bytes


def bytes_for_attention(heads: Heads, turns: Iterable[int], top_k: int, device: torch.device) -> int:
    """Return the bytes that attention's workspaces for all turns take of a `Scratch`. `turns`: tokens of each."""
    most = 0
    for size in turns if works_in_memory(heads, device) else ():
        counted = _Counted()
        _for_attention(heads, size, top_k, device, counted.empty)
        most = max(most, counted.bytes)
    return bytes_of((most,), torch.uint8)


def most_for_selection(
    heads: Heads, tokens: int, scores: int, top_k: int, device: torch.device, shards: int = 1
) -> int:
    """Return the most bytes that the selection's workspaces take for a turn of up to `tokens` tokens, with up to
    `scores` scores each."""
    # Most blocks of scores are there just below a power of two, where the blocks are about to become larger.
    powers = [(1 << power) - PAGE_TOKENS for power in range(PAGE_TOKENS.bit_length(), scores.bit_length())]
    sizes = _up_to(tokens)
    return max(max(bytes_for_selection(heads, sizes, columns, top_k, device, shards)) for columns in (*powers, scores))


def most_for_attention(heads: Heads, tokens: int, top_k: int, device: torch.device) -> int:
    """Return the most bytes that attention's workspaces take for turns of up to `tokens` tokens."""
    return bytes_for_attention(heads, _up_to(tokens), top_k, device)


def _up_to(most: int) -> set[int]:
    return {*range(min(most, GROWING_FROM) + 1), most}


def _turns(tokens: int, at_once: int) -> set[int]:
    """Return the sizes of the turns in which `tokens` tokens are processed, `at_once` in each."""
    if not at_once:
        return set()
    return {size for size in (min(tokens, at_once), tokens % at_once) if size}
