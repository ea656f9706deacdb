"""Products of activations and weights that are both in FP8, on the tensor cores that multiply such numbers.

Written for torch 2.11 to 2.13. What multiplies with scales for 128 numbers, and writes into memory that is given, is
private to it. Without it, and on other GPUs than Hopper's, the callers dequantize the weights, as they do for sizes
that it does not take.

Shape legend: T tokens, E input features, F output features, G = E / 128 groups of input features.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import stream_k_launch
from kernels.matrix import BlockScaled
from kernels.private_api import PrivateApi
from kernels.runtime.hopper import is_hopper

BLOCK: Final = 128
"""Rows and features of a block of weights, features of a group of activations."""
PIECE: Final = 4
"""Scales in 16 bytes: the number of tokens is a multiple of it, as is that of the scales of a row of blocks."""
_MULTIPLIED: Final = PrivateApi(
    "torch",
    (
        "torch.ops.aten._scaled_mm_v2.out",
        "torch.nn.functional.ScalingType.BlockWise1x128",
        "torch.nn.functional.ScalingType.BlockWise128x128",
    ),
    "weights in FP8 are dequantized before each product of many tokens, which takes about twice as long",
)


@cache
def supports_w8a8(device: torch.device) -> bool:
    """Whether `w8a8_linear` runs on a GPU: on Hopper's, with CUDA 12.9 and above, if a small product is what it
    should be. That is tried once, before anything is captured."""
    if not is_hopper(device):
        return False
    version = tuple(int(number) for number in (torch.version.cuda or "0.0").split(".")[:2])
    return version >= (12, 9) and _MULTIPLIED.there() and _right(device)


def fits_w8a8(weight_FE: BlockScaled) -> bool:
    """Whether `w8a8_linear` takes a matrix: blocks of 128 x 128, of which none is cut in the direction that is
    summed, and 16 output features at a time."""
    features, depth = weight_FE.shape
    return (weight_FE.rows, weight_FE.features) == (BLOCK, BLOCK) and depth % BLOCK == 0 and features % 16 == 0


def padded_scales(weight_FE: BlockScaled) -> tuple[int, int] | None:
    """Sizes of the memory that `w8a8_linear` needs for a copy of the weight's scales: those of a row of blocks, too,
    have to begin at multiples of 16 bytes. None where they do."""
    rows, columns = weight_FE.scales.shape
    return None if columns % PIECE == 0 else (rows, -(-columns // PIECE) * PIECE)


def w8a8_pieces(tokens: int, weight_FE: BlockScaled) -> tuple[int, int, int] | None:
    """Sizes of the memory that `w8a8_linear` needs for parts of the sums of so many tokens, whose weights it streams
    with kernels of its own: up to 64 on a Hopper GPU, where the time in which weights are read decides
    (`stream_k_launch.takes`). None where it leaves them to torch."""
    few = stream_k_launch.takes(tokens, weight_FE.shape[1]) and is_hopper(weight_FE.device)
    if not few or not fits_w8a8(weight_FE) or not weight_FE.scales.is_contiguous():
        return None
    return stream_k_launch.pieces(tokens, weight_FE)


def w8a8_linear(
    x_TE: Tensor,
    scale_TG: Tensor,
    weight_FE: BlockScaled,
    out_TF: Tensor,
    padded: Tensor | None = None,
    *,
    pieces: Tensor | None = None,
    dependent: bool = False,
) -> None:
    """out = x · weight^T of activations as `kernels.quantize` leaves them: every 128 products are summed by the tensor
    cores, multiplied by the scales of both, and added up in fp32; then rounded once to bf16.

    `x_TE` is float8_e4m3fn and contiguous, as is `out_TF`, which is bf16; columns of `scale_TG` (fp32) are contiguous
    and lie side by side. `padded` is fp32 memory of the sizes that `padded_scales` says; or `pieces` of those that
    `w8a8_pieces` says, with which `out_TF` may have fewer rows than `x_TE` and `dependent` launches dependently. A
    token's result may depend on how many others there are, but not on what they hold. ValueError for a matrix that
    `fits_w8a8` refuses, tokens that are no multiple of PIECE, or other memory.
    """
    if not fits_w8a8(weight_FE) or x_TE.shape[0] % PIECE:
        raise ValueError(f"{tuple(x_TE.shape)} rounded activations are not multiplied with {weight_FE.shape}")
    if scale_TG.stride() != (1, x_TE.shape[0]) or not out_TF.is_contiguous() or not x_TE.is_contiguous():
        raise ValueError("scales lie column by column, activations and results row by row")
    if pieces is not None:
        if tuple(pieces.shape) != w8a8_pieces(out_TF.shape[0], weight_FE):
            raise ValueError(f"pieces {tuple(pieces.shape)} are not those of {out_TF.shape[0]} tokens")
        stream_k_launch.stream_k(x_TE, scale_TG, weight_FE, out_TF, pieces, dependent=dependent)
        return
    if (None if padded is None else tuple(padded.shape)) != padded_scales(weight_FE):
        raise ValueError(f"a copy of scales {tuple(weight_FE.scales.shape)} has the sizes {padded_scales(weight_FE)}")
    scales = weight_FE.scales
    if padded is not None:
        padded.zero_()
        padded[:, : scales.shape[1]].copy_(scales)
        scales = padded
    if not x_TE.is_cuda:
        w8a8_reference(x_TE, scale_TG, weight_FE, out_TF)
        return
    torch.ops.aten._scaled_mm_v2.out(
        x_TE,
        weight_FE.data.t(),
        [scale_TG],
        [F.ScalingType.BlockWise1x128.value],
        [],
        [scales.t()],
        [F.ScalingType.BlockWise128x128.value],
        [],
        None,
        out_TF.dtype,
        out=out_TF,
    )


def w8a8_reference(x_TE: Tensor, scale_TG: Tensor, weight_FE: BlockScaled, out_TF: Tensor) -> None:
    """`w8a8_linear` in plain torch."""
    sum_TF = torch.zeros(out_TF.shape)
    scale_FG = weight_FE.scales.repeat_interleave(BLOCK, 0)[: weight_FE.shape[0]]
    for group in range(scale_TG.shape[1]):
        features = slice(group * BLOCK, (group + 1) * BLOCK)
        part_TF = x_TE[:, features].float() @ weight_FE.data[:, features].float().t()
        sum_TF += part_TF * scale_TG[:, group, None] * scale_FG[:, group]
    out_TF.copy_(sum_TF)


def _right(device: torch.device) -> bool:
    """Whether a product is what the reference makes of it: scales could be taken in another way one day. It has scales
    that are padded, and a block that is cut."""
    random = torch.Generator().manual_seed(0)
    rows, features, tokens = 336, 640, 12
    x_TE, weight_FE = (torch.randn(n, features, generator=random).to(torch.float8_e4m3fn) for n in (tokens, rows))
    scale_GT, scale_BG = (torch.rand(sizes, generator=random) + 0.5 for sizes in ((5, tokens), (3, 5)))
    want_TF = torch.empty(tokens, rows, dtype=torch.bfloat16)
    w8a8_reference(x_TE, scale_GT.t(), BlockScaled(weight_FE, scale_BG), want_TF)
    out_TF, padded = torch.zeros_like(want_TF, device=device), torch.empty(3, 8, device=device)
    weight = BlockScaled(weight_FE.to(device), scale_BG.to(device))
    try:
        w8a8_linear(x_TE.to(device), scale_GT.to(device).t(), weight, out_TF, padded)
    except (RuntimeError, TypeError, ValueError) as error:
        _MULTIPLIED.lost(f"product with scales for 128 numbers that takes these: {error}")
        return False
    if not bool((out_TF.cpu() - want_TF).float().norm() < 1e-2 * want_TF.float().norm()):
        _MULTIPLIED.lost("product with scales for 128 numbers that is right")
        return False
    return True
