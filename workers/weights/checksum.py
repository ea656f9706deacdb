"""Sum over memory that any change of a single byte changes, computed where the memory lies."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_ROW: Final = 1 << 14
"""Numbers that become one."""
_AT_ONCE: Final = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Numbers that are multiplied at once: what fits a core's cache, and memory that a GPU can spare."""


def checksum(byte_B: Tensor) -> int:
    """The sum of uint8 [B], whose B is a multiple of 8: a number of 64 bits.

    Eight bytes are a number x_i. The sum of a row is that of x_i * f_i modulo 2^64, with odd factors f_i that look
    random; the sums of rows are summed in the same way. An odd factor loses nothing, so one number that differs always
    changes the sum, and several, or numbers that have changed places, practically always do.
    """
    found = byte_B.view(torch.int64)
    factor_F = _factors(found.device)
    while True:
        found = _folded(found, factor_F)
        if len(found) == 1:
            return int(found.item())


def _factors(device: torch.device) -> Tensor:
    """Odd numbers without a pattern (the output function of splitmix64), the same everywhere."""
    x = torch.arange(1, _ROW + 1, dtype=torch.int64, device=device) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x | 1


def _folded(x: Tensor, factor_F: Tensor) -> Tensor:
    rows, rest = divmod(len(x), _ROW)
    out = torch.empty(rows + (rest > 0), dtype=torch.int64, device=x.device)
    step = _AT_ONCE[x.device.type] // _ROW
    whole = x[: rows * _ROW].view(rows, _ROW)
    for begin in range(0, rows, step):
        torch.sum(whole[begin : begin + step] * factor_F, 1, out=out[begin : min(begin + step, rows)])
    if rest:
        out[rows] = (x[rows * _ROW :] * factor_F[:rest]).sum()
    return out
