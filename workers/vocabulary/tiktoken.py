"""Tokenizers that are published in tiktoken's form, as Moonshot publishes Moonlight's and Kimi's.

`tiktoken.model` has a line per token: its bytes in base64, and its id. Such folders have no tokenizer.json. How a text
is split before its pieces are encoded stands in the folder's own Python file, as `pat_str`. It is read, and never run.
"""

from __future__ import annotations

import ast
import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from workers.vocabulary.library import PreTrainedTokenizerFast
from workers.vocabulary.spelling import byte_alphabet

VOCABULARY: Final = "tiktoken.model"
PATTERN: Final = "pat_str"
_FURTHER_TEMPLATES: Final = "additional_chat_templates"
_CONFIG: Final = "tokenizer_config.json"
_OF_ITS_CLASS: Final = ("auto_map", "tokenizer_class", "added_tokens_decoder")
"""Fields of tokenizer_config.json about the folder's own class, which is not used."""


def load(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder with a `tiktoken.model`, its chat template included. ValueError or OSError where
    something is missing, with the name of the file."""
    config = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    backend = _backend(_ranks(folder / VOCABULARY), _pattern(folder), config.get("added_tokens_decoder") or {})
    with TemporaryDirectory() as made:
        backend.save(str(Path(made) / "tokenizer.json"))
        kept = {name: value for name, value in config.items() if name not in _OF_ITS_CLASS}
        (Path(made) / _CONFIG).write_text(json.dumps(kept), encoding="utf-8")
        for template in folder.glob("chat_template.*"):
            shutil.copy(template, made)
        if (further := folder / _FURTHER_TEMPLATES).is_dir():
            shutil.copytree(further, Path(made) / _FURTHER_TEMPLATES)
        hf: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(made)
    return hf


def _ranks(file: Path) -> dict[bytes, int]:
    """Token to id, in the order of the ids."""
    pairs = (line.split() for line in file.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(number) for token, number in pairs}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file} does not number its tokens from 0 without gaps")
    return dict(sorted(ranks.items(), key=lambda item: item[1]))


def _pattern(folder: Path) -> str:
    """The regular expression that finds the pieces of a text."""
    for file in sorted(folder.glob("tokenization_*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == PATTERN for t in node.targets):
                return _text(node.value, file)
    raise ValueError(
        f"{VOCABULARY} needs the folder's tokenization_*.py, which says how texts are split ({PATTERN}); "
        "download it, too, or a tokenizer.json"
    )


def _text(node: ast.expr, file: Path) -> str:
    """A literal, or literals that a literal joins."""
    try:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "join":
            [parts] = node.args
            return str(ast.literal_eval(node.func.value)).join(ast.literal_eval(parts))
        return str(ast.literal_eval(node))
    except (TypeError, ValueError):
        raise ValueError(f"{PATTERN} in {file} is no plain text") from None


def _backend(ranks: dict[bytes, int], pattern: str, added: dict[str, Any]) -> Tokenizer:
    letters = {number: letter for letter, number in byte_alphabet().items()}

    def spelled(token: bytes) -> str:
        return "".join(letters[number] for number in token)

    vocabulary = {spelled(token): rank for token, rank in ranks.items()}
    merges = [(spelled(left), spelled(right)) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    known = {int(number): token for number, token in added.items() if int(number) >= len(ranks)}
    tokenizer.add_tokens([_added(known.get(n), n) for n in range(len(ranks), max(known, default=-1) + 1)])
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every pair of tokens that is a token, by the token's rank: the pair of lowest rank is joined first."""
    for token in ranks:
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))


def _added(token: dict[str, Any] | None, number: int) -> AddedToken:
    """A token beside the vocabulary. Ids without one are reserved."""
    if token is None:
        return AddedToken(f"<|reserved_token_{number}|>", normalized=False, special=True)
    return AddedToken(token["content"], normalized=False, special=bool(token.get("special", True)))
