"""Fetching of entries in Hopper's kernels of sparse attention: four warps copy those of a tile one by one, 16 bytes a
thread, to where `kernels.mla_decode` has whole pages."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from kernels.mla_decode.split_kv import TILE, share_of

THREADS = gl.constexpr(128)
"""Threads that fetch; as many arrivals make a tile complete."""
HALF_TILE = gl.constexpr(TILE.value // 2)
"""Entries of half a tile."""


@gluon.constexpr_function
def rows_layout(width):
    """Layout of the elements of a tile's entries that are copied at once: `width` of them in 16 bytes, eight times as
    many of an entry."""
    return gl.BlockedLayout([1, width], [4, 8], [4, 1], [1, 0])


@gluon.constexpr_function
def single_layout(width):
    """Layout in which only 16 bytes of an entry are copied at once, by one thread each."""
    return gl.BlockedLayout([1, width], [32, 1], [4, 1], [1, 0])


@gluon.jit
def share_of_part(length, out, lse, partial, partial_lse, metadata, scale, heads, blocks):
    """The `Share` of a program: a block of heads of one part of a token's entries, as `places.find_places` has
    planned. Each part has one place for its results, the CTA's own, and no query vector belongs to a draft."""
    return share_of(length, length, out, lse, partial, partial_lse, metadata, scale, 0, heads, 0, heads, 0, blocks)


@gluon.jit
def places_of(mine, first, count, ENTRIES: gl.constexpr, layout: gl.constexpr):
    """Return the indices in the flattened cache of ENTRIES entries; 0 for those that a token does not have, which are
    masked where they are used."""
    entry = first + gl.arange(0, ENTRIES, gl.SliceLayout(1, layout))
    return gl.load(mine + entry, mask=entry < count, other=0, cache_modifier=".cg")


@gluon.jit
def copy_columns(entries, first, to, layout: gl.constexpr):
    """Copy `to.shape[1]` elements of each entry from the element `first` on; `entries` point to their beginnings."""
    column = gl.arange(0, to.shape[1], gl.SliceLayout(0, layout))
    async_copy.async_copy_global_to_shared(to, gl.expand_dims(entries, 1) + (first + column)[None, :])


@gluon.jit
def tell(barrier):
    """Arrive at an mbarrier of `THREADS` arrivals once all is there that was copied so far."""
    async_copy.mbarrier_arrive(barrier, increment_count=False)
