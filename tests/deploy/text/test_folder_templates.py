"""Where the chat templates of a model folder may stand, and which of several writes a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import backend
from transformers import PreTrainedTokenizerFast

from deploy.api.job.model import Reader
from deploy.config.api import ApiConfig
from deploy.text.chat import ChatTemplateError
from deploy.text.template import check_template
from deploy.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]


def of(name: str) -> str:
    return name + "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}{{ tools | tojson }}{% endif %}"


def listed(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "template": of(name)} for name in names]


FOLDERS: dict[str, tuple[Any, dict[str, str], str | None, str | None]] = {
    "one": (of("a"), {}, "a", "a"),
    "a file": (None, {"chat_template.jinja": of("a")}, "a", "a"),
    "a file beside an older one": (of("b"), {"chat_template.jinja": of("a")}, "a", "a"),
    "a list": (listed("default", "tool_use"), {}, "default", "tool_use"),
    "a list without one for tools": (listed("default", "rag"), {}, "default", "default"),
    "a list of one": (listed("chat"), {}, "chat", "chat"),
    "a list of one for tools": (listed("tool_use"), {}, "tool_use", "tool_use"),
    "a list without a default": (listed("rag", "tool_use"), {}, None, "tool_use"),
    "a list of others": (listed("rag", "chat"), {}, None, None),
    "files": (None, {"chat_template.jinja": of("a"), "additional_chat_templates/tool_use.jinja": of("b")}, "a", "b"),
    "a processor's file": (None, {"chat_template.json": json.dumps({"chat_template": of("a")})}, "a", "a"),
    "a processor's file beside a newer one": (
        None,
        {"chat_template.json": json.dumps({"chat_template": of("b")}), "chat_template.jinja": of("a")},
        "a",
        "a",
    ),
    "a processor's file beside the tokenizer's": (
        of("a"),
        {"chat_template.json": json.dumps({"chat_template": of("b")})},
        "a",
        "a",
    ),
    "a processor's list": (
        None,
        {"chat_template.json": json.dumps({"chat_template": listed("default", "tool_use")})},
        "default",
        "tool_use",
    ),
    "a list beside a file": (listed("default", "tool_use"), {"chat_template.jinja": of("a")}, "a", "a"),
    "files without tokenizer_config.json's": (
        listed("default", "rag"),
        {"chat_template.jinja": of("a"), "additional_chat_templates/rag.jinja": of("b")},
        "a",
        "a",
    ),
    "an additional file": (None, {"additional_chat_templates/tool_use.jinja": of("b")}, "b", "b"),
}
"""By name: the field `chat_template`, files, and which template writes a chat without tools and one with some."""


@pytest.mark.parametrize("name", FOLDERS)
def test_the_template_of_a_chat(name: str, tmp_path: Path) -> None:
    inline, files, plain, with_tools = FOLDERS[name]
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline} if inline else {}))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    Reader(tokenizer, ApiConfig())
    for tools, expected in ((TOOLS, with_tools), ([], plain)):
        if expected is None:
            with pytest.raises(ChatTemplateError, match="chat template"):
                tokenizer.render_chat(CHAT, tools=tools)
        else:
            assert tokenizer.render_chat(CHAT, tools=tools).startswith(f"{expected}hi")


OF_TRANSFORMERS = [
    (name, tools)
    for name, (_, _, plain, with_tools) in FOLDERS.items()
    for tools, expected in (([], plain), (TOOLS, with_tools))
    if expected is not None and "additional file" not in name and "of one" not in name
]
"""Chats for which transformers finds a template."""


@pytest.mark.parametrize(("name", "tools"), OF_TRANSFORMERS)
def test_ids_are_those_of_transformers(name: str, tools: list[Any], tmp_path: Path) -> None:
    """A processor's file transformers reads for processors alone: its text goes to the tokenizer by hand."""
    inline, files, _, _ = FOLDERS[name]
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": inline} if inline else {}))
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    tokenizer, theirs = Tokenizer.load(tmp_path), PreTrainedTokenizerFast.from_pretrained(str(tmp_path))
    assert tokenizer is not None
    if not theirs.chat_template:
        given = json.loads(files["chat_template.json"])["chat_template"]
        theirs.chat_template = {n["name"]: n["template"] for n in given} if isinstance(given, list) else given
    ids = theirs.apply_chat_template(CHAT, tools=tools or None, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode(tokenizer.render_chat(CHAT, tools=tools), add_special_tokens=False) == ids


@pytest.mark.parametrize("given", ["{", "[]", "{}", '{"chat_template": 5}', '{"chat_template": []}'])
def test_a_processors_file_that_holds_no_template_is_named(given: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    (tmp_path / "chat_template.json").write_text(given)
    with pytest.raises(ValueError, match=r"chat_template\.json"):
        Tokenizer.load(tmp_path)


def test_a_template_that_cannot_write_chats_is_named_by_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(backend().to_str())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ nothing.at.all }}"}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    with pytest.raises(ValueError, match=r"chat_template\.json cannot write"):
        check_template(tokenizer, tmp_path, None)
