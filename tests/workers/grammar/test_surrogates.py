"""Text that is written under a grammar holds no surrogate, whatever pieces of characters the tokens are."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import pytest
import xgrammar as xgr

from workers.grammar.build import build, vocabulary_for
from workers.grammar.compiler import Compiled
from workers.grammar.matcher import RequestMatcher
from workers.grammar.surrogates import SplitSurrogates
from workers.protocol.grammar import Grammar
from workers.protocol.plan import SamplingParams

EOS = 256
TABLE = [bytes([byte]) for byte in range(256)]
TABLE += [b"", b"a\xed", b"\xa0", b"\xa0\x80", b"\x95\x9c", b"\xed\xa0", b"\xed\xb0\x80", "한".encode(), b"\xed\x95"]
TABLE += [b"x\xed\xa0\x80y", "퟿".encode(), "é".encode(), b"\xbf\xbf\xed", b"\x80\xed"]
VOCAB = len(TABLE)
HALVES = [index for index, raw in enumerate(TABLE) if raw.endswith(b"\xed")]
ENDS = [index for index, raw in enumerate(TABLE) if raw[:1] and 0xA0 <= raw[0] <= 0xBF]
PIECES = [index for index, raw in enumerate(TABLE) if raw and max(raw) >= 0x80]
GRAMMARS = [
    Grammar("json_schema", '{"type": "string"}'),
    Grammar("json_schema", '{"type": "string", "minLength": 3, "maxLength": 9}'),
    Grammar("regex", "[^ab]+"),
    Grammar("ebnf", "root ::= [^x]{2,30}"),
]


@cache
def compiled(grammar: Grammar) -> Compiled:
    info = xgr.TokenizerInfo(vocabulary_for(grammar.kind, TABLE), vocab_size=VOCAB, stop_token_ids=[EOS])
    handle = xgr.GrammarCompiler(info).compile_grammar(build(grammar))
    return Compiled(grammar, handle, SplitSurrogates(TABLE, VOCAB))


def allowed(matcher: RequestMatcher) -> list[int]:
    mask_B = np.zeros(-(-VOCAB // 32), dtype=np.int32)
    matcher.fill((), [mask_B])
    return [int(i) for i in np.flatnonzero(np.unpackbits(mask_B.view(np.uint8), bitorder="little"))]


def written(grammar: Grammar, seed: int) -> bytes:
    """Mostly pieces of characters, and what begins a surrogate wherever it may."""
    rng, matcher = random.Random(seed), RequestMatcher(compiled(grammar), SamplingParams(99), (EOS,), VOCAB)
    text = b""
    while True:
        ids = allowed(matcher)
        pieces = [i for i in ids if i in PIECES]
        halves = [i for i in ids if i in HALVES]
        if EOS in ids and len(text) > 40:
            return text
        could = halves if halves and rng.random() < 0.5 else pieces if pieces and len(text) < 40 else ids
        token = rng.choice([i for i in could if i != EOS] or [EOS])
        if token == EOS:
            return text
        matcher.accept([token])
        assert not matcher.lost
        text += TABLE[token]


@pytest.mark.parametrize(
    "grammar", [pytest.param(GRAMMARS[0], marks=pytest.mark.long), *GRAMMARS[1:]], ids=lambda grammar: grammar.text
)
def test_what_is_written_is_text(grammar: Grammar) -> None:
    texts = [written(grammar, seed) for seed in range(30)]
    lead = b"".join(texts).count(b"\xed")
    assert lead > 50
    for text in texts:
        text.decode()


def test_korean_can_be_written_and_a_surrogate_cannot() -> None:
    matcher = RequestMatcher(compiled(GRAMMARS[2]), SamplingParams(99), (EOS,), VOCAB)
    matcher.accept([ord("c")])
    before = allowed(matcher)
    matcher.accept([0xED])
    assert 0x95 in allowed(matcher)
    assert not set(allowed(matcher)).intersection(ENDS)
    matcher.accept([0x95, 0x9C])
    assert allowed(matcher) == before
    assert not matcher.lost


def test_a_window_knows_what_its_drafts_began() -> None:
    matcher = RequestMatcher(compiled(GRAMMARS[2]), SamplingParams(99), (EOS,), VOCAB)
    masks = [np.zeros(-(-VOCAB // 32), dtype=np.int32) for _ in range(4)]
    assert matcher.fill((0xED, 0xA0, 0x80), masks) == (2, False)
    assert matcher.fill((0xED, 0x95, 0x9C), masks) == (4, False)
    # Nothing of that is left.
    assert {0xC3, 0xED} <= set(allowed(matcher))
    matcher.accept([0xED, 0xA0])
    assert matcher.lost
