"""Matrices of products: those of plain numbers, and matrices stored in fewer bits, with scales.

Shape legend: X experts (or none), N output features, K input features, B rows of blocks, C columns of blocks, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Final, Protocol, Self

import torch
from torch import Tensor
from typing_extensions import override

GROUP: Final = 32
"""Input features of a group of INT4 numbers, of MXFP8 and of MXFP4."""
WIDEST: Final = 11
"""Most powers of two between scales of a row of MXFP4 that becomes e4m3 exactly."""
ROWS_AT_ONCE: Final = 4096
"""Rows of MXFP4 whose numbers are looked at at a time, for want of memory."""


@dataclass(frozen=True)
class BlockScaled:
    """FP8 (e4m3) with a scale for every block, as DeepSeek-V3 publishes it (arXiv:2412.19437, section 3.3):
    w[n, k] = data[n, k] * scales[n // rows, k // features]."""

    data: Tensor
    """float8_e4m3fn [N, K] or [X, N, K], contiguous."""
    scales: Tensor
    """fp32 [B, C] or [X, B, C], contiguous; the last block of either direction may end beyond the matrix."""
    rows: int = 128
    """Output features of a block; a power of two from 16 to 128."""
    features: int = 128
    """Input features of a block: 64 or 128."""

    def __post_init__(self) -> None:
        *experts, rows, features = self.data.shape
        blocks = (*experts, -(-rows // self.rows), -(-features // self.features))
        if self.data.dtype != torch.float8_e4m3fn or self.scales.dtype != torch.float32:
            raise ValueError(f"data is float8_e4m3fn and scales fp32, not {self.data.dtype} and {self.scales.dtype}")
        if self.rows not in (16, 32, 64, 128) or self.features not in (64, 128):
            raise ValueError(f"blocks of {self.rows} x {self.features} are not supported")
        if tuple(self.scales.shape) != blocks:
            raise ValueError(
                f"a matrix {tuple(self.data.shape)} in blocks of {self.rows} x {self.features} has scales {blocks}, "
                f"not {tuple(self.scales.shape)}"
            )
        if not self.data.is_contiguous() or not self.scales.is_contiguous():
            raise ValueError("data and scales are contiguous")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.data.device

    def __getitem__(self, expert: int) -> BlockScaled:
        """The matrix of an expert."""
        return BlockScaled(self.data[expert], self.scales[expert], self.rows, self.features)

    def float(self) -> Tensor:
        """The matrix in fp32, every product rounded once."""
        rows, features = self.shape[-2:]
        scales = self.scales.repeat_interleave(self.rows, -2)[..., :rows, :]
        return self.data.float() * scales.repeat_interleave(self.features, -1)[..., :features]


@dataclass(frozen=True)
class _InGroups:
    """Numbers with a scale for every 32 input features of a row."""

    data: Tensor
    """[N, K] or [X, N, K], contiguous; K / 2 where there are two numbers in a byte."""
    scales: Tensor
    """[N, G] or [X, N, G], contiguous."""
    dtypes: ClassVar[tuple[torch.dtype, torch.dtype]]
    """Of data and of scales."""
    packed: ClassVar[int] = 2
    """Numbers of an element, the lowest for the first feature."""

    def __post_init__(self) -> None:
        *outer, features = self.shape
        found, groups = (self.data.dtype, self.scales.dtype), (*outer, features // GROUP)
        if found != self.dtypes:
            raise ValueError(f"data is {self.dtypes[0]} and scales {self.dtypes[1]}, not {found[0]} and {found[1]}")
        if features % GROUP or tuple(self.scales.shape) != groups:
            raise ValueError(f"{features} features in groups of {GROUP} have scales {groups}, not {self.scales.shape}")
        if not self.data.is_contiguous() or not self.scales.is_contiguous():
            raise ValueError("data and scales are contiguous")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix."""
        return (*self.data.shape[:-1], self.packed * self.data.shape[-1])

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.data.device

    def __getitem__(self, expert: int) -> Self:
        """The matrix of an expert."""
        return type(self)(self.data[expert], self.scales[expert])


@dataclass(frozen=True)
class GroupScaled(_InGroups):
    """INT4 with a scale in bf16 for every 32 input features of a row, as compressed-tensors packs it, in uint8:
    w[n, k] = (nibble[n, k] - 8) * scales[n, k // 32]."""

    dtypes: ClassVar = (torch.uint8, torch.bfloat16)

    def float(self) -> Tensor:
        """The matrix in fp32, exactly."""
        nibbles = torch.stack([self.data & 15, self.data >> 4], -1).flatten(-2)
        return (nibbles.float() - 8) * self.scales.float().repeat_interleave(GROUP, -1)


@dataclass(frozen=True)
class MicroScaled(_InGroups):
    """MXFP8 (OCP Microscaling Formats, 2023): FP8 (e4m3) with a scale for every 32 input features of a row, a byte that
    is an exponent of 2 (E8M0): w[n, k] = data[n, k] * 2^(scales[n, k // 32] - 127). The least, 0, counts as a factor of
    0."""

    dtypes: ClassVar = (torch.float8_e4m3fn, torch.uint8)
    packed: ClassVar = 1

    def float(self) -> Tensor:
        """The matrix in fp32, exactly."""
        return self.data.float() * e8m0(self.scales).repeat_interleave(GROUP, -1)


@dataclass(frozen=True)
class MicroScaled4(_InGroups):
    """MXFP4: as `MicroScaled`, with FP4 (E2M1), two numbers per byte in uint8."""

    dtypes: ClassVar = (torch.uint8, torch.uint8)
    least: Tensor | None = None
    """uint8 [N] or [X, N], contiguous: of every row the least byte b of a scale with which a number becomes e4m3 when
    it is divided by 2^(b - 122); see `with_least`. None: nobody has looked, or there is a row that has none."""

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.least is not None:
            found, rows = (self.least.dtype, tuple(self.least.shape)), self.shape[:-1]
            if found != (torch.uint8, rows) or not self.least.is_contiguous():
                raise ValueError(f"of rows {rows} the least bytes are contiguous uint8, not {found}")

    @override
    def __getitem__(self, expert: int) -> MicroScaled4:
        """The matrix of an expert."""
        least = None if self.least is None else self.least[expert]
        return MicroScaled4(self.data[expert], self.scales[expert], least)

    def with_least(self) -> MicroScaled4:
        """Look whether all rows are numbers of e4m3 times a power of two for each row, and return the matrix with
        `least` if so.

        Times 2^-5 to 2^6 a number of E2M1 is one of e4m3, exactly. So the scales of a row's groups may be as far apart
        as these; of groups that are all zero they may be anything. This waits for the device.
        """
        most, fewest = self.scales.amax(-1), self.scales.amin(-1)
        far = (most.int() - fewest.int() > WIDEST).flatten().nonzero().squeeze(1)
        for begin in range(0, len(far), ROWS_AT_ONCE):
            rows = far[begin : begin + ROWS_AT_ONCE]
            scales = self.scales.flatten(0, -2)[rows].int()
            some = (self.data.flatten(0, -2)[rows].view(*scales.shape, GROUP // 2) & 0x77).amax(-1) > 0
            largest = torch.where(some, scales, 0).amax(-1)
            if bool((largest - torch.where(some, scales, 255).amin(-1) > WIDEST).any()):
                return self
            most.view(-1)[rows] = largest.to(torch.uint8)
        return replace(self, least=(most.int() - WIDEST).clamp(min=0).to(torch.uint8))

    def float(self) -> Tensor:
        """The matrix in fp32, exactly."""
        return e2m1(self.data) * e8m0(self.scales).repeat_interleave(GROUP, -1)


FourBits = GroupScaled | MicroScaled4
"""A matrix with two numbers in a byte."""


def e2m1(packed: Tensor) -> Tensor:
    """fp32 numbers of bytes (uint8 [.., K / 2]), two in each, the lower half first, [.., K]: a sign, two bits of
    exponent with bias 1, one of mantissa."""
    nibble = torch.stack([packed & 15, packed >> 4], -1).flatten(-2).int()
    exponent, mantissa = (nibble >> 1) & 3, nibble & 1
    # 2^(exponent - 1) times 1 or 1.5; without an exponent 0 or 0.5.
    size = torch.where(exponent > 0, (2 + mantissa) << (exponent - 1).clamp(min=0), mantissa)
    return torch.where(nibble > 7, -size, size).float() * 0.5


def e8m0(scales: Tensor) -> Tensor:
    """fp32 numbers of bytes (uint8) in E8M0, exactly; 2^-127 counts as 0."""
    return (scales.int() << 23).view(torch.float32)


class Scaled(Protocol):
    """A matrix that is stored in fewer bits, with scales, as the classes above are. Families of kernels have a
    table of those that they read; on a CPU any is multiplied by its numbers in fp32."""

    @property
    def data(self) -> Tensor:
        """The numbers, as they are stored."""
        ...

    @property
    def scales(self) -> Tensor:
        """Scales of the numbers."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix, [N, K] or [X, N, K]."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        ...

    def __getitem__(self, expert: int) -> Scaled:
        """The matrix of an expert."""
        ...

    def float(self) -> Tensor:
        """The matrix in fp32."""
        ...


Matrix = Tensor | Scaled
"""Matrix that kernels multiply with."""
