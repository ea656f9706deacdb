"""Values of 32 lanes: numpy vectors, one element a lane, and how PTX's types are kept in them."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

LANES = 32
Lanes = NDArray[Any]
Type = type[Any]

TYPES: dict[str, Type] = {
    "pred": np.bool_,
    "f16": np.float16,
    "bf16": np.uint16,  # its bits: see `widen` and `narrow`
    "bf16x2": np.uint32,
    "f16x2": np.uint32,
    "s16x2": np.uint32,
    "f32": np.float32,
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}").type for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}").type for bits in (8, 16, 32, 64)},
}
BITS: dict[int, Type] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
"""The unsigned integer of so many bytes."""


size: Callable[[Type], int] = cache(lambda kind: np.dtype(kind).itemsize)  # type: ignore[assignment]
"""Bytes of a value."""


def all_of(lanes: Lanes) -> bool:
    """Whether bools are all true. Quicker than numpy says it of so few."""
    return b"\0" not in lanes.tobytes()


_ONE, _HALF, _SIXTEEN, _NAN = np.uint32(1), np.uint32(0x7FFF), np.uint32(16), np.uint16(0x7FFF)


def any_of(lanes: Lanes) -> bool:
    """Whether one of some bools is true."""
    return b"\1" in lanes.tobytes()


def widen(bits: Lanes) -> Lanes:
    """bfloat16 to float32."""
    return (bits.astype(np.uint32) << _SIXTEEN).view(np.float32)


def narrow(x: Lanes) -> Lanes:
    """float32 to bfloat16, to the nearest, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = bits >> _SIXTEEN
    rounded &= _ONE
    rounded += bits
    rounded += _HALF
    rounded >>= _SIXTEEN
    found, unordered = rounded.astype(np.uint16), x != x
    if any_of(unordered):
        found[unordered] = _NAN
    return found


def reinterpret(value: Lanes, kind: Type) -> Lanes:
    """A register's bits as another type: truncated or, with zeros, extended where sizes differ."""
    own = value.dtype.type
    if own is kind or own is np.bool_ or kind is np.bool_:
        return value
    if value.itemsize != size(kind):
        value = value.astype(BITS[size(kind)])
    return value.view(kind)


def halves(words: Lanes, bfloat: bool) -> Lanes:
    """[lanes, 2] float32: the two 16-bit floats in words, the lower first."""
    bits = np.ascontiguousarray(words).view(np.uint16).reshape(-1, 2)
    return widen(bits) if bfloat else bits.view(np.float16).astype(np.float32)


def wide_bytes(numbers: Lanes) -> Lanes:
    """e4m3 to float32."""
    return torch.from_numpy(numbers.copy()).view(torch.float8_e4m3fn).float().numpy()


def bytes_of(x: Lanes) -> Lanes:
    """float32 to e4m3, to the nearest, ties to even; what is too large becomes the largest number."""
    finite = torch.from_numpy(np.array(x, np.float32)).clamp(-448, 448)
    return finite.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def packed(parts: Lanes, kind: Type) -> Lanes:
    """[lanes, n] small values as lanes of one large one, the first lowest."""
    return np.ascontiguousarray(parts).view(kind).reshape(len(parts))


def constant(text: str, kind: Type) -> Lanes:
    """A literal in all lanes: an integer, 0f and eight digits for float32's bits, true or false.

    Raises:
        ValueError: `text` is no literal.
    """
    return _constant(text, np.dtype(kind).str)


@cache
def _constant(text: str, kind: str) -> Lanes:
    of = np.dtype(kind)
    if of == np.float32 and "." in text:
        return np.full(LANES, float(text), of)
    if text in ("true", "false"):
        number = int(text == "true")
    else:
        number = int(text[2:], 16) if text.startswith("0f") else int(text.rstrip("U"), 0)
    if of == np.bool_:
        return np.full(LANES, bool(number))
    return np.full(LANES, number & ((1 << 8 * of.itemsize) - 1), BITS[of.itemsize]).view(of)
