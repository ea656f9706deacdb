"""The format in which a rank keeps a matrix that is made of several tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from workers.parallel.mesh import INVARIANT_RANKS, Mesh
from workers.weights.formats import PLAIN
from workers.weights.formats.format import Block, Format
from workers.weights.part import Part, kind_of, sharing

_WHOLE_TILE: Final = 64
"""Rows of quantized weights that make a product of Hopper's tensor cores; with fewer it is another instruction, which
rounds otherwise."""


@dataclass(frozen=True)
class Layout:
    """Form in which a matrix is kept."""

    format: Format = PLAIN
    block: Block = None
    """See `Weight`."""
    note: str = ""
    """Note for the user about a matrix that is stored quantized and kept plain."""


def layout_of(stacks: Sequence[Sequence[Part]], stored: Callable[[str], Format], mesh: Mesh) -> Layout:
    """Choose the form in which to keep matrices, each of which has rows of some parts, one behind the other. It is the
    stored one if possible, else plain. Matrices of several experts are kept alike, and all ranks choose alike."""
    formats = {stored(part.name) for parts in stacks for part in parts}
    if formats == {PLAIN}:
        return Layout()
    if len(formats) > 1:
        return Layout(note=f"{kind_of(stacks)}: stored partly quantized and partly not; kept unquantized")
    alike = list({tuple(part.place for part in parts): parts for parts in stacks}.values())  # there are many experts
    (format,) = formats
    kept = format.kept(alike, mesh)
    if kept.note:
        return Layout(note=f"{kind_of(stacks)}: {kept.note}; kept unquantized")
    return Layout(format, kept.block)


def invariant_layout(stacks: Sequence[Sequence[Part]], stored: Callable[[str], Format], mesh: Mesh) -> Layout:
    """`layout_of`, alike on 1, 2, 4 and 8 ranks, because products round otherwise in another format: it suits the share
    of the most ranks that can share these, so it suits those of fewer, too."""
    parts = [part for stack in stacks for part in stack]
    lengths = {part.shared_length for part in parts if part.shard is not None}
    ranks = sharing(stacks, mesh)
    most = max(n for n in INVARIANT_RANKS if n <= ranks or not any(length % n for length in lengths))
    layout = layout_of(stacks, stored, Mesh.of(0, most))
    if layout.format is not PLAIN:
        rows = min(
            (part.shared_length // most for part in parts if part.shard and part.shard.dimension == 0),
            default=_WHOLE_TILE,
        )
        if rows < _WHOLE_TILE:
            note = f"{kind_of(stacks)}: on {most} ranks a share has {rows} rows, fewer than a tile; kept unquantized"
            layout = Layout(note=note)
    on_all = f"{layout.note}, as invariant mode does on any number of ranks"
    return replace(layout, note=on_all) if layout.note else layout
