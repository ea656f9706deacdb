"""Reads the tokenizer of a model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from workers.vocabulary.spelling import byte_vocabulary

if TYPE_CHECKING:
    from workers.vocabulary.library import PreTrainedTokenizerFast

ADDS_BOS_BY_DEFAULT: Final = ("Llama", "CodeLlama", "Gemma")
"""Prefixes of the names of tokenizer classes that put the begin-of-sequence id before a text unless `add_bos_token` is
false, as their documentation says."""

PROCESSOR_TEMPLATE: Final = "chat_template.json"
"""File with a chat template, from the time before chat_template.jinja."""
TEKKEN: Final = "tekken.json"
"""Tokenizer file of folders in Mistral's own layout."""
TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tiktoken.model", TEKKEN)


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast | None:
    """The tokenizer of a model folder, None if it holds none. ValueError when it cannot be read."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    # The base class takes tokenizer.json as it is; the class a folder names may rebuild it by other rules.
    from workers.vocabulary import tiktoken
    from workers.vocabulary.library import PreTrainedTokenizerFast

    try:
        if not any((folder / name).is_file() for name in TOKENIZER_FILES if name != tiktoken.VOCABULARY):
            return _with_template(tiktoken.load(folder), folder)
        own: dict[str, str] = {}
        if not any((folder / name).is_file() for name in TOKENIZER_FILES if name != TEKKEN):
            own = {"bos_token": "<s>", "eos_token": "</s>"}  # which the file names nowhere
        hf: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(str(folder), **own)
        add_declared_ids(hf, folder, adds_bos=bool(own))
        return _with_template(hf, folder)
    except Exception as error:
        raise ValueError(f"the tokenizer in {folder} cannot be read: {error}") from error


def _with_template(hf: PreTrainedTokenizerFast, folder: Path) -> PreTrainedTokenizerFast:
    """`hf` with the chat template of chat_template.json where the folder has no other. transformers reads that file for
    its processors alone, which makers of models that also see images publish it for."""
    file = folder / PROCESSOR_TEMPLATE
    if hf.chat_template or not file.is_file():
        return hf
    try:
        values: Any = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{PROCESSOR_TEMPLATE} is no JSON: {error}") from None
    template = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(template, list):
        template = {named["name"]: named["template"] for named in template}
    texts = [*template.values()] if isinstance(template, dict) else [template]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f'{PROCESSOR_TEMPLATE} should be {{"chat_template": ...}} with the text of the template')
    hf.chat_template = template
    return hf


def add_declared_ids(hf: PreTrainedTokenizerFast, folder: Path, *, adds_bos: bool = False) -> None:
    """Have `hf` put the begin-of-sequence id before a text, and the end-of-sequence id behind it, where the folder's
    tokenizer_config.json says so (`add_bos_token`, `add_eos_token`). tokenizer.json alone often does not, as that of
    DeepSeek R1, whose makers' tokenizer class adds what the fields name. An id that tokenizer.json adds already is
    added once; one that a field rules out, no more. Without the fields tokenizer.json holds; with
    `adds_bos` the begin-of-sequence id is put there all the same.

    ValueError where an id is asked for that the folder does not name.
    """
    from tokenizers.processors import TemplateProcessing

    file = folder / "tokenizer_config.json"
    declared: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    backend = hf.backend_tokenizer
    plain: list[int] = backend.encode("a", add_special_tokens=False).ids
    whole: list[int] = backend.encode("a", add_special_tokens=True).ids
    begin = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    adds = {"bos": whole[:begin], "eos": whole[begin + len(plain) :]}
    wanted: dict[str, list[int]] = {}
    for kind, token in (("bos", hf.bos_token), ("eos", hf.eos_token)):
        index = None if token is None else backend.token_to_id(str(token))
        says = declared.get(f"add_{kind}_token")
        if says is None and kind == "bos" and str(declared.get("tokenizer_class")).startswith(ADDS_BOS_BY_DEFAULT):
            says = index is not None
        if says is None and kind == "bos" and adds_bos:
            says = True
        if says and index is None:
            raise ValueError(
                f"tokenizer_config.json has add_{kind}_token, but no token of the vocabulary as {kind}_token: name one"
            )
        if says is None or adds[kind] not in ([], [index]):  # tokenizer.json adds other ids: it knows better
            wanted[kind] = adds[kind]
        else:
            wanted[kind] = [index] if says and index is not None else []
    if wanted == adds:
        return
    before, behind = ([backend.id_to_token(index) for index in wanted[kind]] for kind in ("bos", "eos"))
    backend.post_processor = TemplateProcessing(
        single=[*before, "$A", *behind],
        pair=[*before, "$A", *behind, *(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in behind)],
        special_tokens=[(backend.id_to_token(index), index) for ids in wanted.values() for index in ids],
    )


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
