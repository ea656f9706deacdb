"""Schedule of one decode launch: the static tiling, the buffers it needs, and the rule that splits rows over CTAs.

The cache of every row is counted in *KV blocks* (`DecodeTiling.unit` tokens). All rows' KV blocks, laid end to end, are
dealt to a fixed number of *CTAs* in equal contiguous shares, so a captured graph has a fixed grid while lengths
change freely: the dealing is done on the device by `kernel.schedule_splits`. A row that crosses CTAs leaves one partial
result per piece, which the merge adds up in order. In invariant mode one KV block or several, as their position in the
row says, are a piece, which one CTA has as a whole, so that a row's result depends on nothing but the row.

The kernels for many query vectors on FP8 entries need a private part of Gluon, of Triton 3.6. Without it a line is
logged, and those for few stand in for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch

from kernels.page import PAGE_TOKENS, PIECE_PAGES
from kernels.private_api import PrivateApi
from kernels.strands import FINEST, most_pieces

REINTERPRETED: Final = PrivateApi(
    "triton",
    ("triton.experimental.gluon.language.shared_memory_descriptor._reinterpret",),
    "attention to FP8 entries goes without the kernels for many query vectors, and may take three times as long",
)
CTA_FIELDS = 8
"""int32 per CTA in the tile scheduler metadata: row, position in the row, KV blocks, flat position (in invariant mode
the slot of the first piece), first page, row's length; the seventh is `MERGED_FIELD`, the eighth `PARTS_FIELD`."""
ROW_FIELDS = 4
"""int32 per row in the tile scheduler metadata, after those of the CTAs: slot of its first piece, slot of its second,
pieces; the fourth of record i is the i-th row to merge, one of several pieces or of none."""
MERGED_FIELD = 6
"""Field of the first CTA's record that holds the number of rows to merge."""
PARTS_FIELD = 7
"""Field of every record that holds the number of parts of each CTA: 1, and for a short row as many as it has narrow
blocks in each of its blocks."""
NARROW_BLOCK = 16
"""Query vectors a program of the narrow kernel holds."""
NARROW_STAGES = 2
"""Tiles it has in flight."""
NARROW_STAGES_OF_256 = 3
"""The same of latents of 256 features, whose tiles are little more than half as large."""
FP8_BLOCK = 32
"""Query vectors it holds at most where entries are FP8: each tile is widened once for all of them."""
FP8_STAGES = 3
"""Tiles that fit into shared memory there beside 16 query vectors; beside more `NARROW_STAGES` do."""
FP8_BLOCKS_ALONE = 4
"""Blocks of `NARROW_BLOCK` up to which a row alone is taken in those where entries are FP8."""
FEWEST_FP8_VECTORS = 64
"""Query vectors of all rows from which FP8 entries are taken on wgmma (`attend_fp8`), whose start takes longer and
whose tiles less: the longer rows are, the fewer suffice. With 16 heads, attention and merge took on an H200 at
4 x 1,024 tokens 7.2 us in narrow blocks and 8.8 so, at 8 x 4,096 20.3 and 22.4, at 4 x 16,384 27.8 and 22.3, at
16 x 16,384 93.7 and 64.5; one row at 16,384 12.2 and 13.0 (`python bench/mla_decode.py --cache fp8`). Who has entries
in FP8 has long rows."""
MOST_FP8_VECTORS = 48
"""Query vectors of a row up to which `attend_fp8` is taken, and not `attend_wide_fp8`. With 64 they took on an H200 at
64 x 16,384 tokens 474 and 435 us, at 1 x 4,096 tokens 16.1 and 12.6; with 32 at the first 246 and 433."""
FP8_RINGS = {16: 4, 32: 4}
"""Query vectors that a program of `attend_fp8` holds, and the tiles that fit into shared memory beside them."""
FP8_AHEAD = 2
"""Number of tiles by which `attend_wide_fp8` prefetches into the L2 cache."""
NARROW_BLOCKS_ALONE = 2
"""Narrow blocks in which a row alone is always taken. With 32 query vectors attention and merge took on an H200, in
microseconds (`run_tiling` of bench/mla_decode.py with either tiling), 5.6 / 7.2 / 13.5 / 21.8 in narrow blocks and
8.2 / 10.2 / 17.3 / 20.6 in a wide one, at 1,024 / 4,096 / 16,384 / 32,768 tokens."""
SHORT_TOKENS = 8192
"""Tokens up to which a row alone, of 33 to 64 query vectors, is taken in narrow blocks. With 64 of them, and only the
kernel that works launched, those times were 5.7 / 8.6 / 21.1 / 37.5 and 9.0 / 12.4 / 17.8 / 23.2."""
SHORT_TOKENS_OF_128 = 4096
"""The same of a row alone of 128 query vectors, whose programs share the tokens among half as many. A step of one row
of 1,024 tokens of six layers of DeepSeek-V3 took 1.525 ms so, 1.546 in wide blocks."""
MOST_STRAND_COLUMNS: Final = 256
"""Most columns of a program of `merge_strands`, each of which computes the weights of its vector's pieces itself."""
LEAST_STRAND_COLUMNS: Final = 64
"""Fewest, of few vectors: two columns of every thread."""


@dataclass(frozen=True)
class DecodeShape:
    """The sizes of one launch, all known when a graph is captured."""

    rows: int
    width: int
    heads: int
    latent: int
    """Latent (value) dimensions, kv_lora_rank."""
    rope: int
    """Roped key dimensions."""
    pages: int
    """Columns of the page table."""
    invariant: bool = False
    shards: int = 1
    """Ranks that the rows' pieces go round in invariant mode, of which this launch attends to one's."""

    def __post_init__(self) -> None:
        if min(self.rows, self.width, self.heads, self.latent, self.rope, self.pages, self.shards) < 1:
            raise ValueError(f"all sizes must be positive: {self}")

    @property
    def queries(self) -> int:
        """Query vectors of a row: width x heads, token-major."""
        return self.width * self.heads


@dataclass(frozen=True)
class DecodeTiling:
    """The static choices of one launch."""

    path: str
    """Name of the attention kernel: "triton" (portable), "narrow", "wide" or "fp8" (Hopper); "either": narrow and wide,
    of which one works."""
    block: int
    """Query vectors a program holds; on the path "either", where the row is long."""
    tile: int
    """Cache tokens a program works on at a time."""
    unit: int
    """Cache tokens of one scheduling KV block, a multiple of `tile`."""
    ctas: int
    """Programs that share the rows, for each block of queries."""
    row_cost: int
    """Units that starting a row is counted as."""
    least: int
    """Fewest KV blocks a CTA is given, so that partial results stay cheap beside the cache they stand for."""
    warps: int
    stages: int
    """Tiles in flight; in wide blocks, how many tiles ahead the L2 cache is told of (0: not at all)."""
    merge_queries: int
    """Queries a merge program adds up."""
    merge_columns: int
    """Latent columns a merge program writes."""
    merge_pieces: int
    """Pieces a merge program loads at once."""
    merge_warps: int
    short: int = -1
    """Tokens up to which a row is short, on the path "either". Short rows are taken in narrow blocks by as many CTAs
    fewer."""

    def __post_init__(self) -> None:
        if self.unit % self.tile:
            raise ValueError(f"a unit of {self.unit} tokens is no multiple of a tile of {self.tile}")
        if PAGE_TOKENS % self.tile:
            raise ValueError(f"a tile of {self.tile} tokens does not divide a page")

    def blocks(self, shape: DecodeShape) -> int:
        """Blocks of queries a row has."""
        return -(-shape.queries // self.block)

    def parts(self, shape: DecodeShape) -> int:
        """Narrow blocks that each block of queries of a short row is cut into."""
        return -(-shape.queries // NARROW_BLOCK) // self.blocks(shape) if self.path == "either" else 1

    def ways(self) -> tuple[DecodeTiling, ...]:
        """The attention kernels' tilings, in the order of their launches; of two, the plan says which works.

        The narrow one is first, because a short row gains most from programs that start beside those of the kernel
        before. A wide program starts only on a multiprocessor that nothing else runs on.
        """
        if self.path != "either":
            return (self,)
        narrow = replace(self, path="narrow", block=NARROW_BLOCK, stages=NARROW_STAGES)
        return narrow, replace(self, path="wide")

    def slots(self, shape: DecodeShape) -> int:
        """Partial results the workspace must hold at the worst lengths."""
        if shape.invariant:
            return shape.rows * most_pieces(shape.pages, shape.shards)
        return 2 * self.ctas


INVARIANT_UNIT = PIECE_PAGES // FINEST * PAGE_TOKENS
"""Tokens of a KV block in invariant mode, whatever the lengths and the page table: of the shortest pieces."""


def portable_tiling(shape: DecodeShape, multiprocessors: int, *, fp8: bool = False, own: bool = False) -> DecodeTiling:
    """A tiling for the portable kernel on a device of so many multiprocessors. `fp8`: of entries in FP8, which take
    more registers on their way: with larger tiles, or several in flight, these would spill."""
    block = 16 if shape.queries <= 16 and not shape.invariant else 32  # at 64 it spills registers
    small = fp8 and shape.latent > 256
    return _tiling(
        shape,
        "triton",
        multiprocessors * (2 if block == 16 else 1),
        block=block,
        tile=16 if small else 32,
        warps=4 if block == 16 else 8,
        stages=1 if small else 2,
    )


def hopper_tiling(shape: DecodeShape, multiprocessors: int, *, fp8: bool = False, own: bool = False) -> DecodeTiling:
    """A tiling for Hopper: its own kernels for 512 + 64 features and, in bf16, for 256 + 64, the portable one for other
    models.

    `fp8`: of entries in FP8, which the narrow kernel reads for any number of query vectors, `attend_fp8` faster for
    many and alone in invariant mode, and `attend_wide_fp8` for many of a row. `own`: of a shard's own entries, whose
    bounds `attend_wide_fp8` has no registers for.
    """
    if shape.rope != 64 or not (shape.latent == 512 or (shape.latent == 256 and not fp8)):
        return portable_tiling(shape, multiprocessors, fp8=fp8)
    narrow_blocks = -(-shape.queries // NARROW_BLOCK)
    alone = shape.rows == 1
    if fp8:
        if shape.invariant and not REINTERPRETED.there():
            return portable_tiling(shape, multiprocessors, fp8=True)
        few = shape.rows * shape.queries < FEWEST_FP8_VECTORS
        if not shape.invariant and (few or not REINTERPRETED.there()):
            return narrow_fp8_tiling(shape, multiprocessors)
        if shape.invariant or own or shape.queries <= MOST_FP8_VECTORS:
            return fp8_tiling(shape, multiprocessors)
        return wide_fp8_tiling(shape, multiprocessors)
    if not shape.invariant and narrow_blocks <= (NARROW_BLOCKS_ALONE if alone else 1):
        block, stages = NARROW_BLOCK, NARROW_STAGES if shape.latent == 512 else NARROW_STAGES_OF_256
        return _tiling(shape, "narrow", multiprocessors, block=block, tile=PAGE_TOKENS, warps=4, stages=stages)
    short = SHORT_TOKENS if shape.queries <= 64 else SHORT_TOKENS_OF_128 if shape.queries == 128 else -1
    if not shape.invariant and alone and short > 0 and narrow_blocks <= multiprocessors:
        tiling = _tiling(shape, "either", multiprocessors, block=64, tile=PAGE_TOKENS, warps=4, stages=0)
        # A merge for short rows, which have few pieces: at 1,024 tokens it takes 2.1 microseconds, one of 128 pieces at
        # a time 6.3. With 32 at a time it takes 1.8, but 1.4 more at 32,768 tokens.
        return replace(tiling, short=short, merge_pieces=64, merge_columns=64, merge_warps=1)
    stages = 2 if shape.queries >= 256 else 0
    return _tiling(shape, "wide", multiprocessors, block=64, tile=PAGE_TOKENS, warps=4, stages=stages)


def narrow_fp8_tiling(shape: DecodeShape, multiprocessors: int) -> DecodeTiling:
    """A tiling for `attend_narrow` on Hopper: FP8 entries of 512 + 64 features, without invariant mode."""
    narrow = shape.queries <= (FP8_BLOCKS_ALONE if shape.rows == 1 else 1) * NARROW_BLOCK
    block, stages = (NARROW_BLOCK, FP8_STAGES) if narrow else (FP8_BLOCK, NARROW_STAGES)
    return _tiling(shape, "narrow", multiprocessors, block=block, tile=PAGE_TOKENS, warps=8, stages=stages)


def fp8_tiling(shape: DecodeShape, multiprocessors: int) -> DecodeTiling:
    """A tiling for `attend_fp8` on Hopper: FP8 entries of 512 + 64 features."""
    fits = [most for most in FP8_RINGS if shape.queries <= most and not shape.invariant]
    block = min(fits, default=max(FP8_RINGS))
    return _tiling(shape, "fp8", multiprocessors, block=block, tile=PAGE_TOKENS, warps=4, stages=FP8_RINGS[block])


def wide_fp8_tiling(shape: DecodeShape, multiprocessors: int) -> DecodeTiling:
    """A tiling for `attend_wide_fp8` on Hopper: FP8 entries of 512 + 64 features."""
    return _tiling(shape, "wide", multiprocessors, block=64, tile=PAGE_TOKENS, warps=4, stages=FP8_AHEAD)


def _tiling(
    shape: DecodeShape, path: str, programs: int, *, block: int, tile: int, warps: int, stages: int
) -> DecodeTiling:
    """Complete a tiling: as many CTAs as keep all programs resident at once, and a merge that suits them."""
    ctas = max(1, programs // -(-shape.queries // block))
    unit, row_cost = PAGE_TOKENS, 1
    if shape.invariant:  # nothing may depend on the rows there are
        unit, row_cost = INVARIANT_UNIT, 0
        pieces, queries, columns, merge_warps = 16, 1, MOST_STRAND_COLUMNS, 1
        # Of few vectors a program has fewer columns, for a warp on every scheduler.
        while columns > LEAST_STRAND_COLUMNS and shape.rows * shape.queries * shape.latent < 4 * programs * columns:
            columns //= 2
    else:
        # Programs of one warp have the least latency, but there should not be many. A thread holds 64 elements, or
        # 128 when a row has about 64 pieces, where whole lines of memory matter more.
        pieces = min(128, max(4, _power_of_2(2 * ctas // (3 * shape.rows))))
        columns = {128: 32, 64: 64}.get(pieces, 2048 // pieces)
        programs = min(shape.rows, ctas + 1) * shape.queries * shape.latent // columns
        queries = min(4, _power_of_2(programs // 1024)) if pieces <= 4 else 1
        merge_warps = 2 if pieces == 128 else queries
        if shape.rows == 1:
            row_cost = 0
    return DecodeTiling(
        path=path,
        block=block,
        tile=tile,
        unit=unit,
        ctas=ctas,
        row_cost=row_cost,
        least=1,
        warps=warps,
        stages=stages,
        merge_queries=queries,
        merge_columns=min(shape.latent & -shape.latent, columns),  # a power of two that divides the latent
        merge_pieces=pieces,
        merge_warps=merge_warps,
    )


def _power_of_2(x: int) -> int:
    """The smallest power of two that is at least x, and at least 1."""
    return 1 << max(0, x - 1).bit_length()


@dataclass(frozen=True)
class Workspace:
    """The scratch memory of one launch shape: plan and partial results. Launches in stream order may share it."""

    shape: DecodeShape
    tiling: DecodeTiling
    metadata: torch.Tensor
    """int32 [CTAs * CTA_FIELDS + rows * ROW_FIELDS]."""
    partial_SQL: torch.Tensor
    """Normalised partial outputs in the cache's dtype, S = `DecodeTiling.slots`."""
    partial_lse_SQ: torch.Tensor
    """fp32 log2-sum-exp2 of each piece's scaled scores."""

    @staticmethod
    def bytes(shape: DecodeShape, tiling: DecodeTiling, dtype: torch.dtype) -> int:
        """Bytes `over` needs."""
        return sum(size for _, size in _parts(shape, tiling, dtype))

    @staticmethod
    def over(buffer: torch.Tensor, shape: DecodeShape, tiling: DecodeTiling, dtype: torch.dtype) -> Workspace:
        """Lay a workspace over the front of a uint8 buffer of at least `bytes` bytes (ValueError when it is smaller).

        Nothing in it needs to be initialised; workspaces of several shapes may lie over one buffer.
        """
        need = Workspace.bytes(shape, tiling, dtype)
        if buffer.dtype != torch.uint8 or buffer.numel() < need:
            raise ValueError(f"{shape} needs a uint8 buffer of {need} bytes, not {buffer.numel()} of {buffer.dtype}")
        views: list[torch.Tensor] = []
        offset = 0
        for part, size in _parts(shape, tiling, dtype):
            views.append(buffer[offset : offset + size].view(part))
            offset += size
        metadata, partial, partial_lse = views
        slots, queries = tiling.slots(shape), shape.queries
        used = slots * queries
        return Workspace(
            shape,
            tiling,
            metadata,
            partial[: used * shape.latent].view(slots, queries, shape.latent),
            partial_lse[:used].view(slots, queries),
        )


def _parts(shape: DecodeShape, tiling: DecodeTiling, dtype: torch.dtype) -> list[tuple[torch.dtype, int]]:
    """(dtype, bytes) of plan, partial outputs and partial sums, each padded to 256 bytes."""
    metadata = 4 * (tiling.ctas * CTA_FIELDS + shape.rows * ROW_FIELDS)
    vectors = tiling.slots(shape) * shape.queries
    sizes = (
        (torch.int32, metadata),
        (dtype, vectors * shape.latent * dtype.itemsize),
        (torch.float32, vectors * 4),
    )
    return [(part, -(-size // 256) * 256) for part, size in sizes]
