"""The order in which invariant mode merges a row's pieces (`kernels.page.PIECE_PAGES`), whatever ranks have them.

A row's pages, counted from its first, make stretches of `PIECE_PAGES`, and each of these is cut into pieces by its
place in the row alone: the first `STRANDS` stretches, of 4,096 tokens, into four pieces each, those behind them into
two, and those from `FINE_ROUNDS` times `STRANDS` on are one. So short rows have enough pieces for many multiprocessors,
and long ones have hardly more partial results for that.

Stretch p belongs to *strand* p mod `STRANDS`. A strand's pieces are merged one after the other, and the strands as a
balanced binary tree: of S strands, strand i first with strand i + S / 2, and so on with what that leaves. A part is a
normalised output and its log2-sum-exp2, and two parts are merged in fp32 into one that does not depend on which of them
comes first.

Ranks that share out a cache have whole stretches in turns. So each of D ranks has those of `STRANDS` / D strands,
which are a subtree, and its own stretches belong to its own strands as those of a whole row belong to all. Where a rank
begins does not matter for their pieces either: sizes change after whole rounds of all strands. What is left is
the same tree over the ranks. Which of them has a row's first piece does not matter, because two ranks that are merged
are D / 2 apart wherever one begins.

Shape legend: D parts, X anything, L latent features.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels import deterministic_math
from kernels.page import PIECE_PAGES

STRANDS: Final = 8
"""Strands of a row, all ranks together; so many ranks share out a cache at most."""
FINEST: Final = 4
"""Pieces of each of a row's first `STRANDS` stretches; half as many of those behind them, before the whole ones."""
FINE_ROUNDS: Final = 4
"""Rounds of `STRANDS` stretches that are cut into pieces, the first into `FINEST`."""

_TWO_OVER_LN2 = tl.constexpr(2.8853900817779268)

Part = tuple[Tensor, Tensor]
"""Output [X, L], and its log2-sum-exp2 [X], -inf where nothing was seen. Both in fp32 or wider."""


def merged(a: Part, b: Part) -> Part:
    """Merge attention to disjoint sets of entries: the same bits for (a, b) and (b, a).

    A part that has seen nothing changes no bit of the other, whose output is finite then. NaN stays NaN.
    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    (a_XL, a_X), (b_XL, b_X) = a, b
    top_X, low_X = torch.maximum(a_X, b_X), torch.minimum(a_X, b_X)
    # A finite shift: -inf - -inf is NaN.
    weight_X = deterministic_math.exp2(low_X - top_X.masked_fill(top_X == -torch.inf, 0.0))
    total_X = 1 + weight_X
    first_X1 = (a_X >= b_X).unsqueeze(-1)
    top_XL, low_XL = torch.where(first_X1, a_XL, b_XL), torch.where(first_X1, b_XL, a_XL)
    sum_XL = (low_XL * weight_X.unsqueeze(-1) + top_XL) / total_X.unsqueeze(-1)
    unseen_XL = (weight_X == 0).unsqueeze(-1) & low_XL.isfinite()
    return torch.where(unseen_XL, top_XL, sum_XL), top_X + deterministic_math.log2(total_X)


def pieces_of(pages: int, strands: int = STRANDS, longest: int = PIECE_PAGES) -> Iterator[tuple[int, range]]:
    """Every piece of a row of so many pages, or of those that a rank has where it has so many `strands`: its strand,
    and the row's pages in it. `longest`: pages of a stretch."""
    for stretch in range(-(-pages // longest)):
        cuts = FINEST if stretch < strands else FINEST // 2 if stretch < FINE_ROUNDS * strands else 1
        begin, size = stretch * longest, max(1, longest // cuts)
        for first in range(begin, min(begin + longest, pages), size):
            yield stretch % strands, range(first, min(first + size, begin + longest, pages))


def most_pieces(pages: int, shards: int = 1) -> int:
    """Pieces of a row of so many pages, or the most of them that one of so many shards has."""
    rounds, rest = divmod(pages, PIECE_PAGES * shards)
    own, first = rounds * PIECE_PAGES + min(rest, PIECE_PAGES), STRANDS // shards * PIECE_PAGES
    parts = (
        (min(own, first), FINEST),
        (min(own, FINE_ROUNDS * first) - first, FINEST // 2),
        (own - FINE_ROUNDS * first, 1),
    )
    return sum(max(0, -(-count * cuts // PIECE_PAGES)) for count, cuts in parts)


def merge_strands(pieces: Iterable[tuple[int, Part]], strands: int = STRANDS) -> Part:
    """Merge the pieces of a row, or those that a rank has where it has so many `strands`, each of which is given with
    its strand. There is one at least."""
    found: dict[int, Part] = {}
    for strand, piece in pieces:
        found[strand] = merged(found[strand], piece) if strand in found else piece
    some = next(iter(found.values()))
    missing = torch.zeros_like(some[0]), torch.full_like(some[1], -torch.inf)
    return merge_tree([found.get(strand, missing) for strand in range(strands)])


def merge_tree(parts: Sequence[Part]) -> Part:
    """Merge a power of two of parts as a balanced tree, each with the one half of them further on."""
    found = list(parts)
    while len(found) > 1:
        half = len(found) // 2
        found = [merged(found[index], found[index + half]) for index in range(half)]
    return found[0]


@triton.jit
def _log2_of_one_and(x):
    """log2(1 + x) of x in 0 ... 1, or NaN of NaN. The library's logarithm branches, and the threads of the exchange
    between shards would come to the barrier behind it apart. The inverse hyperbolic tangent of x / (2 + x), which is
    1 / 3 at most, by its series up to where fp32 ends."""
    ratio = x / (2.0 + x)
    square = ratio * ratio
    series = tl.fma(square, 1.0 / 15.0, 1.0 / 13.0)
    series = tl.fma(square, series, 1.0 / 11.0)
    series = tl.fma(square, series, 1.0 / 9.0)
    series = tl.fma(square, series, 1.0 / 7.0)
    series = tl.fma(square, series, 1.0 / 5.0)
    series = tl.fma(square, series, 1.0 / 3.0)
    series = tl.fma(square, series, 1.0)
    return ratio * _TWO_OVER_LN2 * series


@triton.jit
def pair_weights(a, b):
    """Combine two parts' log2-sum-exp2: whether the first is not the lesser, the weight of the lesser beside 1, the
    sum of both weights, and the log2-sum-exp2 of both parts."""
    # NaN stays, or a part of it would have the weight of the other.
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    weight = tl.exp2(tl.minimum(a, b) - tl.where(top == float("-inf"), 0.0, top))
    total = 1.0 + weight
    return a >= b, weight, total, top + _log2_of_one_and(weight)


@triton.jit
def pair_sum(a, b, first, weight, total):
    """The output of two parts, by what `pair_weights` says of them."""
    top = tl.where(first, a, b)
    low = tl.where(first, b, a)
    # Products and sums that are left to the compiler may be rounded once or twice, in one kernel so and in another so.
    # A GPU divides by 1 ... 2 this way, too, but with instructions for divisors far from there for every number.
    found = tl.fma(low, weight, top) * (1.0 / total)
    # Spread before it is compared: Triton's interpreter makes numbers of one condition that it spreads.
    unseen = tl.broadcast_to(weight, low.shape) == 0.0
    return tl.where(unseen & (low - low == 0.0), top, found)
