"""Writes texts at random, byte by byte, as a grammar allows."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import xgrammar as xgr

from workers.grammar.build import build, vocabulary_for
from workers.protocol.grammar import Grammar, Kind

EOS = 256
BYTES = [bytes([byte]) for byte in range(256)] + [b""]


@cache
def compiler(kind: Kind) -> xgr.GrammarCompiler:
    info = xgr.TokenizerInfo(vocabulary_for(kind, BYTES), vocab_size=257, stop_token_ids=[EOS])
    return xgr.GrammarCompiler(info)


CLOSING = b'"}],:'


def matcher_of(grammar: Grammar, quick: bool = True) -> xgr.GrammarMatcher:
    return xgr.GrammarMatcher(compiler(grammar.kind).compile_grammar(build(grammar, quick)))


def allowed(matcher: xgr.GrammarMatcher) -> list[int]:
    bits_1B = np.zeros((1, 9), dtype=np.int32)
    matcher.fill_next_token_bitmask(bits_1B)
    return [int(i) for i in np.flatnonzero(np.unpackbits(bits_1B.view(np.uint8), bitorder="little")[:257])]


def write(grammar: Grammar, rng: random.Random, most: int = 300, quick: bool = True) -> str | None:
    """A text, None where it was not complete after so many bytes. Mostly what closes something is chosen, and seldom
    what is rare in texts."""
    matcher, text = matcher_of(grammar, quick), bytearray()
    while len(text) < most:
        # 0xED begins surrogates, which xgrammar takes for text and nobody else does.
        ids = [i for i in allowed(matcher) if i != 0xED]
        assert ids, text
        closing = [i for i in ids if i == EOS or i in CLOSING]
        plain = [i for i in ids if 33 <= i < 127] or ids
        chosen = rng.choice(closing if closing and rng.random() < 0.6 else plain if rng.random() < 0.9 else ids)
        assert matcher.accept_token(chosen)
        if chosen == EOS:
            return text.decode()
        text.append(chosen)
    return None


def takes(grammar: Grammar, text: str, quick: bool = True) -> bool:
    matcher = matcher_of(grammar, quick)
    return bool(matcher.accept_string(text) and matcher.is_completed())
