"""What kernels of sparse attention work in on a GPU, by how many tokens take a turn.

Few tokens are dealt out to many programs, which leave pieces. So fewer tokens may need more memory than many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from kernels.hopper import multiprocessors
from kernels.sparse import InvariantWorkspace, SelectWorkspace, SparseWorkspace
from workers.cache.spec import latent_spec
from workers.memory.scratch import bytes_of
from workers.models.attention.backend import Heads

MULTIPROCESSORS: Final = 132
"""Where there is no GPU to ask: of an H200."""
GROWING_FROM: Final = 1024
"""Tokens from which on memory grows with their number."""


@dataclass(frozen=True)
class Workspaces:
    """What kernels of a GPU work in, by how many tokens take a turn."""

    select: dict[int, SelectWorkspace]
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
    ) -> Workspaces:
        """For turns of so many tokens, with so many scores and selected positions each; on a CPU there are none.
        `empty(*shape, dtype=)` gives uninitialised memory."""
        if device.type == "cpu":
            return Workspaces({}, {})
        select = {
            size: SelectWorkspace.allocate(size, scores, empty, selected=top_k) for size in sorted(selection_turns)
        }
        dtype = heads.norm_L.dtype
        attend: dict[int, SparseWorkspace | InvariantWorkspace] = {}
        for size in sorted(attention_turns):
            shape = size, heads.count, heads.latent
            if heads.invariant and device.type == "cuda":
                like_PKC = latent_spec(heads.latent, heads.rope, dtype, fp8=heads.fp8_cache).allocate(0, device)
                attend[size] = InvariantWorkspace.allocate(*shape, heads.rope, top_k, dtype, like_PKC, empty)
            else:
                programs = multiprocessors(device) if device.type == "cuda" else MULTIPROCESSORS
                attend[size] = SparseWorkspace.allocate(
                    *shape, top_k, dtype, empty, fp8=heads.fp8_cache, multiprocessors=programs
                )
        return Workspaces(select, attend)


@dataclass(frozen=True)
class AtOnce:
    """How many of some tokens take a turn."""

    tokens: int
    scored: int
    attention_tokens: int

    @property
    def selection_turns(self) -> set[int]:
        """Tokens of every turn in which scores are computed and selected from."""
        return _turns(self.tokens, self.scored)

    @property
    def attention_turns(self) -> set[int]:
        """Tokens of every turn in which they attend."""
        return _turns(self.tokens, self.attention_tokens)


def spare(
    heads: Heads, decode: AtOnce, prefill: AtOnce, alone: AtOnce, scores: int, top_k: int, device: torch.device
) -> int:
    """Bytes that workspaces of a pass may need beyond those of `decode` and `prefill`: where there are fewer of the
    former, or no more tokens in all than `alone` says, all of them prefill rows'."""

    nothing = heads.norm_L[:0]

    def taken(selection_turns: set[int], attention_turns: set[int]) -> int:
        total = 0

        def count(*shape: int, dtype: torch.dtype) -> Tensor:
            nonlocal total
            total += bytes_of(shape, dtype)
            return nothing

        Workspaces.of(heads, selection_turns, scores, attention_turns, top_k, device, count)
        return total

    @cache
    def most_for_selection(most: int) -> int:
        return max(taken({tokens}, set()) for tokens in _up_to(most))

    @cache
    def most_for_attention(most: int) -> int:
        return max(taken(set(), {tokens}) for tokens in _up_to(most))

    needed = 0
    for kind in (decode, alone):
        for most, at_most in ((kind.scored, most_for_selection), (kind.attention_tokens, most_for_attention)):
            needed += at_most(most) * min(2, -(-kind.tokens // max(most, 1)))
    reserved = sum(taken(kind.selection_turns, kind.attention_turns) for kind in (decode, prefill))
    return max(0, needed - reserved)


def _up_to(most: int) -> Iterable[int]:
    return {*range(min(most, GROWING_FROM) + 1), most}


def _turns(tokens: int, at_once: int) -> set[int]:
    """How many tokens take a turn, of so many."""
    if not at_once:
        return set()
    return {size for size in (min(tokens, at_once), tokens % at_once) if size}
