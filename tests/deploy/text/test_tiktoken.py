"""Tokenizers published as a `tiktoken.model`, against the definition of its encoding written out."""

from __future__ import annotations

import base64
import json
import shutil
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import regex
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizer import TEXTS

from deploy.text.tokenizer import Tokenizer

PARTS = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'ll)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'ll)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]
SPLIT = regex.compile("|".join(PARTS), regex.VERSION1)
CODE = f'''
import not_installed

class TikTokenTokenizer:
    """Not run."""

    pat_str = "|".join(
        [
{"".join(f'            r"""{part}""",' + chr(10) for part in PARTS)}        ]
    )
'''
TEMPLATE = "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}"


def trained() -> list[bytes]:
    """The 256 bytes, and what joining the most frequent pairs makes of them."""
    tokens = [bytes([number]) for number in range(256)]
    words = [[bytes([number]) for number in piece.encode()] for text in TEXTS * 2 for piece in SPLIT.findall(text)]
    while frequent := Counter(pair for word in words for pair in pairwise(word)).most_common(1):
        [(pair, _)] = frequent
        tokens.append(b"".join(pair))
        words = [joined(word, pair) for word in words]
    return list(dict.fromkeys(tokens))


def joined(word: list[bytes], pair: tuple[bytes, bytes]) -> list[bytes]:
    out: list[bytes] = []
    for token in word:
        if out and (out[-1], token) == pair:
            out[-1] += token
        else:
            out.append(token)
    return out


TOKENS = trained()
FIRST = len(TOKENS)
"""The first id beside the vocabulary."""
RANKS = {token: rank for rank, token in enumerate(TOKENS)}


def defined(text: str) -> list[int]:
    """Piece by piece, unless it is a token: the neighbours that make the token of lowest rank are joined, the first of
    equals, until none are left that make one."""
    ids: list[int] = []
    for piece in SPLIT.findall(text):
        if piece.encode() in RANKS:
            ids.append(RANKS[piece.encode()])
            continue
        word = [bytes([number]) for number in piece.encode()]
        while True:
            ranks = [RANKS.get(left + right, len(RANKS)) for left, right in pairwise(word)]
            if not ranks or min(ranks) == len(RANKS):
                break
            at = ranks.index(min(ranks))
            word[at : at + 2] = [word[at] + word[at + 1]]
        ids += [RANKS[token] for token in word]
    return ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi")
    lines = [f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(TOKENS)]
    (folder / "tiktoken.model").write_text("\n".join(lines) + "\n")
    (folder / "tokenization_kimi.py").write_text(CODE)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    special = {"[BOS]": FIRST, "[EOS]": FIRST + 1, "<|im_user|>": FIRST + 4, "<|im_end|>": FIRST + 5}
    added = {str(number): {"content": token, "special": True} for token, number in special.items()}
    added[str(FIRST + 6)] = {"content": "<think>", "special": False}
    config = {
        "added_tokens_decoder": added,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    loaded = Tokenizer.load(folder)
    assert loaded is not None
    return loaded


LETTERS = list("abthe quickLZYl'sS .,!?()\n\r\t019é東京中文가\u0301\u3000🚀")


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(LETTERS), max_size=60))
@example("中文English混合 the fox's DOG'S 1234567  \n\n  x\r\n")
@example("".join(TEXTS))
def test_texts_become_the_ids_that_the_definition_gives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.encode(text) == defined(text)
    assert tokenizer.decode(defined(text)) == text


def test_added_tokens_have_the_ids_that_the_folder_says(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("the<|im_end|><think>[BOS]") == [*defined("the"), FIRST + 5, FIRST + 6, FIRST]
    assert tokenizer.size == FIRST + 7
    assert tokenizer.special_ids == {FIRST + number for number in range(6)}
    assert tokenizer.decode([*defined("the"), FIRST + 5, FIRST + 6]) == "the<think>"
    assert tokenizer.token_string(FIRST + 2) == f"<|reserved_token_{FIRST + 2}|>"


def test_tokens_are_bytes_that_streams_show(tokenizer: Tokenizer) -> None:
    stream = tokenizer.detokenizer()
    assert "".join(map(stream.push, defined("京 fox"))) + stream.flush() == "京 fox"
    assert tokenizer.token_bytes(300) == TOKENS[300]


def test_the_chat_template_comes_along(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "the"}])
    assert tokenizer.encode(text, add_special_tokens=False) == [FIRST + 4, *defined("the"), FIRST + 5]


def test_so_do_further_chat_templates(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "several")
    (tmp_path / "several" / "additional_chat_templates").mkdir()
    (tmp_path / "several" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools | tojson }}")
    loaded = Tokenizer.load(tmp_path / "several")
    assert loaded is not None
    assert loaded.template_for(None, tools=True) == "{{ tools | tojson }}"
    assert loaded.template_for(None, tools=False) == TEMPLATE


def test_role_tokens_that_a_message_spells_are_text(tokenizer: Tokenizer) -> None:
    text = tokenizer.render_chat([{"role": "user", "content": "the<|im_end|><|im_user|>[EOS]<think>"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [number for number in ids if number >= FIRST] == [FIRST + 4, FIRST + 5]
    assert tokenizer.decode(ids[1:-1], skip_special_tokens=False) == "the<|im_end|><|im_user|>[EOS]<think>"


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokenization_kimi.py", None, "download it, too"),
        ("tokenization_kimi.py", "pat_str = made()", "is no plain text"),
        ("tiktoken.model", "YQ== 0\nYg== 2\n", "without gaps"),
        ("tiktoken.model", "nonsense\n", "cannot be read"),
        ("tokenizer_config.json", None, "tokenizer_config.json"),
    ],
)
def test_what_is_missing_or_broken_is_named(
    folder: Path, tmp_path: Path, file: str, content: str | None, says: str
) -> None:
    for known in folder.iterdir():
        (tmp_path / known.name).write_bytes(known.read_bytes())
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match=says) as found:
        Tokenizer.load(tmp_path)
    assert str(tmp_path) in str(found.value)
