"""The format in which a rank keeps a matrix that is made of several tensors of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Final

from kernels.matrix import GROUP
from workers.parallel.mesh import INVARIANT_RANKS, Mesh
from workers.weights.part import Part
from workers.weights.stored import BLOCK
from workers.weights.weight import Format

LEAST_BLOCK: Final = (16, 64)
"""Rows and columns of the smallest blocks that kernels read: see `kernels.matrix`."""
_WHOLE_TILE: Final = 64
"""Rows of quantized weights that make a product of Hopper's tensor cores; with fewer it is another instruction, which
rounds otherwise."""


@dataclass(frozen=True)
class Layout:
    """How a matrix is kept."""

    format: Format = Format.PLAIN
    block: tuple[int, int] | None = None
    """See `Weight`."""
    note: str = ""
    """What to tell of a matrix that is stored quantized and kept plain."""


def layout_of(stacks: Sequence[Sequence[Part]], stored: Callable[[str], Format], mesh: Mesh) -> Layout:
    """How to keep matrices, each of which has rows of some parts, one behind the other. As they are stored, if that can
    be: else plain. Matrices of several experts are kept alike, and all ranks choose alike."""
    formats = {stored(part.name) for parts in stacks for part in parts}
    if formats == {Format.PLAIN}:
        return Layout()
    if len(formats) > 1:
        return Layout(note=f"{_kind(stacks)}: stored partly quantized and partly not; kept unquantized")
    alike = list({tuple(part.place for part in parts): parts for parts in stacks}.values())  # there are many experts
    kept = (_int4 if formats == {Format.INT4_GROUPS} else _fp8)(alike, mesh)
    return replace(kept, note=f"{_kind(stacks)}: {kept.note}; kept unquantized") if kept.note else kept


def invariant_layout(stacks: Sequence[Sequence[Part]], stored: Callable[[str], Format], mesh: Mesh) -> Layout:
    """`layout_of`, alike on 1, 2, 4 and 8 ranks, because products round otherwise in another format: it suits the share
    of the most ranks that can share these, so it suits those of fewer, too."""
    parts = [part for stack in stacks for part in stack]
    lengths = {part.shared_length for part in parts if part.shard is not None}
    ranks = _sharing(stacks, mesh)
    most = max(n for n in INVARIANT_RANKS if n <= ranks or not any(length % n for length in lengths))
    layout = layout_of(stacks, stored, Mesh.of(0, most))
    if layout.format is not Format.PLAIN:
        rows = min(
            (part.shared_length // most for part in parts if part.shard and part.shard.dimension == 0),
            default=_WHOLE_TILE,
        )
        if rows < _WHOLE_TILE:
            note = f"{_kind(stacks)}: on {most} ranks a share has {rows} rows, fewer than a tile; kept unquantized"
            layout = Layout(note=note)
    on_all = f"{layout.note}, as invariant mode does on any number of ranks"
    return replace(layout, note=on_all) if layout.note else layout


def _fp8(stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Layout:
    """Blocks so small that no seam and no share of a rank begins inside of one."""
    rows = columns = BLOCK
    for parts in stacks:
        place = 0
        for part in parts:
            if part.rope is not None and not part.rope.stay_within(BLOCK, part.rows):
                return Layout(note=f"rows that change places lie in several {BLOCK} x {BLOCK} blocks")
            row_step, column_step = part.steps(mesh)
            rows, columns = gcd(rows, place, row_step), gcd(columns, column_step)
            own, _ = part.index(mesh)
            place += own.stop - own.start
    for what, size, least in zip(("rows", "columns"), (rows, columns), LEAST_BLOCK, strict=True):
        if size < least:
            return Layout(
                note=f"on {_sharing(stacks, mesh)} ranks a share's {what} begin inside of a {BLOCK} x {BLOCK} block"
            )
    return Layout(Format.FP8_BLOCKS, (rows, columns))


def _int4(stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Layout:
    for part in (part for parts in stacks for part in parts):
        _, columns = part.index(mesh)
        if part.steps(mesh)[1] % GROUP or (columns.stop - columns.start) % GROUP:
            return Layout(
                note=f"on {_sharing(stacks, mesh)} ranks a share's columns begin or end inside of a group of {GROUP}"
            )
    return Layout(Format.INT4_GROUPS)


def _sharing(stacks: Sequence[Sequence[Part]], mesh: Mesh) -> int:
    """How many ranks share these; ValueError where they share some along one axis and some along another."""
    axes = {part.shard.axis for parts in stacks for part in parts if part.shard is not None}
    if len(axes) > 1:
        raise ValueError(f"{_kind(stacks)}: a matrix is shared along one axis, not along {' and '.join(sorted(axes))}")
    return max((mesh.axis(axis).size for axis in axes), default=1)


def _kind(stacks: Sequence[Sequence[Part]]) -> str:
    """What the parts are called in every layer, such as `experts.gate_proj and experts.up_proj`."""
    names = [re.sub(r"\.\d+(?=\.)", "", part.name.removesuffix(".weight")) for parts in stacks for part in parts]
    return " and ".join(dict.fromkeys(".".join(name.split(".")[-2:]) for name in names))
