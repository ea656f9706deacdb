"""Reads the tokenizer of a model folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from workers.vocabulary.spelling import byte_vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model folder, None if it holds none. ValueError when it cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    # The base class takes tokenizer.json as it is; the class a folder names may rebuild it by other rules.
    from transformers import PreTrainedTokenizerFast

    from workers.vocabulary import tiktoken

    try:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES if name != tiktoken.VOCABULARY):
            return tiktoken.load(folder)
        hf: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder))
        return hf
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def special_ids(backend: object) -> frozenset[int]:
    """Ids of a `tokenizers` backend that are no text, such as those that end one."""
    added = backend.get_added_tokens_decoder()  # type: ignore[attr-defined]
    return frozenset(index for index, token in added.items() if token.special)


def text_of_tokens(folder: Path) -> tuple[list[bytes], frozenset[int]] | None:
    """The bytes that every token of a folder's vocabulary spells, by id, and the ids of those that are no text. None
    where the folder has no tokenizer, or one whose tokens are no bytes. ValueError as above."""
    hf = load_tokenizer(folder)
    if hf is None:
        return None
    backend = hf.backend_tokenizer
    table = byte_vocabulary(backend)
    return None if table is None else (table, special_ids(backend))
