"""Records that the decode kernels and their functions take as one parameter each: constants of a launch, and values of
a running kernel."""

from __future__ import annotations

from typing import Any, NamedTuple


class Features(NamedTuple):
    """The features of a query vector or a cache entry, and how the portable kernel multiplies them."""

    latent: int
    latent_lanes: int
    """Latent features padded to a power of two."""
    rope: int
    rope_lanes: int
    """Roped features padded to a power of two."""
    precision: str
    """Precision of products, as `tl.dot` names it. It matters in fp32 alone."""


class Split(NamedTuple):
    """Counting of the rows' cache when CTAs share it. The plan and the attention of a step have the same."""

    unit: int
    """Cache tokens of a KV block. In invariant mode those of a row's shortest pieces."""
    page: int
    """Cache tokens of a page."""
    row_cost: int
    """Units that starting a row is counted as."""
    invariant: int
    """KV blocks of a row up to which each is a piece of its own, whoever attends to it. Up to `FINE_ROUNDS` times as
    many two make a piece, and behind these four (`kernels.strands`). 0 without invariant mode: a CTA's share is one."""
    own: bool
    """Whether the rows are a shard's own entries (`kernels.own_entries`)."""


class Results(NamedTuple):
    """Where a kernel leaves what query vectors attended to: pointers."""

    latent: Any
    """Their weighted sums of latents."""
    lse: Any
    """Logarithms of their sums of exponentials."""


class Tile(NamedTuple):
    """Tile that a program works on at a time."""

    queries: int
    """Query vectors, the same ones all the time."""
    tokens: int
    """Cache tokens."""
    latent: int
    """Their latent features."""


class Overlap(NamedTuple):
    """Overlap of one of Hopper's kernels: with its own products, and with the kernels before and after it."""

    stages: int
    """Tiles in flight; in wide blocks, how many tiles ahead the L2 cache is told of (0: not at all)."""
    dependent: bool
    """Whether it is launched dependently."""
    early: bool
    """Whether it asks for cache entries before the kernel before has ended, as far as `launch` says that it may."""
    either: int
    """Programs that have the same record of the plan, where another kernel is launched for the same rows and the plan
    says which of the two works; 0 where there is none."""


class Share(NamedTuple):
    """Share of a CTA, for one block of query vectors: values of a running kernel, most of them the launch's."""

    length: Any
    """Tokens of every row, in memory."""
    seen: Any
    """`OwnEntries.seen_RX` in memory, where the rows are a shard's own entries (`Split.own`)."""
    out: Any
    lse: Any
    """Log-sum-exp of whole rows, [rows, queries], beside their results in `out`, [rows, queries, latent]."""
    partial: Any
    partial_lse: Any
    """Log-sum-exp of pieces, beside their results in `partial`, slot by slot."""
    metadata: Any
    scale: Any
    """Scale of the scores; log2(e) is in it."""
    first: Any
    """The first entry of a row that is attended to."""
    queries: Any
    """Query vectors of a row."""
    drafts: Any
    """Tokens of a row less one."""
    heads: Any
    ctas: Any
    """Number of CTAs that share the rows."""
    cta: Any
    """Index of this CTA among them."""
    block: Any
    """Index of the block among a row's blocks of query vectors."""
