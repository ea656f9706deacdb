"""A prompt as it travels, waits and runs: its token ids packed once, and the keys of its pages hashed once, both shared
by every sequence that continues it.

A page's key is a 64-bit hash of the key of the page before it and of its own 64 token ids, so a key names a whole
prefix. Keys only find candidates: who shares pages compares their tokens, too.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import overload

from typing_extensions import override

from kernels.page import PAGE_TOKENS

TOKEN_BYTES = 4
PAGE_BYTES = TOKEN_BYTES * PAGE_TOKENS
KEY_BYTES = 8
ROOT_KEY = 0
"""Key that the first page of a prompt continues."""


def _packed(code: str, size: int, values: Sequence[int]) -> bytes:
    """Unsigned integers of `size` bytes, whose type code `array` knows, least significant byte first."""
    packed = array(code, values)
    assert packed.itemsize == size
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit unsigned integers. OverflowError for an id outside 0 ... 2^32 - 1."""
    return _packed("I", TOKEN_BYTES, tokens)


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse. ValueError if that is no whole number of ids."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def chain_key(parent: int, page: bytes) -> int:
    """64-bit key of a page of packed tokens that continues the page of key `parent`; equal in every process."""
    return int.from_bytes(blake2b(parent.to_bytes(8, "little") + page, digest_size=8).digest(), "little")


def chain_keys(parent: int, packed: bytes) -> list[int]:
    """Keys of all full pages of packed tokens that continue the page of key `parent`."""
    keys: list[int] = []
    key = parent
    for begin in range(0, len(packed) - PAGE_BYTES + 1, PAGE_BYTES):
        key = chain_key(key, packed[begin : begin + PAGE_BYTES])
        keys.append(key)
    return keys


def page_keys(tokens: Sequence[int]) -> list[int]:
    """Keys of all full pages of a prompt, first to last. A key names its whole prefix: a replica that reports key i
    (`EngineStats.prefix_keys`) holds pages 0 ... i, so look for the deepest key it has. OverflowError for an id outside
    0 ... 2^32 - 1."""
    return chain_keys(ROOT_KEY, pack_tokens(tokens))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Page keys as little-endian 64-bit unsigned integers: 8 bytes each, where msgpack and pickle take 9 to 11."""
    return _packed("Q", KEY_BYTES, keys)


def unpack_keys(packed: bytes) -> Sequence[int]:
    """The inverse. ValueError if that is no whole number of keys."""
    if len(packed) % KEY_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {KEY_BYTES}-byte keys")
    keys = array("Q", packed)
    if sys.byteorder == "big":
        keys.byteswap()
    return keys


class Prompt(Sequence[int]):
    """Token ids of one prompt, which never change. What is computed from them is computed once, when it is wanted."""

    def __init__(self, packed: bytes) -> None:
        """`packed`: as `pack_tokens` makes it. ValueError if that is no whole number of ids."""
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole number of {TOKEN_BYTES}-byte token ids")
        self.packed = packed
        self.length = len(packed) // TOKEN_BYTES
        """Tokens. Cheaper than `len`, for what happens to every row in every step."""

    @staticmethod
    def of(tokens: Sequence[int]) -> Prompt:
        """Make a prompt of ids; a prompt is given back as it is. OverflowError for an id outside 0 ... 2^32 - 1."""
        return tokens if isinstance(tokens, Prompt) else Prompt(pack_tokens(tokens))

    @cached_property
    def keys(self) -> list[int]:
        """Keys of its full pages, first to last, shared by all who read them: nobody may change the list."""
        return chain_keys(ROOT_KEY, self.packed)

    @cached_property
    def highest(self) -> int:
        """The highest id; -1 of an empty prompt."""
        return max(self._ids, default=-1)

    @cached_property
    def _ids(self) -> memoryview:
        if sys.byteorder == "little":
            return memoryview(self.packed).cast("I")
        swapped = array("I", self.packed)
        swapped.byteswap()
        return memoryview(swapped)

    @override
    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    @override
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return tuple(self._ids[index]) if isinstance(index, slice) else self._ids[index]

    @override
    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)
