"""Activations in FP8 (W8A8) on the general path: which rows are rounded, where they are kept, and products of them with
weights in FP8 blocks. `dependent`: the launch is (`kernels.runtime.dependent`).

Shape legend: T tokens, R tokens and padding, E hidden features, F output features, G groups of features that share a
scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from kernels.linear import PIECE, padded_scales, w8a8_linear, w8a8_pieces
from kernels.matrix import BlockScaled
from kernels.quantize import GROUP, Fp8Rows, quantize
from workers.memory.scratch import Scratch

MIN_TOKENS_W8A8: Final = 9
"""Fewest tokens that are rounded to FP8 for products with FP8 weights, where that is allowed: the fewest behind the
small-batch path (`workers.weights.formats.fp8_blocks.MOST_FP8`), so that no number of tokens between has kernels of its
own. Of 12 tokens to dequantize first takes 1.5 to 4 times as long (`bench/fp8_linear.py` on one H200)."""
MOST_ROUNDED_BEFORE: Final = 256
"""Most tokens whose scales are kept once more, for experts, which want those of a token side by side; of more, experts
round the tokens again."""
MIN_TOKENS_W8A8_EXPERTS: Final = 9
"""The same for products with experts. Of 32 tokens of DeepSeek-V3 experts that widen their weights take 1.05 times as
long, of 384 1.6 times, of 2048 three times (`bench/moe.py --model v3+shared --format fp8` on one H200)."""


@dataclass(frozen=True)
class RoundedRows:
    """A norm, and what products with FP8 weights read of it: whoever makes the norm rounds it in the same launch."""

    x_TE: Tensor
    fp8: Fp8Rows


def allocate_fp8(tokens: int, features: int, scratch: Scratch) -> Fp8Rows:
    """Memory for rounded tokens, whole pieces of them."""
    rows = -(-tokens // PIECE) * PIECE
    number_RK = scratch.empty(rows, features, dtype=torch.float8_e4m3fn)
    return Fp8Rows(number_RK, scratch.empty(features // GROUP, rows, dtype=torch.float32).t())


def round_rows(x: RoundedRows, *, dependent: bool) -> None:
    """Round a norm that its maker has not."""
    into = x.fp8.of(x.x_TE.shape[0])
    quantize(x.x_TE, *into, by_token_TG=x.fp8.by_token_TG, dependent=dependent)


def in_fp8(
    x: Tensor | RoundedRows, scratch: Scratch, rounding: Callable[..., None] = quantize, *, dependent: bool
) -> Fp8Rows:
    """What `rounding` makes of `x`, unless it has been rounded already. Rows behind the last token hold whatever is
    there."""
    if isinstance(x, RoundedRows):
        return x.fp8
    tokens, features = x.shape
    fp8 = allocate_fp8(tokens, features // (1 if rounding is quantize else 2), scratch)
    rounding(x, *fp8.of(tokens), dependent=dependent)
    return fp8


def linear_of_fp8(x: Fp8Rows, weight_FE: BlockScaled, out_TF: Tensor, scratch: Scratch, *, dependent: bool) -> None:
    """out = x · weight^T."""
    (tokens, outputs), rows = out_TF.shape, x.number_RK.shape[0]
    pieces = w8a8_pieces(tokens, weight_FE)
    if pieces is not None:
        piece_PTB = scratch.empty(*pieces, dtype=torch.float32)
        w8a8_linear(x.number_RK, x.scale_RG, weight_FE, out_TF, pieces=piece_PTB, dependent=dependent)
        return
    sizes = padded_scales(weight_FE)
    padded = None if sizes is None else scratch.empty(*sizes, dtype=torch.float32)
    out_RF = out_TF if rows == tokens else scratch.empty(rows, outputs, dtype=out_TF.dtype)
    w8a8_linear(x.number_RK, x.scale_RG, weight_FE, out_RF, padded)
    if rows > tokens:
        out_TF.copy_(out_RF[:tokens])


def gathered(x: RoundedRows) -> tuple[Tensor, Tensor] | None:
    """What experts gather of tokens that have been rounded; None where they round them themselves."""
    if x.fp8.by_token_TG is None:
        return None
    return x.fp8.of(x.x_TE.shape[0])[0], x.fp8.by_token_TG
