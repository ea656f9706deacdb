"""Parts of a quantized matrix as a checkpoint stores it: as they are, or as the numbers they stand for.

Shape legend: N rows and K columns of the part; both begin anywhere in the matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from kernels.matrix import GROUP
from workers.weights.checkpoint import Checkpoint, WeightsError
from workers.weights.dequantize import fp8_blocks, int4_groups
from workers.weights.stored import BLOCK, FP8_SCALES, INT4_PACKED, INT4_SCALES, INT4_SHAPE, WORD, Shape
from workers.weights.weight import Format

INT4_SCALES_END: Final = 32
"""Scales of groups in INT4 are below, because kernels multiply by them in fp16 (`kernels/moe/int4_columns.py`)."""


@dataclass(frozen=True)
class QuantizedPart(ABC):
    """`rows` and `columns` of matrix `name`, which is of `shape` in all. Files are read when data are asked for."""

    checkpoint: Checkpoint
    name: str
    shape: Shape
    rows: slice
    columns: slice

    def of_rows(self, begin: int, end: int) -> QuantizedPart:
        """Some of its rows, counted from its first."""
        return replace(self, rows=slice(self.rows.start + begin, self.rows.start + end))

    @abstractmethod
    def data(self) -> Tensor:
        """The numbers as `Weight.data` has them, on the CPU."""

    @abstractmethod
    def scales(self, block: tuple[int, int] | None) -> Tensor:
        """The scales as `Weight.scales` has them, on the CPU, for such blocks."""

    @abstractmethod
    def covering(self) -> tuple[Tensor, Tensor]:
        """Numbers and scales, on the CPU, for `numbers`."""

    @abstractmethod
    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        """fp32 [N, K] of what `covering` gave, computed where that lies by now."""

    def _scales(self, name: str, index: tuple[slice, slice]) -> Tensor:
        scales = self.checkpoint.read(name, index)
        if not bool(scales.isfinite().all()):
            raise WeightsError(
                f"{name} has scales that are NaN or infinite; scales are finite. Is the download complete?"
            )
        return scales


class Fp8Part(QuantizedPart):
    """Of a matrix in e4m3, a scale for each block."""

    @override
    def data(self) -> Tensor:
        """NaN, which kernels take for a number, is an error."""
        data = self.checkpoint.read(self.name, (self.rows, self.columns))
        byte = data.view(torch.uint8)
        # There are two: one is the largest byte without a sign, the other the largest with one. So looking for them is
        # as fast as copying.
        if byte.numel() and (int(byte.max()) == 0xFF or int(byte.view(torch.int8).max()) == 0x7F):
            raise WeightsError(f"{self.name} holds NaN; weights are numbers. Is the download complete?")
        return data

    @override
    def scales(self, block: tuple[int, int] | None) -> Tensor:
        """Those of blocks smaller than the published ones are repeated."""
        assert block is not None
        published = self._published()
        for dim, (part, side) in enumerate(zip((self.rows, self.columns), block, strict=True)):
            firsts = torch.arange(part.start, part.stop, side)
            published = published.index_select(dim, firsts // BLOCK - part.start // BLOCK)
        return published.float()

    @override
    def covering(self) -> tuple[Tensor, Tensor]:
        return self.data(), self._published()

    @override
    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        row_N, column_K = (
            torch.arange(part.start, part.stop, device=data.device) // BLOCK - part.start // BLOCK
            for part in (self.rows, self.columns)
        )
        return fp8_blocks(data, scales, row_N, column_K)

    def _published(self) -> Tensor:
        """The scales of every published block that this part has a number of."""
        rows, columns = (slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in (self.rows, self.columns))
        return self._scales(self.name + FP8_SCALES, (rows, columns))


class Int4Part(QuantizedPart):
    """Of a matrix in INT4, a scale for each group of input features."""

    @override
    def data(self) -> Tensor:
        """The words are little-endian, so that their bytes are in order."""
        return self._words(slice(self.columns.start // WORD, -(-self.columns.stop // WORD)))

    @override
    def scales(self, block: tuple[int, int] | None) -> Tensor:
        groups = slice(self.columns.start // GROUP, -(-self.columns.stop // GROUP))
        scales = self._scales(self.name + INT4_SCALES, (self.rows, groups))
        if scales.numel() and float(scales.abs().max()) >= INT4_SCALES_END:
            raise WeightsError(
                f"{self.name}{INT4_SCALES} has scales of {INT4_SCALES_END} and more, times which numbers of INT4 are "
                "too large for the fp16 in which GPUs multiply them"
            )
        return scales

    @override
    def covering(self) -> tuple[Tensor, Tensor]:
        """Whole groups, as far as there are words."""
        begin = self.columns.start // GROUP * (GROUP // WORD)
        return self._words(slice(begin, -(-self.columns.stop // WORD))), self.scales(None)

    @override
    def numbers(self, data: Tensor, scales: Tensor) -> Tensor:
        begin = self.columns.start % GROUP
        return int4_groups(data, scales)[:, begin : begin + self.columns.stop - self.columns.start]

    def _words(self, words: slice) -> Tensor:
        told = self.checkpoint.read(self.name + INT4_SHAPE, (slice(0, 2),)).tolist()
        if told != list(self.shape):
            raise WeightsError(f"{self.name}{INT4_SHAPE} says {told}, config.json wants {list(self.shape)}")
        return self.checkpoint.read(self.name + INT4_PACKED, (self.rows, words)).view(torch.uint8)


PARTS: Final[dict[Format, Callable[[Checkpoint, str, Shape, slice, slice], QuantizedPart]]] = {
    Format.FP8_BLOCKS: Fp8Part,
    Format.INT4_GROUPS: Int4Part,
}
"""By how the matrix is stored."""
