"""The corpus: sources of the running interpreter's standard library, split by file, and a tokenizer trained on them."""

import ast
import hashlib
import json
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = SPECIAL_TOKENS = (
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
)
BOS_ID, EOS_ID, PAD_ID = 0, 1, 2

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}"
    "<|system|># Tools\n"
    "{% for tool in tools %}{{ tool['function'] | tojson + '\\n' }}{% endfor %}"
    "Call one as <tool_call>name<arg_key>key</arg_key><arg_value>value</arg_value></tool_call>"
    "{% endif %}"
    "{% set last = namespace(user=-1) %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set last.user = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}"
    "{% if loop.first or loop.previtem['role'] != 'tool' %}<|user|>{% endif %}"
    "{{ '<tool_response>' + message['content'] + '</tool_response>' }}"
    "{% elif message['role'] in ['system', 'user', 'assistant'] %}"
    "{{ '<|' + message['role'] + '|>' }}"
    "{% if message['role'] == 'assistant' and message['reasoning_content'] and loop.index0 > last.user %}"
    "{{ '<think>' + message['reasoning_content'] + '</think>' }}"
    "{% endif %}"
    "{{ message['content'] or '' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '<tool_call>' + call['function']['name'] }}"
    "{% for key, value in call['function']['arguments'].items() %}"
    "{{ '<arg_key>' + key + '</arg_key><arg_value>' }}"
    "{{ value if value is string else value | tojson }}</arg_value>"
    "{% endfor %}"
    "</tool_call>"
    "{% endfor %}"
    "{{ eos_token }}"
    "{% endif %}"
    "{% else %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}"
    "<|assistant|>"
    "{% if enable_thinking is defined %}{{ '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
    "{% endif %}"
)
"""Tools and calls as GLM's templates write them. A chat without either, in which nothing is said of thinking, is what
the model was trained on."""

# Tests repeat themselves, `encodings` and `pydoc_data` are tables and the manual's text, the rest is not the library.
SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "ensurepip", "encodings", "pydoc_data")
)
HELD_OUT_ONE_IN = 33

# Words, short runs of digits, punctuation with its line end, blank lines with the indent that follows.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"

LONGEST_CHAT_ANSWER = 1500  # characters


@dataclass(frozen=True)
class Corpus:
    """Source texts by relative path; a file is held out by a hash of its path, so in every Python version alike."""

    training: dict[str, str]
    held_out: dict[str, str]


def is_held_out(path: str) -> bool:
    """Whether the file at this path, relative to the library's root, is kept from training (3% of all paths)."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8]) % HELD_OUT_ONE_IN == 0


def collect(root: Path | None = None, limit: int | None = None) -> Corpus:
    """Read the library's `.py` files under `root` (default: the running interpreter's).

    With a `limit` there are at most so many files to train on, and one held out.
    """
    root = root or Path(sysconfig.get_path("stdlib"))
    corpus = Corpus({}, {})
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root)
        if SKIPPED_FOLDERS.intersection(path.parts[:-1]) or any(part.startswith("config-") for part in path.parts):
            continue
        part = corpus.held_out if is_held_out(path.as_posix()) else corpus.training
        if limit is not None and len(part) >= (limit if part is corpus.training else 1):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # a few files declare another encoding; some distributions ship dangling links
        if text.strip():
            part[path.as_posix()] = text
    if not corpus.training or not corpus.held_out:
        raise ValueError(f"no sources for training or none to hold out under {root}")
    return corpus


def functions_with_docstrings(source: str) -> Iterator[tuple[str, str]]:
    """Yield (request, answer): a sentence asking for a function and its source, for each documented function."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef) or not (doc := ast.get_docstring(node)):
            continue
        answer = textwrap.dedent("\n".join(source.splitlines()[node.lineno - 1 : node.end_lineno]))
        if len(answer) <= LONGEST_CHAT_ANSWER:
            purpose = doc.split("\n\n")[0].replace("\n", " ").strip()
            yield f"Write a function {node.name}. {purpose}", answer


def chat_documents(sources: dict[str, str]) -> list[str]:
    """Chats in the template's form, so that a chat request, too, is answered with Python."""
    documents = []
    for source in sources.values():
        try:
            pairs = list(functions_with_docstrings(source))
        except SyntaxError:
            continue
        documents += [f"{USER}{request}{ASSISTANT}{answer}" for request, answer in pairs]
    return documents


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE of exactly 4,096 ids, special tokens first; puts the bos token in front of what it encodes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"corpus too small: {tokenizer.get_vocab_size()} ids instead of {VOCAB_SIZE}")
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, BOS_ID)])
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[str]) -> list[list[int]]:
    """Token ids of each document, from bos to eos."""
    return [[*encoding.ids, EOS_ID] for encoding in tokenizer.encode_batch(documents)]


def epoch_stream(documents: list[list[int]], chats: list[list[int]], rng: random.Random) -> list[int]:
    """One epoch's tokens: all documents and a quarter of the chats (they repeat what the documents say), shuffled."""
    order = documents + rng.sample(chats, len(chats) // 4)
    rng.shuffle(order)
    return [token for document in order for token in document]


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` with the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
