"""A tiny model whose tokens are text: single characters, and pieces that JSON is full of."""

from __future__ import annotations

import json
import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from tests.tiny_models import VOCAB, write_tiny
from workers.vocabulary.spelling import byte_alphabet

EOS = 1
PIECES = ['{"', '": ', '", "', '"}', ", ", "true", "false", "null", '["', '"]', "ab", "abc", "10", "12", "}]"]
"""Tokens that span several of a grammar's symbols."""
CHARACTERS = [*string.ascii_lowercase, *string.digits, *' {}[]":,.-+_\\/\n<>ABCDEF']
THINK_END = "</think>"


def spelled(text: str) -> str:
    letters = {number: letter for letter, number in byte_alphabet().items()}
    return "".join(letters[number] for number in text.encode())


TEXTS = ["<|bos|>", "<|eos|>", THINK_END, *CHARACTERS, *PIECES]
"""Text of each id; the model's vocabulary has more ids, which are no text."""
assert len(set(TEXTS)) == len(TEXTS) < VOCAB


def write_grammar_model(folder: Path, kind: str = "v3", **settings: object) -> Path:
    write_tiny(folder, kind, seed=3, num_hidden_layers=2, **settings)
    config = json.loads((folder / "config.json").read_text())
    config["eos_token_id"] = EOS
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("generation_config.json"):
        file.unlink()
    vocabulary = {spelled(text): index for index, text in enumerate(TEXTS)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in TEXTS[:2]])
    tokenizer.add_tokens([AddedToken(THINK_END, special=False, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def text_of(tokens: list[int]) -> str:
    """Return the text of the tokens; special ones and unused ids write nothing."""
    return "".join(TEXTS[token] for token in tokens if 2 <= token < len(TEXTS))
