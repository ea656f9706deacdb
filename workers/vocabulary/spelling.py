"""Bytes of the tokens of a byte-level vocabulary, as GPT-2's and those of every model served here."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> byte. Printable latin-1 bytes stand for themselves, the others for the
    code points from 256 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


def is_byte_level(backend: Any) -> bool:
    """Whether the tokenizer's decoder is the byte-level one and nothing else."""
    decoder = json.loads(backend.to_str()).get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def byte_table(vocabulary: dict[str, int]) -> list[bytes]:
    """Bytes of every token of a byte-level vocabulary, by id; unused ids are empty.

    A token spelled with a character outside the byte alphabet (added tokens may be) stands for its own UTF-8.
    """
    table = [b""] * (1 + max(vocabulary.values(), default=-1))
    alphabet = byte_alphabet()
    known = frozenset(alphabet)
    translation = str.maketrans({char: chr(byte) for char, byte in alphabet.items()})
    for token, index in vocabulary.items():
        if known.issuperset(token):
            table[index] = token.translate(translation).encode("latin-1")
        else:
            table[index] = token.encode("utf-8")
    return table


def byte_vocabulary(backend: Any) -> list[bytes] | None:
    """Bytes of every token of a `tokenizers` backend, by id; None where its decoder is no byte-level one."""
    if not is_byte_level(backend):
        return None
    table = byte_table(backend.get_vocab(with_added_tokens=True))
    return table if _agrees(backend, table) else None


def _agrees(backend: Any, table: Sequence[bytes]) -> bool:
    """Whether the byte table decodes like the tokenizer, on random ids: a guard against an unknown decoder."""
    draw = random.Random(0)
    ids = [draw.randrange(len(table)) for _ in range(512)]
    text: str = backend.decode(ids, skip_special_tokens=False)
    return b"".join(table[index] for index in ids).decode("utf-8", "replace") == text
