"""INT4 with a scale for 32 input features, as compressed-tensors packs it: `X.weight_packed`, eight numbers in an
int32, the first one lowest, `X.weight_scale`, and the shape of the matrix, `X.weight_shape`.

Shape legend: N output features, K input features, G = K / 32 groups.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import Block, StoredPart, differences, unchanged
from workers.weights.formats.grouped import GROUP, Grouped
from workers.weights.wanted import Wanted

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from kernels.matrix import Matrix

WORD: Final = 8
"""Numbers in an int32."""
INT4_PACKED: Final = "_packed"
INT4_SCALES: Final = "_scale"
INT4_SHAPE: Final = "_shape"
INT4_SCALES_END: Final = 32
"""Scales of groups are below, because kernels multiply by them in fp16 (`kernels/moe/four_bit_columns.py`)."""
MOST_WITH_INT4: Final = 8
"""Most tokens of the small-batch path in a model with INT4 experts: of 16 the general path is no slower
(`bench/decode_step.py --shape k2-slice`)."""
_PUBLISHED: Final = re.compile(r"\.experts\.\d+\.\w+_proj\.weight$")
"""Names of the matrices that Moonshot publishes in this format: the routed experts."""
_NOTHING: Final[tuple[Any, ...]] = (None, {}, [])


class Int4Groups(Grouped):
    """Two numbers per byte, [.., N, K / 2], the low half the even input feature, stored with 8 added; 32 neighbouring
    input features of a row share a bf16 scale, [.., N, K / 32]."""

    name: ClassVar = "INT4 in groups"
    method: ClassVar = "compressed-tensors"
    layout: ClassVar = "pack-quantized"
    published: ClassVar = (
        "INT4 in groups of 32, symmetric, without reordering, as compressed-tensors packs it (pack-quantized)"
    )
    suffixes: ClassVar = {INT4_PACKED: "I32", INT4_SCALES: "BF16", INT4_SHAPE: "I32"}
    most_few: ClassVar = MOST_WITH_INT4
    experts_alone: ClassVar = True
    packed: ClassVar = 2

    @override
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        import torch

        return torch.uint8, torch.bfloat16

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        groups = given.get("config_groups")
        if not isinstance(groups, dict) or len(groups) != 1:
            return "config_groups has not exactly one group"
        (group,) = groups.values()
        if not isinstance(group, dict):
            return "config_groups has not exactly one group"
        weights = group.get("weights")
        wanted = {
            "num_bits": (4,),
            "type": ("int",),
            "strategy": ("group",),
            "group_size": (GROUP,),
            "symmetric": (True,),
            "actorder": (None, False),
            "dynamic": (None, False),
        }
        form = (None, "pack-quantized")
        return (
            differences(weights if isinstance(weights, dict) else {}, "weights.", wanted)
            or differences(group, "", {"input_activations": _NOTHING, "output_activations": _NOTHING, "format": form})
            or unchanged(given)
        )

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return dtype_of(name) is None and dtype_of(name + INT4_PACKED) is not None

    @override
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        return {
            name + INT4_PACKED: Wanted((rows, -(-columns // WORD)), ("I32",)),
            name + INT4_SCALES: Wanted((rows, -(-columns // GROUP)), ("BF16",)),
            name + INT4_SHAPE: Wanted((2,), ("I32", "I64")),
        }

    @override
    def publishes(self, name: str) -> bool:
        return _PUBLISHED.search(name) is not None

    @override
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        """Whole groups, as far as there are words."""
        begin = part.columns.start // GROUP * (GROUP // WORD)
        return _words(part, slice(begin, -(-part.columns.stop // WORD))), self.scales(part, None)

    @override
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        begin = part.columns.start % GROUP
        return _numbers(data, scales)[:, begin : begin + part.columns.stop - part.columns.start]

    @override
    def data(self, part: StoredPart) -> Tensor:
        """The words are little-endian, so that their bytes are in order."""
        return _words(part, slice(part.columns.start // WORD, -(-part.columns.stop // WORD)))

    @override
    def scales(self, part: StoredPart, block: Block) -> Tensor:
        from workers.weights.checkpoint import WeightsError

        groups = slice(part.columns.start // GROUP, -(-part.columns.stop // GROUP))
        scales = part.scales(INT4_SCALES, (part.rows, groups))
        if scales.numel() and float(scales.abs().max()) >= INT4_SCALES_END:
            raise WeightsError(
                f"{part.name}{INT4_SCALES} has scales of {INT4_SCALES_END} and more, times which numbers of INT4 are "
                "too large for the fp16 in which GPUs multiply them"
            )
        return scales

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        from kernels.matrix import GroupScaled

        assert scales is not None
        return GroupScaled(data, scales)

    @override
    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        assert scales is not None
        return _numbers(data, scales)


def _words(part: StoredPart, words: slice) -> Tensor:
    import torch

    from workers.weights.checkpoint import WeightsError

    told = part.files.read(part.name + INT4_SHAPE, (slice(0, 2),)).tolist()
    if told != list(part.shape):
        raise WeightsError(f"{part.name}{INT4_SHAPE} says {told}, config.json wants {list(part.shape)}")
    return part.files.read(part.name + INT4_PACKED, (part.rows, words)).view(torch.uint8)


def _numbers(data: Tensor, scales: Tensor) -> Tensor:
    """fp32 [.., N, K] of bytes [.., N, K / 2], the low half the even input feature, and scales [.., N, G]."""
    import torch

    number = torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).float() - 8
    return number * scales.float().repeat_interleave(GROUP, dim=-1)[..., : number.shape[-1]]


INT4_GROUPS: Final = Int4Groups()
