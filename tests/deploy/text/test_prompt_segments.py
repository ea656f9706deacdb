"""Texts that are encoded segment by segment have the ids that the tokenizer gives the whole text."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import SPECIAL, backend
from tokenizers import AddedToken, models, normalizers, pre_tokenizers

from deploy.text import segments
from deploy.text.chat import BREAK
from deploy.text.segments import Cuts, EncodedSegments
from workers.protocol.request import pack_tokens, unpack_tokens

ODD = [
    AddedToken("<|left|>", lstrip=True, special=True),
    AddedToken("<|right|>", rstrip=True, special=True),
    AddedToken("<|word|>", single_word=True, special=True),
    AddedToken("<|over", special=True),
    AddedToken("over|>", special=True),
    AddedToken("<|in|>", special=True),
    AddedToken("[<|in|>]", special=True),
    AddedToken(" <|blank|>", special=True),
    AddedToken("<|Norm|>", normalized=True),
    AddedToken("<|user|>s", special=True),
    AddedToken("<|eos|><|bos|>", special=True),
    AddedToken("tok|>", special=True),
    AddedToken("_tok|>", special=True),
]
"""Tokens before some of which a text must not be cut."""
PIECES = [*SPECIAL, *(token.content for token in ODD), "<think>", "über", " ", "\n", "x", "word", "<", "|>", "s", BREAK]
texts = st.lists(st.sampled_from(PIECES), max_size=24).map("".join)


def bytewise(*added: AddedToken) -> tokenizers.Tokenizer:
    """Byte-level BPE, as most models' is."""
    made = tokenizers.Tokenizer.from_str(backend().to_str())
    made.add_tokens([*added])
    return made


def with_marks(scheme: str) -> tokenizers.Tokenizer:
    """A tokenizer that marks the beginnings of words, and treats the first one of a text by itself."""
    letters = sorted({*"".join(PIECES), "▁"})
    made = tokenizers.Tokenizer(
        models.BPE({letter: at for at, letter in enumerate(letters)}, [], unk_token="x", fuse_unk=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.add_special_tokens([*SPECIAL, "<|blank|>"])
    return made


def lower() -> tokenizers.Tokenizer:
    made = bytewise(*ODD)
    made.normalizer = normalizers.Sequence([normalizers.Lowercase(), normalizers.Prepend("_")])
    return made


def shown() -> tokenizers.Tokenizer:
    made = bytewise()
    made.encode_special_tokens = True
    return made


def cut_off() -> tokenizers.Tokenizer:
    made = bytewise()
    made.enable_truncation(9)
    return made


KINDS = {
    "plain": bytewise,
    "odd": lambda: bytewise(*ODD),
    "marks at the beginning": lambda: with_marks("first"),
    "marks": lambda: with_marks("always"),
    "normalized": lower,
    "special tokens are text": shown,
    "truncated": cut_off,
}


class Encoder:
    """What the cache needs of a tokenizer, and what it was asked."""

    def __init__(self, made: tokenizers.Tokenizer) -> None:
        self.backend, self.cuts = made, Cuts(made)
        self.asked: list[str] = []

    def encode(self, text: str) -> list[int]:
        """As `deploy.text.tokenizer` does: what is around a break is encoded apart."""
        return [i for part in text.split(BREAK) for i in self.backend.encode(part, add_special_tokens=False).ids]

    async def encode_async(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        [ids] = await self.encode_all_async([text], special, most)
        return ids

    async def encode_all_async(self, texts: Any, special: bool = True, most: int | None = None) -> list[list[int]]:
        assert not special
        assert most is None
        await asyncio.sleep(0)
        self.asked += texts
        return [self.encode(text) for text in texts]


encoder = cache(lambda kind: Encoder(KINDS[kind]()))


async def encoded(cache_of: EncodedSegments, text: str, salt: bytes = b"") -> list[int]:
    return [*unpack_tokens(await cache_of.encode(text, salt))]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEAST_CHARS", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_segments_have_the_ids_of_the_whole(kind: str) -> None:
    made = encoder(kind)
    remembered = EncodedSegments(made, 4000)

    @settings(deadline=None, max_examples=400)
    @given(st.lists(texts, min_size=1, max_size=4), st.sampled_from([b"", b"other"]))
    @example(["<|right|> <|blank|>x"], b"")
    @example(["x<|user|>x", "<|user|>x<|user|>x"], b"")
    @example(["<|word|>tok|>"], b"")  # a token that is a word by itself is none before a letter
    @example(["<|word|>_tok|>"], b"")
    def holds(turns: list[str], salt: bytes) -> None:
        for last in range(1, len(turns) + 1):  # a conversation that goes on
            text = "".join(turns[:last])
            assert asyncio.run(encoded(remembered, text, salt)) == made.encode(text)

    holds()


@pytest.mark.parametrize(
    ("kind", "expected"), [("plain", 3), ("odd", 2), ("special tokens are text", 1), ("truncated", 1)]
)
def test_texts_are_cut_before_tokens_that_nothing_reaches_into(kind: str, expected: int) -> None:
    text = "<|user|>a<|bos|>b<|in|>c<|assistant|>d<|word|>e"
    assert "".join(encoder(kind).cuts.segments(text)) == text
    assert len(encoder(kind).cuts.segments(text)) == expected


async def test_a_turn_encodes_what_is_new_in_it() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made)
    first = "<|bos|>be brief<|user|>one<|assistant|>"
    await remembered.encode(first, b"")
    made.asked.clear()
    await remembered.encode(first + "two<|user|>three<|assistant|>", b"")
    assert made.asked == ["<|assistant|>two", "<|user|>three"]


async def test_other_salts_find_nothing() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made)
    text = "<|bos|>be brief<|user|>one<|assistant|>"
    for salt in (b"", b"one", b"two"):
        made.asked.clear()
        await remembered.encode(text, salt)
        assert len(made.asked) == 3
        await remembered.encode(text, salt)
        assert len(made.asked) == 3


async def test_memory_is_bounded_and_the_latest_stay() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made, 20_000)
    for number in range(200):
        await encoded(remembered, f"<|bos|>always<|user|>{number}")
        held = [segments._size(key, packed) for key, packed in remembered._known.items()]
        assert remembered._held == sum(held) <= 20_000
    assert made.asked.count("<|bos|>always") == 1
    assert 20 < len(remembered._known) < 50


async def test_a_segment_larger_than_the_memory_is_encoded_all_the_same() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made, 500)
    text = "<|bos|>a<|user|>" + "long " * 200
    for _ in range(2):
        assert await encoded(remembered, text) == made.encode(text)
    assert remembered._held <= 500


async def test_texts_of_very_many_segments_are_encoded_whole() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made)
    text = "<|user|>a" * (segments.MOST_SEGMENTS + 2)
    assert await remembered.encode(text, b"") == pack_tokens(made.encode(text))
    assert made.asked == [text]
    assert not remembered._known


async def test_texts_at_one_time() -> None:
    made = Encoder(bytewise())
    remembered = EncodedSegments(made, 1500)
    asked = [f"<|bos|>same<|user|>{number % 3}<|assistant|>{number}" for number in range(30)]
    given = await asyncio.gather(*(encoded(remembered, text) for text in asked))
    assert given == [made.encode(text) for text in asked]
