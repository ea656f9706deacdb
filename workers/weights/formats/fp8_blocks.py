"""FP8 with a scale for each block, as DeepSeek publishes it: `X.weight` in e4m3, and a scale for each block of 128 x
128, `X.weight_scale_inv`. It is called an inverse, and numbers are multiplied by it all the same. One scale for a whole
matrix is that of each of its blocks. DeepSeek V4 stores scales as exponents of 2 (E8M0), which are kept as the fp32
numbers that they are.

Shape legend: N output features, K input features, B / C rows and columns of scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from math import gcd
from typing import TYPE_CHECKING, Any, ClassVar, Final

from typing_extensions import override

from workers.weights.formats.format import (
    Block,
    Format,
    Kept,
    StoredPart,
    check_scales,
    differences,
    unchanged,
)
from workers.weights.wanted import BLOCK, FP8_DTYPE, FP8_SCALES, MX_DTYPES, MX_SCALES, Shape, Wanted

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.matrix import Matrix
    from workers.parallel.mesh import Mesh
    from workers.weights.part import Part

LEAST_BLOCK: Final = (16, 64)
"""Rows and columns of the smallest blocks that kernels read: see `kernels.matrix`."""
MOST_FP8: Final = 8
"""Most tokens of the small-batch path in a model with FP8 weights: its kernels' tiles have 8 columns, and with more
tokens the general path is faster (`bench/decode_step.py --shape v3-slice`)."""
_PUBLISHED: Final = re.compile(r"((?<!\.eh)(?<!\.weights)_proj(_with_mqa)?|\.indexer\.w(q_b|k))\.weight$")
"""Every projection but that of the draft layer's inputs and of an indexer's weights."""


class Fp8Blocks(Format):
    """e4m3 numbers [.., N, K]; a block of rows and columns shares an fp32 scale. Blocks at the end may be cut."""

    name: ClassVar = "FP8 in blocks"
    method: ClassVar = "fp8"
    published: ClassVar = "FP8 (e4m3) in blocks of 128 x 128, as DeepSeek publishes it, or with one scale for a matrix"
    suffixes: ClassVar = {"": FP8_DTYPE, FP8_SCALES: "F32"}
    most_few: ClassVar = MOST_FP8
    w8a8: ClassVar = True

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        supported = {
            "weight_block_size": (None, [BLOCK, BLOCK]),
            "fmt": (None, "e4m3"),
            "activation_scheme": (None, "static", "dynamic"),
        }
        return differences(given, "", supported)

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return dtype_of(name) == FP8_DTYPE and dtype_of(name + MX_SCALES) not in MX_DTYPES

    @override
    def tensors(self, name: str, rows: int, columns: int) -> dict[str, Wanted]:
        blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
        return {
            name: Wanted((rows, columns), (FP8_DTYPE,)),
            name + FP8_SCALES: Wanted(blocks, ("F32", "BF16", "F16", "F8_E8M0")),
        }

    @override
    def publishes(self, name: str) -> bool:
        return _PUBLISHED.search(name) is not None

    @override
    def covering(self, part: StoredPart) -> tuple[Tensor, Tensor]:
        return self.data(part), _published(part)

    @override
    def numbers(self, part: StoredPart, data: Tensor, scales: Tensor) -> Tensor:
        import torch

        row_N, column_K = (
            torch.arange(own.start, own.stop, device=data.device) // BLOCK - own.start // BLOCK
            for own in (part.rows, part.columns)
        )
        return _numbers(data, scales, row_N, column_K)

    @override
    def kept(self, stacks: Sequence[Sequence[Part]], mesh: Mesh) -> Kept:
        """Keep the matrix in blocks so small that no seam and no share of a rank begins inside of one."""
        from workers.weights.part import sharing

        rows = columns = BLOCK
        for parts in stacks:
            place = 0
            for part in parts:
                if part.rope is not None and not part.rope.stay_within(BLOCK, part.rows):
                    return Kept(note=f"rows that change places lie in several {BLOCK} x {BLOCK} blocks")
                row_step, column_step = part.steps(mesh)
                rows, columns = gcd(rows, place, row_step), gcd(columns, column_step)
                own, _ = part.index(mesh)
                place += own.stop - own.start
        for what, size, least in zip(("rows", "columns"), (rows, columns), LEAST_BLOCK, strict=True):
            if size < least:
                ranks = sharing(stacks, mesh)
                return Kept(note=f"on {ranks} ranks a share's {what} begin inside of a {BLOCK} x {BLOCK} block")
        return Kept((rows, columns))

    @override
    def room(
        self, outer: Shape, rows: int, columns: int, block: Block, empty: Callable[..., Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        import torch

        assert block is not None
        blocks = [-(-size // side) for size, side in zip((rows, columns), block, strict=True)]
        data = empty(*outer, rows, columns, dtype=torch.float8_e4m3fn)
        return data, empty(*outer, *blocks, dtype=torch.float32)

    @override
    def data(self, part: StoredPart) -> Tensor:
        return e4m3_of(part)

    @override
    def scales(self, part: StoredPart, block: Block) -> Tensor:
        """Return the scales of the part. Where blocks are smaller than the published ones, scales are repeated."""
        import torch

        assert block is not None
        published = _published(part)
        for dim, (own, side) in enumerate(zip((part.rows, part.columns), block, strict=True)):
            firsts = torch.arange(own.start, own.stop, side)
            published = published.index_select(dim, firsts // BLOCK - own.start // BLOCK)
        return published.float()

    @override
    def check(self, data: Tensor, scales: Tensor | None, block: Block) -> None:
        """`block`: powers of two."""
        import torch

        if block is None or any(size & (size - 1) or size < 1 for size in block):
            raise ValueError(f"FP8 weights have blocks whose sides are powers of two, not {block}")
        rows, columns = data.shape[-2:] if data.dim() > 1 else (0, 0)
        wanted = (*data.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
        check_scales(self, data, scales, wanted, (torch.float8_e4m3fn, torch.float32))

    @override
    def scaled_rows(self, block: Block) -> int:
        assert block is not None
        return block[0]

    @override
    def matrix(self, data: Tensor, scales: Tensor | None, block: Block) -> Matrix:
        from kernels.matrix import BlockScaled

        assert scales is not None
        assert block is not None
        return BlockScaled(data, scales, *block)

    @override
    def dequantized(self, data: Tensor, scales: Tensor | None, block: Block) -> Tensor:
        import torch

        assert scales is not None
        assert block is not None
        row_N, column_K = (
            torch.arange(size, device=data.device) // side for size, side in zip(data.shape[-2:], block, strict=True)
        )
        return _numbers(data, scales, row_N, column_K)


def e4m3_of(part: StoredPart) -> Tensor:
    """Read a part of a matrix in e4m3. `WeightsError` for NaN, which kernels take for a number."""
    import torch

    from workers.weights.checkpoint import WeightsError

    data = part.files.read(part.name, (part.rows, part.columns))
    byte = data.view(torch.uint8)
    # There are two: one is the largest byte without a sign, the other the largest with one. So looking for them is as
    # fast as copying.
    if byte.numel() and (int(byte.max()) == 0xFF or int(byte.view(torch.int8).max()) == 0x7F):
        raise WeightsError(f"{part.name} holds NaN; weights are numbers. Is the download complete?")
    return data


def _published(part: StoredPart) -> Tensor:
    """The scales of every published block that this part has a number of."""
    rows, columns = (slice(own.start // BLOCK, -(-own.stop // BLOCK)) for own in (part.rows, part.columns))
    return part.scales(FP8_SCALES, (rows, columns))


def _numbers(data: Tensor, scales: Tensor, row_N: Tensor, column_K: Tensor) -> Tensor:
    """fp32 [.., N, K] of e4m3 numbers [.., N, K] and scales [.., B, C]: number times scale, where `row_N` and
    `column_K` (int64) say whose."""
    return data.float() * scales.float().index_select(-2, row_N).index_select(-1, column_K)


class Fp8CompressedTensors(Fp8Blocks):
    """Matrices that compressed-tensors stores in these blocks, or with one scale each. Their tensors are shown under
    the names that DeepSeek has for them (`workers.weights.published`). What it says of the cache is left to who
    serves, and what `ignore` says of single matrices their tensors say, too."""

    method: ClassVar = "compressed-tensors"
    layout: ClassVar = "float-quantized"
    published: ClassVar = "FP8 (e4m3) in either way, as compressed-tensors stores it (float-quantized)"

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        groups = given.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            return "config_groups has no group"
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, dict) else None
            weights = weights if isinstance(weights, dict) else {}
            block = ([BLOCK, BLOCK],) if weights.get("strategy") == "block" else (None,)
            wanted = {
                "num_bits": (8,),
                "type": ("float",),
                "strategy": ("tensor", "block"),
                "block_structure": block,
                "symmetric": (None, True),
                "dynamic": (None, False),
            }
            if found := differences(weights, "weights.", wanted):
                return found
        return unchanged(given)

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return False


class Fp8ModelOpt(Fp8Blocks):
    """Matrices that modelopt stores with one scale each, `X.weight_scale`, shown as those of compressed-tensors are.
    What it says of the cache is left to who serves."""

    method: ClassVar = "modelopt"
    algorithm: ClassVar = "FP8"
    published: ClassVar = "FP8 (e4m3) with one scale for a matrix, as modelopt stores it"

    @override
    def difference(self, given: Mapping[str, Any]) -> str:
        groups = given.get("config_groups")
        for group in groups.values() if isinstance(groups, dict) else ():
            weights = group.get("weights") if isinstance(group, dict) else None
            wanted = {
                "num_bits": (8,),
                "type": ("float",),
                "strategy": (None, "tensor"),
                "group_size": (None,),
                "block_structure": (None,),
                "dynamic": (None, False),
            }
            if found := differences(weights if isinstance(weights, dict) else {}, "weights.", wanted):
                return found
        return differences(given, "", {"group_size": (None,)})

    @override
    def stores(self, name: str, dtype_of: Callable[[str], str | None]) -> bool:
        return False


FP8_BLOCKS: Final = Fp8Blocks()
FP8_COMPRESSED_TENSORS: Final = Fp8CompressedTensors()
FP8_MODELOPT: Final = Fp8ModelOpt()
