"""INT8 with a scale for 64 input features: a format that nothing but this file knows.

`X.weight` has the numbers, `X.weight_scale` a scale in fp32 for 64 input features of a row.

Shape legend: X experts, N output features, K input features, G = K / 64 groups.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from workers.parallel.mesh import Mesh
from workers.weights.formats.format import Block, Format, Kept, StoredPart, check_scales, differences
from workers.weights.part import Part
from workers.weights.wanted import Shape, Wanted

GROUP = 64
CONFIG: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "group_size": GROUP}}
    },
}


def write(name: str, rows: int, columns: int, seed: int) -> tuple[dict[str, Tensor], np.ndarray]:
    """The tensors of a random matrix, and what they stand for, by numpy alone."""
    random = np.random.default_rng(seed)
    number = random.integers(-127, 128, (rows, columns)).astype(np.int8)
    scale = (random.uniform(0.5, 1.5, (rows, -(-columns // GROUP))) * 1e-3).astype(np.float32)
    meant = number.astype(np.float32) * np.repeat(scale, GROUP, axis=1)[:, :columns]
    return {name: torch.from_numpy(number), f"{name}_scale": torch.from_numpy(scale)}, meant


def spread(data: Tensor, scales: Tensor, begin: int = 0) -> Tensor:
    """fp32 [.., N, K] of numbers, the first of which is the `begin`-th of its group, and of scales [.., N, G]."""
    return data.float() * scales.repeat_interleave(GROUP, dim=-1)[..., begin : begin + data.shape[-1]]


class Int8Groups(Format):
    """INT8 in groups of 64. Without more its matrices are dequantized as they are loaded."""

    name = "INT8 in groups of 64"
    method = "compressed-tensors"
    published = "INT8 in groups of 64 (int-quantized)"
    suffixes: ClassVar = {"": "I8", "_scale": "F32"}

    def difference(self, given: Mapping[str, Any]) -> str:
        weights = given["config_groups"]["group_0"]["weights"]
        return differences(given, "", {"format": ("int-quantized",)}) or differences(
            weights, "weights.", {"num_bits": (8,), "group_size": (GROUP,)}
        )

    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return dtype_of(name) == "I8"

    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        scales = Wanted((rows, -(-columns // GROUP)), ("F32",))
        return {name: Wanted((rows, columns), ("I8",)), f"{name}_scale": scales}

    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        groups = slice(part.columns.start // GROUP, -(-part.columns.stop // GROUP))
        return part.files.read(part.name, (part.rows, part.columns)), part.scales("_scale", (part.rows, groups))

    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        return spread(data, scales, part.columns.start % GROUP)


@dataclass(frozen=True)
class Int8Scaled:
    """INT8 matrix for products on a CPU."""

    data: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.data.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    def __getitem__(self, expert: int) -> Int8Scaled:
        return Int8Scaled(self.data[expert], self.scales[expert])

    def float(self) -> Tensor:
        return spread(self.data, self.scales)


class KeptInt8Groups(Int8Groups):
    """INT8 in groups of 64 that a rank keeps as it is stored."""

    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        for part in (part for parts in stacks for part in parts):
            _, columns = part.index(mesh)
            if part.steps(mesh)[1] % GROUP or (columns.stop - columns.start) % GROUP:
                return Kept(note=f"a share begins or ends inside of a group of {GROUP}")
        return Kept()

    def room(
        self, outer: Shape, rows: int, columns: int, block: Block, empty: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        data = empty(*outer, rows, columns, dtype=torch.int8)
        return data, empty(*outer, rows, columns // GROUP, dtype=torch.float32)

    def data(self, part: StoredPart) -> Tensor:
        return self.covering(part)[0]

    def scales(self, part: StoredPart, block: Block) -> Tensor:
        return self.covering(part)[1]

    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        check_scales(self, data, scales, (*data.shape[:-1], data.shape[-1] // GROUP), (torch.int8, torch.float32))

    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Int8Scaled:
        assert scales is not None
        return Int8Scaled(data, scales)

    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        assert scales is not None
        return spread(data, scales)
