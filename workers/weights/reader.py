"""Fills a model from a checkpoint that was verified."""

from __future__ import annotations

from collections.abc import Callable, Container
from functools import partial
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from workers.parallel.mesh import Mesh
from workers.weights.arena import Arena
from workers.weights.checkpoint import Checkpoint
from workers.weights.formats import PLAIN
from workers.weights.formats.format import StoredPart
from workers.weights.loading_progress import LoadingProgress
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.upload import Uploader
from workers.weights.wanted import Shape
from workers.weights.weight import Weight

MOST_DEQUANTIZED: Final = 1 << 20
"""Numbers that a thread dequantizes at once: what that takes on a device is little, however many threads there are."""


class CheckpointReader(WeightSource):
    """Fills memory from a verified checkpoint; a GPU's in the background, see `settle`. Use as a context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        mesh: Mesh,
        dtype: torch.dtype,
        device: torch.device,
        progress: LoadingProgress,
        stored: Callable[[str], str] = str,
        invariant: bool = False,
        own: Container[str] = (),
        arena: Arena | None = None,
    ) -> None:
        super().__init__(mesh, dtype, device, stored, checkpoint.dtype_of, invariant, own, arena)
        self.checkpoint = checkpoint
        self._progress = progress
        self._uploader = Uploader(device, release=checkpoint.release) if device.type == "cuda" else None

    @override
    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Reads only `index`; converts to the dtype and device of `into`."""
        self._put(into, partial(self.checkpoint.read, self.stored(name), index))

    @override
    def fill_matrix(self, into: Weight, part: Part) -> None:
        """Reads only what this rank has; dequantizes on the device of `into` what that has as plain numbers."""
        stored = self.stored_format(part.name)
        if stored is PLAIN:
            super().fill_matrix(into, part)
            return
        rows, columns = part.index(self.mesh)
        found = StoredPart(self.checkpoint, self.stored(part.name), part.shape, rows, columns)
        if into.scales is not None:
            self._put(into.data, partial(stored.data, found))
            self._put(into.scales, partial(stored.scales, found, into.block))
            return
        count, width = into.shape
        step = max(1, MOST_DEQUANTIZED // max(1, width))
        for begin in range(0, count, step):
            some = found.of_rows(begin, min(begin + step, count))
            place = into.plain[begin : begin + step]
            if self._uploader is None:
                place.copy_(stored.numbers(some, *stored.covering(some)))
            else:
                self._uploader.fill_computed(place, partial(stored.covering, some), partial(stored.numbers, some))
            self._progress.add(place.nbytes)

    def _put(self, into: Tensor, read: Callable[[], Tensor]) -> None:
        if self._uploader is None:
            into.copy_(read())
        else:
            self._uploader.fill(into, read)
        self._progress.add(into.nbytes)

    @override
    def settle(self) -> None:
        if self._uploader is not None:
            self._uploader.settle()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._uploader is not None:
            self._uploader.close()

    @override
    def progress(self, text: str) -> None:
        """Passes the line on, with how far loading is."""
        self._progress.at(text)

    @override
    def tell(self, text: str) -> None:
        self._progress.note(text)
