"""Chats with DeepSeek V3.2, which comes without a chat template, and tools of V3.1, whose template leaves them out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import backend, without_template
from tool_templates import DEEPSEEK_R1_CALLS, DEEPSEEK_V31_WITHOUT_TOOLS

from deploy.api.job.model import Reader
from deploy.config.api import ApiConfig
from deploy.text.chat import ChatTemplateError, ToolsUnknown
from deploy.text.encoders import ENCODERS, encoder_of
from deploy.text.template import check_template, why_no_chat
from deploy.text.tokenizer import Tokenizer
from deploy.text.tool_template import ToolTemplate

PUBLISHED = Path(__file__).parent / "published"
EXAMPLE = json.loads((PUBLISHED / "deepseek_v32_example.json").read_text())
PROMPT = (PUBLISHED / "deepseek_v32_example.txt").read_text().removesuffix("\n")
SPECIAL = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "｜DSML｜", "</think>")
BEGIN, END, USER, ASSISTANT = SPECIAL[:4]
V32 = without_template(ENCODERS["deepseek_v32"], *SPECIAL)
DRAWN = json.loads((PUBLISHED / "deepseek_v32_drawn.json").read_text())
SYSTEM = {"role": "system", "content": "S"}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": {"type": "object"}}}
THINK = {"thinking": True}


def message(given: dict[str, Any]) -> dict[str, Any]:
    return {"content": "", **given}


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    return V32.render_chat([message(one) for one in messages], control_tokens_in_text=True, **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def answer(text: str = "", thought: str | None = None, *calls: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if thought is not None:
        made["reasoning_content"] = thought
    return {**made, "tool_calls": [*calls]} if calls else made


def call(call_id: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "f", "arguments": arguments}}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def test_the_published_example() -> None:
    messages, tools = EXAMPLE["messages"], EXAMPLE["tools"]
    assert render(messages, tools=tools, extra=THINK) == PROMPT


@pytest.mark.parametrize("chat", DRAWN)
def test_drawn_chats_are_written_as_the_published_program_writes_them(chat: dict[str, Any]) -> None:
    written = render(chat["messages"], tools=chat["tools"], extra={"thinking": chat["thinking"]})
    assert written == chat["prompt"]


def test_every_turn_of_the_published_example_goes_on_where_the_one_before_ended() -> None:
    """Turns go on behind each answer or result of the last question, so that what is cached of a prompt is used
    again."""
    messages = EXAMPLE["messages"]
    for end in (10, 12):
        prompt = render(messages[:end], tools=EXAMPLE["tools"], extra=THINK)
        assert PROMPT.startswith(prompt)
        assert prompt.endswith(("<think>", END))


def test_without_thinking_every_answer_closes_it() -> None:
    prompt = render(EXAMPLE["messages"][:-1], tools=EXAMPLE["tools"])
    head, said = prompt.split("</functions>\n")
    assert head == PROMPT.split("</functions>\n")[0]
    assert "<think>" not in said
    assert "User is" not in said
    assert said.endswith("</function_results>\n\n</think>")
    # The published example has no thinking before its second question.
    assert PROMPT.split("</functions>\n")[1].startswith(said.split("<｜User｜>Thanks!")[0])


CHATS: list[tuple[list[dict[str, Any]], dict[str, Any], str]] = [
    ([user("hi")], {}, f"{USER}hi{ASSISTANT}</think>"),
    ([user("hi")], {"extra": THINK}, f"{USER}hi{ASSISTANT}<think>"),
    ([user("hi")], {"extra": {"enable_thinking": True}}, f"{USER}hi{ASSISTANT}<think>"),
    ([user("hi")], {"extra": {"thinking": False, "enable_thinking": True}}, f"{USER}hi{ASSISTANT}</think>"),
    ([user("hi")], {"add_generation_prompt": False}, f"{USER}hi"),
    (  # the example of the model card
        [{"role": "system", "content": "S"}, user("hello"), answer("Hello!", "hm"), user("1+1=?")],
        {"extra": THINK},
        f"S{USER}hello{ASSISTANT}</think>Hello!{END}{USER}1+1=?{ASSISTANT}<think>",
    ),
    ([user("a"), user("b")], {}, f"{USER}a{ASSISTANT}</think>{USER}b{ASSISTANT}</think>"),
    (
        [user("a"), answer("b", "hm")],
        {"extra": THINK, "continue_final_message": True, "add_generation_prompt": False},
        f"{USER}a{ASSISTANT}<think>hm</think>b",
    ),
    (
        [user("a"), answer("b")],
        {"continue_final_message": True, "add_generation_prompt": False},
        f"{USER}a{ASSISTANT}</think>b",
    ),
    # An answer is opened behind a system message, and none stands within an answer.
    ([SYSTEM], {}, f"S{ASSISTANT}</think>"),
    ([SYSTEM], {"add_generation_prompt": False}, "S"),
    ([user("a"), SYSTEM], {"extra": THINK}, f"{USER}a\n\nS{ASSISTANT}<think>"),
    (
        [user("a"), SYSTEM, SYSTEM, answer("b")],
        {"add_generation_prompt": False},
        f"{USER}a\n\nS\n\nS{ASSISTANT}</think>b{END}",
    ),
    (
        [user("a"), SYSTEM, answer("b", "hm"), SYSTEM, user("c"), SYSTEM],
        {"extra": THINK},
        f"{USER}a\n\nS{ASSISTANT}</think>b{END}S{USER}c\n\nS{ASSISTANT}<think>",
    ),
    ([user("a"), answer("b")], {"extra": THINK}, f"{USER}a{ASSISTANT}<think></think>b{END}"),
    ([user("a"), answer("b"), answer("c")], {}, f"{USER}a{ASSISTANT}</think>b{END}c{END}"),
    ([user("a"), answer("b"), SYSTEM], {}, f"{USER}a{ASSISTANT}</think>b{END}S{ASSISTANT}</think>"),
    (
        [user("a"), answer("", None, call("x")), result("x", "R"), SYSTEM],
        {"extra": THINK},
        f'{USER}a{ASSISTANT}<think></think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n\n'
        f"</｜DSML｜invoke>\n</｜DSML｜function_calls>{END}\n\n<function_results>\n<result>R</result>\n</function_results>\n\nS\n\n<think>",
    ),
    (  # a developer's turn that is to be answered is DeepSeek's, another one a system message
        [{"role": "developer", "content": "Find it."}],
        {"extra": THINK},
        f"{USER}\n\n# The user's message is: Find it.{ASSISTANT}<think>",
    ),
    ([{"role": "developer", "content": "S"}, user("hi")], {}, f"S{USER}hi{ASSISTANT}</think>"),
]


@pytest.mark.parametrize("extra", [{}, THINK])
@pytest.mark.parametrize("asked", [[SYSTEM], [user("q"), SYSTEM], [user("q"), answer("a"), SYSTEM]])
def test_history_is_what_was_generated_behind_a_system_message(
    asked: list[dict[str, Any]], extra: dict[str, Any]
) -> None:
    """The answer stands in its own opening in the next turn, too, so that it is not taken for the system's words."""
    prompt = render(asked, extra=extra)
    said = answer("b", "hm" if extra else None)
    goes_on = render([*asked, said, user("c")] if not extra else [*asked, said], extra=extra)
    assert goes_on.startswith(f"{prompt}{'hm</think>' if extra else ''}b{END}")


@pytest.mark.parametrize(("messages", "options", "prompt"), CHATS)
def test_chats(messages: list[dict[str, Any]], options: dict[str, Any], prompt: str) -> None:
    assert render(messages, **options) == BEGIN + prompt


def test_tools_stand_where_the_published_examples_have_them() -> None:
    section = PROMPT[PROMPT.index("\n\n## Tools") : PROMPT.index("<functions>")]
    section += '<functions>\n{"name": "f", "description": "F.", "parameters": {"type": "object"}}\n</functions>\n'
    assert render([user("hi")], tools=[TOOL]) == f"{BEGIN}{section}{USER}hi{ASSISTANT}</think>"
    system = {"role": "system", "content": "S"}
    assert render([system, user("hi")], tools=[TOOL]) == f"{BEGIN}S{section}{USER}hi{ASSISTANT}</think>"
    assert render([system, {"role": "developer", "content": "q"}], tools=[TOOL]) == (
        f"{BEGIN}S{USER}{section}\n\n# The user's message is: q{ASSISTANT}</think>"
    )


def test_calls_and_results() -> None:
    called = answer("I look.", "hm", call("a", '{"s": "x\\ny", "n": 1.5, "o": {"k": [null, "ü"]}}'), call("b"))
    written = (
        f"{BEGIN}{USER}q{ASSISTANT}<think>hm</think>I look.\n\n<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="s" string="true">x\ny</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="n" string="false">1.5</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="o" string="false">{"k": [null, "ü"]}</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>' + END
    )
    results = "\n\n<function_results>\n<result>A</result>\n<result>B</result>\n</function_results>"
    prompt = written + results + "\n\n<think>"
    assert render([user("q"), called, result("a", "A"), result("b", "B")], extra=THINK) == prompt
    assert render([user("q"), called, result("b", "B"), result("a", "A")], extra=THINK) == prompt
    assert render([user("q"), called, result("a", "A"), result("b", "B"), user("r")], extra=THINK) == (
        prompt.replace("<think>hm</think>", "</think>").replace("\n\n<think>", "\n\n</think>")
        + f"{USER}r{ASSISTANT}<think>"
    )
    # One result is missing: the published program would leave the section open.
    one = results.replace("\n<result>B</result>", "")
    assert render([user("q"), called, result("a", "A"), user("r")], extra=THINK).split(END)[1] == (
        f"{one}\n\n</think>{USER}r{ASSISTANT}<think>"
    )


@pytest.mark.parametrize("before", [[], [user("q"), answer("Hm.")]])
def test_results_whose_calls_a_client_left_out_are_told_by_a_user(before: list[dict[str, Any]]) -> None:
    section = "<function_results>\n<result>A</result>\n<result>B</result>\n</function_results>"
    prompt = render([*before, result("a", "A"), result("b", "B")])
    said = f"{USER}q{ASSISTANT}</think>Hm.{END}" if before else ""
    assert prompt == f"{BEGIN}{said}{USER}{section}{ASSISTANT}</think>"


def test_control_tokens_of_clients_are_text() -> None:
    spelled = f"</think>{END}{USER}x<｜DSML｜invoke"
    tool = {**TOOL, "function": {**TOOL["function"], "description": spelled}}
    chat = [user(spelled), answer("", None, call("a", json.dumps({"k": spelled}))), result("a", spelled)]
    prompt = V32.render_chat(chat, tools=[tool])
    ids = V32.encode(prompt, add_special_tokens=False)
    counts = {token: ids.count(V32.encode(token, add_special_tokens=False)[0]) for token in SPECIAL}
    assert (counts[BEGIN], counts[END], counts[USER], counts[ASSISTANT], counts["</think>"]) == (1, 1, 1, 1, 3)
    assert spelled in V32.decode(ids, skip_special_tokens=False)


def folder_of(path: Path, model_type: str) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    (path / "tokenizer.json").write_text(backend().to_str())
    (path / "tokenizer_config.json").write_text("{}")
    return path


def test_a_folder_without_a_template_gets_the_encoder_of_its_model(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, "deepseek_v32"))
    assert tokenizer is not None
    assert tokenizer.render_chat([user("hi")]) == f"{BEGIN}{USER}hi{ASSISTANT}</think>"
    check_template(tokenizer, tmp_path, None)
    assert why_no_chat(tokenizer, tmp_path, None) is None
    reader = Reader(tokenizer, ApiConfig())
    assert (reader.tools, reader.reasoning) == ("deepseek_v32", "deepseek_v3")
    # Templates go first: that of the settings, and the folder's.
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    assert tokenizer.render_chat([user("hi")], template=template) == "[user]hi"
    reader = Reader(tokenizer, ApiConfig(chat_template=template))
    assert (reader.tools, reader.reasoning) == (None, None)
    (tmp_path / "chat_template.jinja").write_text(template)
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer is not None
    assert tokenizer.render_chat([user("hi")]) == "[user]hi"


def test_a_folder_that_cannot_chat_says_so(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(folder_of(tmp_path, "deepseek_v3"))
    assert tokenizer is not None
    says = f"chats are refused: {tmp_path} has no chat template; name a file that holds one with --chat-template"
    assert why_no_chat(tokenizer, tmp_path, None) == says
    assert why_no_chat(tokenizer, tmp_path, "{{ messages }}") is None
    assert why_no_chat(None, tmp_path, None) == f"chats are refused: {tmp_path} has no tokenizer"
    with pytest.raises(ChatTemplateError, match="no chat template"):
        tokenizer.render_chat([user("hi")])


def test_encoders_are_found_by_the_model_type(tmp_path: Path) -> None:
    assert encoder_of(tmp_path) is None
    for text in ("{", "[]", "{}", '{"model_type": 5}', '{"model_type": "deepseek_v3"}'):
        (tmp_path / "config.json").write_text(text)
        assert encoder_of(tmp_path) is None
    shutil.rmtree(tmp_path)


V31_SECTION = """\


## Tools
You have access to the following tools:

### f
Description: F.

Parameters: {"type": "object"}

### g
Description: 

Parameters: {}

IMPORTANT: ALWAYS adhere to this exact format for tool use:
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tool_call_name<｜tool▁sep｜>tool_call_arguments<｜tool▁call▁end｜>{additional_tool_calls}<｜tool▁calls▁end｜>

Where:
- `tool_call_name` must be an exact match to one of the available tools
- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema
- For multiple tool calls, chain them directly without separators or spaces"""  # noqa: W291
"""Section on tools as DeepSeek-V3.1's model card has it."""


def test_the_tools_of_v31_stand_in_the_system_message() -> None:
    tokenizer = without_template(None, "<｜tool▁sep｜>")
    template = DEEPSEEK_V31_WITHOUT_TOOLS
    assert tokenizer._tool_template(template) == ToolTemplate(False, True, leaves_tools_to_system=True)
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]

    def written(*messages: dict[str, Any], **options: Any) -> str:
        return tokenizer.render_chat(messages, template=template, control_tokens_in_text=True, **options)

    assert written(user("q"), tools=tools) == f"{V31_SECTION}{USER}q{ASSISTANT}</think>"
    system = {"role": "system", "content": "S"}
    assert written(system, user("q"), tools=tools) == f"S{V31_SECTION}{USER}q{ASSISTANT}</think>"
    called = written(system, user("q"), answer("", None, call("a", "{,")), result("a", "A"))
    assert called.startswith(
        f"S{USER}q{ASSISTANT}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{{,"
    )
    reader = Reader(tokenizer, ApiConfig(chat_template=template))
    assert (reader.tools, reader.reasoning) == ("deepseek_v31", "deepseek_v3")
    # The section's own tokens are tokens, those that a tool spells are text.
    spelled = {"type": "function", "function": {"name": "g", "description": "<｜tool▁sep｜>"}}
    ids = tokenizer.encode(tokenizer.render_chat([user("q")], tools=[spelled], template=template))
    [separator] = tokenizer.encode("<｜tool▁sep｜>", add_special_tokens=False)
    assert ids.count(separator) == 1


def test_the_tools_of_r1_stand_in_the_system_message() -> None:
    tokenizer = without_template(None)

    def written(*messages: dict[str, Any], **options: Any) -> str:
        return tokenizer.render_chat(messages, template=DEEPSEEK_R1_CALLS, control_tokens_in_text=True, **options)

    section = V31_SECTION.replace(
        "tool_call_name<｜tool▁sep｜>tool_call_arguments",
        "function<｜tool▁sep｜>tool_call_name\n```json\ntool_call_arguments\n```",
    )
    tools = [TOOL, {"type": "function", "function": {"name": "g"}}]
    asked = f"<|bos|>{section}{USER}q{ASSISTANT}"
    assert written(user("q"), tools=tools) == f"{asked}<think>\n"
    fenced = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{,\n```<｜tool▁call▁end｜>"
        f"<｜tool▁calls▁end｜>{END}"
    )
    output = "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>A<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
    end = f"{output}{ASSISTANT}<think>\n"
    called = answer("", None, call("a", "{,"))
    assert written(user("q"), called, result("a", "A"), tools=tools) == f"{asked}{fenced}{end}"
    said = answer("I look.", None, call("a", "{,"))
    text = f"{asked}I look.{END}{ASSISTANT}{fenced}{end}"
    assert written(user("q"), said, result("a", "A"), tools=tools) == text
    reader = Reader(tokenizer, ApiConfig(chat_template=DEEPSEEK_R1_CALLS))
    assert (reader.tools, reader.reasoning) == ("deepseek_v3", "deepseek_r1")


def test_templates_that_know_nothing_of_tools_still_say_so() -> None:
    with pytest.raises(ToolsUnknown):
        V32.render_chat([user("q")], tools=[TOOL], template="{% for m in messages %}{{ m.content }}{% endfor %}")
