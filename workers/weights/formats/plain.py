"""Numbers that are stored as they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, Format, Kept, StoredPart
from workers.weights.wanted import Shape, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.matrix import Matrix
    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part


class Plain(Format):
    """Plain numbers in the dtype of the activations or, where nothing may be rounded, in fp32."""

    name: ClassVar = "plain"
    suffixes: ClassVar = {"": "BF16"}
    most_few: ClassVar = sys.maxsize

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return True

    @override
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        return {name: Wanted((rows, columns))}

    @override
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("plain numbers are read as they are")

    @override
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        raise NotImplementedError("plain numbers are read as they are")

    @override
    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        return Kept()

    @override
    def room(
        self, outer: Shape, rows: int, columns: int, block: Block, empty: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        return empty(*outer, rows, columns), None

    @override
    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        if scales is not None or block is not None:
            raise ValueError("plain weights have no scales")

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        return data

    @override
    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        return data


PLAIN: Final = Plain()
