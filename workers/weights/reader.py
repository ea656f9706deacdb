"""Fills a model from a checkpoint that was verified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from workers.parallel.group import TensorParallel
from workers.weights.checkpoint import READABLE_DTYPES, Checkpoint
from workers.weights.source import Shape, WeightSource
from workers.weights.upload import Uploader


class CheckpointReader(WeightSource):
    """Fills memory from a verified checkpoint; a GPU's in the background, see `settle`. Use as a context manager."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        group: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None] | None,
        stored: Callable[[str], str] = str,
    ) -> None:
        super().__init__(group, dtype, device, stored)
        self.checkpoint = checkpoint
        self._progress = progress
        self._uploader = Uploader(device) if device.type == "cuda" else None

    def fill_part(self, into: Tensor, name: str, shape: Shape, index: tuple[slice, ...]) -> None:
        """Reads only `index`; converts to the dtype and device of `into`."""
        read = partial(self.checkpoint.read, self.stored(name), index)
        if self._uploader is None:
            into.copy_(read())
        else:
            self._uploader.fill(into, read)

    def lossless(self, name: str) -> torch.dtype:
        """See `WeightSource`."""
        stored = READABLE_DTYPES[self.checkpoint.entries[self.stored(name)].dtype]
        return self.dtype if self.dtype == stored else torch.float32

    def settle(self) -> None:
        """See `WeightSource`."""
        if self._uploader is not None:
            self._uploader.settle()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._uploader is not None:
            self._uploader.close()

    def progress(self, text: str) -> None:
        """Passes the line on."""
        if self._progress is not None:
            self._progress(text)
