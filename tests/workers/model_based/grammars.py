"""Grammars of random requests, and what each allows, by a regular expression: nothing of it is the engine's.

A token is allowed if the text with it can still become one that the whole expression matches. Every character that
occurs is a token of its own, so that whatever can be written can be written with tokens.
"""

from __future__ import annotations

import json
import string
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
import regex
from tokenizers import AddedToken, Tokenizer, decoders, models

from workers.protocol.grammar import Grammar
from workers.protocol.plan import SamplingParams
from workers.vocabulary.spelling import byte_alphabet

EOS: Final = 1
TAG: Final = 2
"""Token behind which some grammars begin."""
PIECES: Final = ["ab", "abc", "10", "12", "true", '", "', '["', '"]', "+1"]
TEXTS: Final = ["<|bos|>", "<|eos|>", "</t>", *PIECES, *string.ascii_lowercase, *string.digits, *'[]",.+_ ']
"""Text of each id; ids behind these write nothing."""

LIST: Final = json.dumps({"type": "array", "items": {"enum": ["ab", "abc", "x"]}, "minItems": 1, "maxItems": 3})
ITEM, SPACE = '"(ab|abc|x)"', " ?"
CHOICES: Final = ["abc", "ab", "10", "a true tale"]
GRAMMARS: Final[tuple[tuple[Grammar, str], ...]] = (
    (Grammar("choice", json.dumps(CHOICES)), "|".join(CHOICES)),
    (Grammar("choice", json.dumps(CHOICES), begin_after=(TAG,)), "|".join(CHOICES)),
    (Grammar("regex", r"[a-c]{2,9}(12|10)[.][0-9]{3,12}"), r"[a-c]{2,9}(12|10)[.][0-9]{3,12}"),
    (Grammar("ebnf", 'root ::= d ("+" d){0,30} "_"\nd ::= [0-9]'), r"[0-9](\+[0-9]){0,30}_"),
    (Grammar("json_schema", LIST), rf"\[{SPACE}{ITEM}({SPACE},{SPACE}{ITEM}){{0,2}}{SPACE}\]"),
)
_EXPRESSION: Final = dict(GRAMMARS)


def write_tokenizer(folder: Path) -> None:
    """A tokenizer of `TEXTS`, and a config that says which id ends a text."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    letters = {number: letter for letter, number in byte_alphabet().items()}
    spelled = ["".join(letters[number] for number in text.encode()) for text in TEXTS]
    tokenizer = Tokenizer(models.BPE({text: index for index, text in enumerate(spelled)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TEXTS[:2]])
    tokenizer.add_tokens([AddedToken(TEXTS[TAG], special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))


def allowed(generated: Sequence[int], sampling: SamplingParams, vocab: int) -> np.ndarray:
    """bool [V]: what may follow these tokens. Stop ids may not before `min_tokens`, unless nothing else may."""
    assert sampling.grammar is not None
    allowed_V = np.zeros(vocab, dtype=bool)
    allowed_V[sorted(_by_grammar(sampling.grammar, tuple(generated), vocab))] = True
    if len(generated) < sampling.min_tokens:
        others_V = allowed_V.copy()
        others_V[list(sampling.stop_ids)] = False
        allowed_V = others_V if others_V.any() else allowed_V
    return allowed_V


@lru_cache(maxsize=50_000)
def _by_grammar(grammar: Grammar, generated: tuple[int, ...], vocab: int) -> frozenset[int]:
    if grammar.begin_after:
        if TAG not in generated:
            return frozenset(range(vocab)) - {EOS}
        generated = generated[generated.index(TAG) + 1 :]
    expression, text = _EXPRESSION[grammar], "".join(TEXTS[token] for token in generated)
    ids = {
        index
        for index, piece in enumerate(TEXTS)
        if index > EOS and regex.fullmatch(expression, text + piece, partial=True)
    }
    return frozenset(ids | ({EOS} if regex.fullmatch(expression, text) else set()))
