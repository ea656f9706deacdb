"""Where the chat templates of a model folder may stand, and which of several writes a chat."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import backend

from deploy.api.job.model import Reader
from deploy.config.api import ApiConfig
from deploy.text.errors import ChatTemplateError
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
