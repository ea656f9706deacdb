"""Content that came in parts gives the prompt that the parts would give where a template takes them."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_tokenizer import TEMPLATE, tiny
from tool_templates import DEEPSEEK_V3, DEEPSEEK_V31, GLM, KIMI, KIMI_K25

from deploy.text.chat import content_of, joined, template_message, tool_results_in_order

LINES = "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
LINES += "{% for part in m.content %}{{ ' | ' if not loop.first }}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
USERS = GLM.replace(
    "{{ m.content }}{%- for tc",
    "{{ m.content | map(attribute='text') | join if m.content is not string else m.content }}{%- for tc",
)
BY_TEMPLATE = {
    KIMI_K25: dict.fromkeys(("system", "user", "assistant", "tool"), ""),
    LINES: dict.fromkeys(("system", "user", "assistant", "tool"), " | "),
    USERS: {"system": "", "user": "", "assistant": "", "tool": "\n"},
    **{
        template: dict.fromkeys(("system", "user", "assistant", "tool"), "\n")
        for template in (TEMPLATE, KIMI, GLM, DEEPSEEK_V3, DEEPSEEK_V31)
    },
}


@pytest.mark.parametrize("template", BY_TEMPLATE)
def test_parts_are_joined_as_the_template_joins_them(template: str) -> None:
    assert tiny()._separators_of(template) == BY_TEMPLATE[template]


@pytest.mark.parametrize("template", [KIMI_K25, LINES])
def test_the_prompt_is_that_of_the_parts(template: str) -> None:
    """transformers' own rendering of the parts is the reference."""
    said = [("system", ["a", "b"]), ("user", ["c\n", "", "d"]), ("assistant", ["e", "f"]), ("user", ["g", "h"])]
    parts: list[dict[str, Any]] = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in said
    ]
    wanted = tiny()._hf.apply_chat_template(parts, chat_template=template, tokenize=False, add_generation_prompt=True)
    ours = [template_message(role, content_of(texts)) for role, texts in said]
    assert tiny().render_chat(ours, template=template) == wanted


def test_content_of_parts() -> None:
    assert [content_of(texts) for texts in ([], ["a"])] == ["", "a"]
    assert content_of(["a", ""]) == [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]
    assert [joined(content) for content in ("a", content_of(["a", "b"]))] == ["a", "a\nb"]


def test_results_are_put_in_the_order_of_the_calls() -> None:
    calls = [{"id": "a"}, {"id": "b"}, {"id": "c"}]

    def ordered(*ids: str) -> list[str]:
        results = [{"tool_call_id": call_id} for call_id in ids]
        return [result["tool_call_id"] for result in tool_results_in_order(calls, results)]

    assert ordered("c", "a", "b") == ["a", "b", "c"]
    assert ordered("c", "a") == ["a", "c"]
    assert ordered("b", "x", "a") == ["b", "x", "a"]
    assert ordered("b", "a", "b") == ["b", "a", "b"]
