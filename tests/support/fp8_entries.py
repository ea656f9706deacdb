"""FP8 entries of the latent cache, written down once more, apart from the kernels: the oracle of those who write and
read them.

Shape legend: T entries, L latent features, C = latent and roped features, E bytes of an entry.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

GROUP = 128


def encoded(entry_TC: Tensor, latent: int) -> Tensor:
    """The bytes [T, E] that stand for plain entries; zeros between and behind the parts."""
    codes, scales = [], []
    for group in entry_TC[:, :latent].float().split(GROUP, 1):
        largest = group.abs().amax(1, keepdim=True)
        scale = torch.where(largest < 2.0**-100, torch.ones_like(largest), largest / 448)
        codes.append((group / scale).to(torch.float8_e4m3fn).view(torch.uint8))
        scales.append(scale.view(torch.uint8))
    numbers = torch.cat(codes, 1)
    numbers = F.pad(numbers, (0, -latent % 4))
    bytes = torch.cat([numbers, *scales, entry_TC[:, latent:].contiguous().view(torch.uint8)], 1)
    return F.pad(bytes, (0, -bytes.shape[1] % 16))


def used(latent: int, rope: int, dtype: torch.dtype) -> int:
    """Bytes of an entry that mean something."""
    return -(-latent // 4) * 4 + 4 * -(-latent // GROUP) + rope * dtype.itemsize


def numbers(entry_TE: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Return the numbers that bytes stand for, in float64, no number rounded."""
    scales = -(-latent // 4) * 4
    keys = used(latent, rope, dtype) - rope * dtype.itemsize
    scale = entry_TE[:, scales:keys].clone().view(torch.float32).double().repeat_interleave(GROUP, 1)
    code = entry_TE[:, :latent].contiguous().view(torch.float8_e4m3fn).double()
    key = entry_TE[:, keys : keys + rope * dtype.itemsize].clone().view(dtype).double()
    return torch.cat([code * scale[:, :latent], key], 1)


def read(entry_TE: Tensor, latent: int, rope: int, dtype: torch.dtype) -> Tensor:
    """Return what bytes are read as, [T, C]: rounded to fp32 and to `dtype`."""
    return numbers(entry_TE, latent, rope, dtype).float().to(dtype)


def agree(got_TE: Tensor, want_TE: Tensor, latent: int, rope: int, dtype: torch.dtype) -> bool:
    """Whether the bytes [T, E] that a kernel wrote are those that another one's plain entries are rounded to.

    Interpreted kernels compute the same bits. Compiled apart they may round a latent differently now and then, of which
    its code, or the scale of its group, is the next one.
    """
    got, want = got_TE.cpu()[:, : used(latent, rope, dtype)], want_TE[:, : used(latent, rope, dtype)]
    if not got_TE.is_cuda:
        return torch.equal(got, want)
    ours, theirs = (numbers(bytes, latent, rope, dtype) for bytes in (got, want))
    off = (ours - theirs).abs()
    unequal = off > 2**-7 * theirs.abs()
    return bool((off <= 2**-2.5 * theirs.abs() + 1e-2).all()) and float(unequal.double().mean()) < 1e-2
