"""A prompt as it travels, waits and runs: its token ids packed once, and the keys of its pages hashed once, both shared
by every sequence that continues it.

A page's key is a 128-bit hash of the key of the page before it and of its own 64 token ids, so a key names a whole
prefix. The first page of a prompt continues a root, which names the model that computes it (`workers.rank.root`) and,
where there is a salt, who may share its pages (`salted_root`). Keys only find candidates: who shares pages compares
their tokens, too.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from hashlib import blake2b
from typing import overload

from typing_extensions import override

from kernels.page import PAGE_TOKENS

TOKEN_BYTES = 4
PAGE_BYTES = TOKEN_BYTES * PAGE_TOKENS
KEY_BYTES = 16
REPORTED_BYTES = 8
"""Bytes of a key that routers are told: its first ones. Two pages that share them cost a router a wrong guess."""
NO_ROOT = bytes(KEY_BYTES)
"""Root of keys that leave no process and name no model."""


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as little-endian 32-bit unsigned integers. OverflowError for an id outside 0 ... 2^32 - 1."""
    packed = array("I", tokens)
    assert packed.itemsize == TOKEN_BYTES
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(packed: bytes) -> array[int]:
    """The inverse. ValueError if that is no whole number of ids."""
    tokens = array("I", packed)
    if sys.byteorder == "big":
        tokens.byteswap()
    return tokens


def salted_root(root: bytes, salt: bytes) -> bytes:
    """Root of the prompts that share pages only with those of equal `salt`; `root` itself where that is empty."""
    return blake2b(salt, digest_size=KEY_BYTES, salt=root).digest() if salt else root


def chain_key(parent: bytes, page: bytes) -> bytes:
    """128-bit key of a page of packed tokens that continues the page of key `parent`; equal in every process."""
    # As BLAKE2's salt the parent takes no room in the message, so that a page is two blocks of it instead of three.
    return blake2b(page, digest_size=KEY_BYTES, salt=parent).digest()


def chain_keys(parent: bytes, packed: bytes) -> list[bytes]:
    """Keys of all full pages of packed tokens that continue the page of key `parent`."""
    keys: list[bytes] = []
    key = parent
    for begin in range(0, len(packed) - PAGE_BYTES + 1, PAGE_BYTES):
        key = chain_key(key, packed[begin : begin + PAGE_BYTES])
        keys.append(key)
    return keys


def page_keys(tokens: Sequence[int], root: bytes = NO_ROOT) -> list[bytes]:
    """Keys of all full pages of a prompt, first to last. A key names its whole prefix: a replica that reports key i
    (`EngineStats.prefix_keys`) holds pages 0 ... i, so look for the deepest key it has. OverflowError for an id outside
    0 ... 2^32 - 1."""
    return chain_keys(root, pack_tokens(tokens))


def pack_keys(keys: Iterable[bytes]) -> bytes:
    """Page keys as routers are told them: the first 8 bytes of each."""
    return b"".join([key[:REPORTED_BYTES] for key in keys])


def unpack_keys(packed: bytes) -> list[bytes]:
    """The keys that `pack_keys` packed, 8 bytes of each. ValueError if that is no whole number of them."""
    if len(packed) % REPORTED_BYTES:
        raise ValueError(f"{len(packed)} bytes are no whole number of {REPORTED_BYTES}-byte keys")
    return [packed[at : at + REPORTED_BYTES] for at in range(0, len(packed), REPORTED_BYTES)]


class Prompt(Sequence[int]):
    """Token ids of one prompt, which never change. What is computed from them is computed once, when it is wanted."""

    def __init__(self, packed: bytes) -> None:
        """`packed`: as `pack_tokens` makes it. ValueError if that is no whole number of ids."""
        if len(packed) % TOKEN_BYTES:
            raise ValueError(f"{len(packed)} bytes are no whole number of {TOKEN_BYTES}-byte token ids")
        self.packed = packed
        self.length = len(packed) // TOKEN_BYTES
        """Tokens. Cheaper than `len`, for what happens to every row in every step."""
        self._keys: dict[bytes, list[bytes]] = {}

    @staticmethod
    def of(tokens: Sequence[int]) -> Prompt:
        """Make a prompt of ids; a prompt is given back as it is. OverflowError for an id outside 0 ... 2^32 - 1."""
        return tokens if isinstance(tokens, Prompt) else Prompt(pack_tokens(tokens))

    def keys(self, root: bytes) -> list[bytes]:
        """Keys of its full pages, first to last, of which the first continues `root`. The list is shared by all who ask
        for it: nobody may change it."""
        known = self._keys.get(root)
        if known is None:
            known = self._keys[root] = chain_keys(root, self.packed)
        return known

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
