"""Tokenizers published as a `tekken.json`, against tiktoken, whose encoding that is."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.text.tokenizer import Tokenizer
from workers.vocabulary.folder import load_tokenizer, text_of_tokens

PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = [b"he", b"ll", b"hell", b"hello", b" w", b" wo", "é".encode(), b"or"]
RANKS = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *WORDS])}
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"]
RESERVED = 10
"""Ids before the vocabulary's."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tekken")
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
        for token, rank in [*RANKS.items(), (b"beyond", len(RANKS))]
    ]
    config = {"pattern": PATTERN, "num_vocab_tokens": len(vocabulary), "default_num_special_tokens": RESERVED}
    config |= {"default_vocab_size": RESERVED + len(RANKS), "version": "v13"}
    special = [{"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)]
    values = {"config": config, "vocab": vocabulary, "special_tokens": special}
    (folder / "tekken.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text("{{ bos_token }}[INST]{{ messages[0]['content'] }}[/INST]")
    return folder


@settings(deadline=None)
@given(text=st.text(st.sampled_from("helo wré1, \n\t東<s>")))
def test_ids_are_those_of_tiktoken(folder: Path, text: str) -> None:
    hf = load_tokenizer(folder)
    assert hf is not None
    theirs = tiktoken.Encoding("tekken", pat_str=PATTERN, mergeable_ranks=RANKS, special_tokens={})
    if "<s>" not in text:
        want = [RESERVED + rank for rank in theirs.encode(text)]
        assert hf.backend_tokenizer.encode(text, add_special_tokens=False).ids == want
        assert hf.backend_tokenizer.encode(text, add_special_tokens=True).ids == [1, *want]


def test_special_tokens_and_the_bytes_of_the_others(folder: Path) -> None:
    found = text_of_tokens(folder)
    assert found is not None
    table, special = found
    assert special == frozenset(range(RESERVED))
    assert table[RESERVED:] == list(RANKS)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer is not None
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat([{"role": "user", "content": "hello"}]) == "<s>[INST]hello[/INST]"
    assert tokenizer.encode("[INST]hello", add_special_tokens=False) == [3, RESERVED + RANKS[b"hello"]]
