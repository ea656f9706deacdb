"""Chat templates' knowledge of tools, found out by trying them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizer import TEMPLATE, tiny
from tool_templates import (
    DEEPSEEK_R1,
    DEEPSEEK_R1_CALLS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    GLM,
    KIMI,
    MISTRAL_SHORT_IDS,
    MISTRAL_STRICT,
    ONE_CALL,
)

from deploy.text.chat import ToolsUnknown
from deploy.text.tokenizer import Tokenizer
from deploy.text.tool_template import ToolTemplate

DESCRIBED = (
    "{% for tool in tools or [] %}{{ '# ' + tool.function.name + ': ' + tool.function.description }}"
    "{{ tool.function.parameters | tojson }}{% for name, of in tool.function.parameters.properties.items() %}{{ name }}"
    "{% endfor %}{% endfor %}{% for m in messages %}{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"
    "{% endfor %}"
)
"""As several that are passed around, which want a description and a schema of every tool."""
DEMO = Path(__file__).parents[3] / "assets" / "demo"
TOOLS = [{"type": "function", "function": {"name": "f", "description": "F.", "parameters": {}}}]
KNOWN = {
    KIMI: ToolTemplate(knows_tools=True, arguments_as_text=True),
    DEEPSEEK_V31: ToolTemplate(knows_tools=True, arguments_as_text=True),
    DEEPSEEK_V3: ToolTemplate(knows_tools=True, arguments_as_text=False),
    GLM: ToolTemplate(knows_tools=True, arguments_as_text=False),
    DEEPSEEK_R1_CALLS: ToolTemplate(False, True, True, fences_arguments=True, calls_without_content=True),
    DEEPSEEK_R1_CALLS.replace("m['content'] is none", "m['tool_calls']").replace("['type'] +", "['type'] + ''"): (
        ToolTemplate(False, True, True, fences_arguments=True)
    ),
    MISTRAL_STRICT: ToolTemplate(knows_tools=True, arguments_as_text=True),
    MISTRAL_SHORT_IDS: ToolTemplate(knows_tools=True, arguments_as_text=False, wants_short_ids=True),
    ONE_CALL: ToolTemplate(knows_tools=True, arguments_as_text=False, one_call_each=True),
    DESCRIBED: ToolTemplate(knows_tools=True, arguments_as_text=False, wants_descriptions=True),
    DEEPSEEK_R1: ToolTemplate(knows_tools=False, arguments_as_text=False),
    TEMPLATE: ToolTemplate(knows_tools=False, arguments_as_text=False),
    "{% if tools %}{{ raise_exception('no') }}{% endif %}": ToolTemplate(knows_tools=False, arguments_as_text=False),
}


@pytest.mark.parametrize("template", KNOWN)
def test_templates_are_tried(template: str) -> None:
    assert tiny()._tool_template(template) == KNOWN[template]


@pytest.mark.skipif(not (DEMO / "tokenizer.json").exists(), reason="the demo model is not built")
def test_the_demo_model_knows_tools() -> None:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    assert tokenizer._tool_template(None) == ToolTemplate(knows_tools=True, arguments_as_text=False)


@pytest.mark.parametrize("template", [t for t, known in KNOWN.items() if known.knows_tools])
def test_tools_that_say_nothing_of_themselves_are_written(template: str) -> None:
    chat, name = [{"role": "user", "content": "hi"}], "nothing_else"
    for said in ({}, {"description": "D."}, {"parameters": {"type": "object"}}, {"parameters": {}}):
        tool = {"type": "function", "function": {"name": name, **said}}
        text = tiny().render_chat(chat, tools=[tool, *TOOLS], template=template)
        assert name in text
        assert "description" in said or "D." not in text
    plain = [{"type": "function", "function": {"name": name, "description": "D.", "parameters": {"properties": {}}}}]
    assert f"# {name}: D.{{" in tiny().render_chat(chat, tools=plain, template=DESCRIBED)


def test_a_template_that_knows_no_tools_refuses_them() -> None:
    tokenizer = tiny()
    chat = [{"role": "user", "content": "hi"}]
    with pytest.raises(ToolsUnknown, match="chat template knows nothing"):
        tokenizer.render_chat(chat, tools=TOOLS)
    with pytest.raises(ToolsUnknown):
        tokenizer.render_chat([*chat, {"role": "tool", "content": "x", "tool_call_id": "a"}])
    assert tokenizer.render_chat(chat).endswith("hi<|assistant|>")
