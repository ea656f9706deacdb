"""Conversations whose earlier turns are not what they should be go on, over all three APIs: the clients' own libraries
against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import tiny, without_template
from tool_templates import DEEPSEEK_V31, GLM, KIMI, KIMI_K25

from deploy.api.app import create_app
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.job import parse_generation
from deploy.api.job.model import render_messages
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.chat import MOST_PARTS, MOST_TOOLS, readable
from deploy.text.encoders import ENCODERS
from deploy.text.tokenizer import Tokenizer

LARGE = replace(INFO, max_context=8192, vocab_size=1024)
V32 = without_template(ENCODERS["deepseek_v32"], "<｜User｜>", "<｜Assistant｜>", "｜DSML｜", "</think>")
SCHEMA: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL: Any = {"type": "function", "function": {"name": "f", "description": "F.", "parameters": SCHEMA}}
ASK: Any = {"role": "user", "content": "q"}
NONE: Any = object()


class Server:
    """A server, and clients of its three APIs."""

    def __init__(self, tokenizer: Tokenizer, template: str | None) -> None:
        self.tokenizer = tokenizer
        self.engine = FakeEngine(say(tokenizer.encode("Fine.", add_special_tokens=False)), LARGE)
        self.app = create_app(self.engine, tokenizer, ApiConfig(chat_template=template))

    @contextmanager
    def clients(self) -> Iterator[Server]:
        with (
            serving(self.app) as port,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
            anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as other,
        ):
            self.openai, self.anthropic = client, other
            yield self

    def chat(self, messages: list[Any], **body: Any) -> str:
        """The prompt."""
        self.openai.chat.completions.create(model="tiny", messages=messages, **body)
        return self.prompt

    def turns(self, messages: list[Any], **body: Any) -> str:
        """The same over Anthropic's API."""
        self.anthropic.messages.create(model="tiny", max_tokens=4, messages=messages, **body)
        return self.prompt

    def items(self, items: list[Any], **body: Any) -> str:
        """The same over the Responses API."""
        self.openai.responses.create(model="tiny", input=items, **body)
        return self.prompt

    def raw(self, path: str, body: str) -> str:
        """The prompt of a body as it is."""
        url = f"{self.openai.base_url}".replace("/v1/", path)
        answer = httpx.post(url, content=body.encode(), headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text
        return self.prompt

    @property
    def prompt(self) -> str:
        return self.tokenizer.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)


ARGUMENTS: list[tuple[Any, str, str]] = [
    ('{"city": "Köln"}', '{"city": "Köln"}', '{"city": "Köln"}'),
    ('{"city": "Kö', '{"city": "Kö', '{"city": "Kö"}'),
    ('{"city": "Köln",}', '{"city": "Köln",}', '{"city": "Köln"}'),
    ('{"city": "\\ud83d"}', '{"city": "\\ud83d"}', '{"city": "\ufffd"}'),
    ("", "", "{}"),
    ("[1]", "[1]", "{}"),
    ("no JSON", "no JSON", "{}"),
    ([1, 2], "[1, 2]", "{}"),
    ([{"city": "Köln"}], '[{"city": "Köln"}]', '{"city": "Köln"}'),
    ({"city": "Köln"}, '{"city": "Köln"}', '{"city": "Köln"}'),
    (None, "{}", "{}"),
    (NONE, "{}", "{}"),
]
"""Arguments as they came, as a template gets them that writes text, and as the object for one that writes objects."""


def written(kind: str, text: str, value: str) -> str:
    """Write a call as it stands in the prompt."""
    if kind == "kimi":
        return f"<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{text}<|tool_call_end|>"
    pairs = json.loads(value).items()
    if kind == "glm":
        inside = "".join(f"<arg_key>{name}</arg_key><arg_value>{given}</arg_value>" for name, given in pairs)
        return f"<tool_call>f{inside}</tool_call>"
    if kind == "deepseek_v31":
        return f"<｜tool▁call▁begin｜>f<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
    inside = "".join(
        f'<｜DSML｜parameter name="{name}" string="true">{given}</｜DSML｜parameter>' for name, given in pairs
    )
    return f'<｜DSML｜invoke name="f">\n{inside}\n</｜DSML｜invoke>'


KINDS: dict[str, tuple[Tokenizer, str | None]] = {
    "kimi": (tiny(), KIMI),
    "glm": (tiny(), GLM),
    "deepseek_v31": (tiny(), DEEPSEEK_V31),
    "deepseek_v32": (V32, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_calls_with_any_arguments_go_on(kind: str) -> None:
    with Server(*KINDS[kind]).clients() as server:
        for given, text, value in ARGUMENTS:
            wanted = written(kind, text, value)
            arguments = {} if given is NONE else {"arguments": given}
            call = {"id": "call_a", "type": "function", "function": {"name": "f", **arguments}}
            result = {"role": "tool", "tool_call_id": "call_a", "content": "done"}
            messages = [ASK, {"role": "assistant", "content": None, "tool_calls": [call]}, result, ASK]
            assert wanted in server.chat(messages)
            assert wanted in server.chat(messages, tools=[TOOL])
            items = [
                ASK,
                {"type": "function_call", "call_id": "call_a", "name": "f", **arguments},
                {"type": "function_call_output", "call_id": "call_a", "output": "done"},
                ASK,
            ]
            assert wanted in server.items(items)
            used = {"type": "tool_use", "id": "call_a", "name": "f", **({} if given is NONE else {"input": given})}
            turns = [
                ASK,
                {"role": "assistant", "content": [used]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_a", "content": "done"}]},
            ]
            assert wanted in server.turns(turns)


@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_surrogate_pairs_become_replacement_characters(kind: str) -> None:
    """Halves are escaped as JavaScript does it, wherever they are in the body."""
    whole = written(kind, '{"city": "\ufffd"}', '{"city": "\ufffd"}')
    head = '{"model": "tiny", "max_tokens": 4, '
    with Server(*KINDS[kind]).clients() as server:
        call = r'{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{\"city\": \"\ud83d\"}"}}'
        chat = r'"messages": [{"role": "user", "content": "x\ude00y"}, {"role": "assistant", "tool_calls": ['
        result = ']}, {"role": "tool", "tool_call_id": "a", "content": "done"}]}'
        prompt = server.raw("/v1/chat/completions", head + chat + call + result)
        assert whole in prompt
        assert "x\ufffdy" in prompt
        used = r'{"type": "tool_use", "id": "a", "name": "f", "input": {"city": "\uD83D"}}'
        turns = r'"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": [' + used
        turns += ']}, {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "done"}]}]}'
        assert whole in server.raw("/v1/messages", head + turns)
        item = r'{"type": "function_call", "call_id": "a", "name": "f", "arguments": "{\"city\": \"\ud83d\"}"}'
        items = '{"model": "tiny", "input": [' + item
        items += ', {"type": "function_call_output", "call_id": "a", "output": "done"}]}'
        assert whole in server.raw("/v1/responses", items)


def test_earlier_thinking_by_either_name() -> None:
    with Server(tiny(), KIMI_K25).clients() as server:
        for given in (
            {"reasoning_content": "Hm."},
            {"reasoning": "Hm."},
            {"reasoning_content": "Hm.", "reasoning": "No."},
            {"reasoning": "Hm.", "reasoning_content": None},
            {"thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]},
            {"reasoning_details": [{"type": "reasoning.text", "text": "Hm.", "signature": None, "index": 0}]},
            {"reasoning_details": [{"type": "reasoning.summary", "summary": "Hm."}], "reasoning": None},
            {"reasoning_details": [{"type": "reasoning.encrypted", "data": "x"}], "reasoning_content": "Hm."},
        ):
            said = {"role": "assistant", "content": "a", **given}
            assert "<think>Hm.</think>a<|im_end|>" in server.chat([ASK, said, ASK])
            if isinstance(given.get("reasoning"), str) and "reasoning_content" not in given:
                assert "<think>Hm.</think>a<|im_end|>" in server.items([ASK, said, ASK])
        assert "<think></think>a" in server.chat(
            [ASK, {"role": "assistant", "content": "a", "reasoning": {"x": 1}}, ASK]
        )
        thought = {"type": "thinking", "thinking": "Hm.", "signature": ""}
        said = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
        assert "<think>Hm.</think>a<|im_end|>" in server.turns([ASK, said, ASK])


@pytest.mark.parametrize(("template", "between"), [(KIMI_K25, ""), (KIMI, "\n")])
def test_parts_of_text_are_joined_as_the_template_joins_them(template: str, between: str) -> None:
    def parts(kind: str = "text") -> list[Any]:
        return [{"type": kind, "text": "one"}, {"type": kind, "text": "two"}]

    joined = f"one{between}two"
    user, system = (
        f"<|im_user|>user<|im_middle|>{joined}<|im_end|>",
        f"<|im_system|>system<|im_middle|>{joined}<|im_end|>",
    )
    with Server(tiny(), template).clients() as server:
        prompt = server.chat([{"role": "system", "content": parts()}, {"role": "user", "content": parts()}])
        assert system + user in prompt
        assert system + user in server.turns([{"role": "user", "content": parts()}], system=parts())
        said = [{"role": "developer", "content": parts("input_text")}, {"role": "user", "content": parts("input_text")}]
        assert system + user in server.items(said)
        assert system.replace("one", "First.\n\none") + user in server.items(said, instructions="First.")
        answered = {"type": "tool_result", "tool_use_id": "functions.f:0", "content": parts()}
        used = {"type": "tool_use", "id": "functions.f:0", "name": "f", "input": {}}
        turns = [ASK, {"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
        assert f"## Return of functions.f:0\n{joined}<|im_end|>" in server.turns(turns)
        going: Any = {"add_generation_prompt": False, "continue_final_message": True}
        begun = [ASK, {"role": "assistant", "content": parts()}]
        assert server.chat(begun, extra_body=going).endswith(joined)


def test_kimi_gets_its_own_ids_names_and_declarations() -> None:
    with Server(tiny(), KIMI_K25).clients() as server:
        call = {"id": "call_a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        again = {**call, "id": "functions_f_0"}
        prompt = server.chat(
            [
                {"role": "user", "content": "q", "name": "Ada"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "call_a", "content": "done"},
                {"role": "assistant", "content": "", "tool_calls": [again]},
                {"role": "tool", "tool_call_id": "functions_f_0", "content": "done"},
            ],
            tools=[TOOL],
        )
        declared = (
            "# Tools\n\n## functions\nnamespace functions {\n// F.\ntype f = (_: {\n  city: string\n}) => any;\n}\n"
        )
        assert f"tool_declare<|im_middle|>{declared}<|im_end|><|im_user|>Ada<|im_middle|>q" in prompt
        for index in (0, 1):
            assert f"<|tool_call_begin|>functions.f:{index}<" in prompt
            assert f"## Return of functions.f:{index}\n" in prompt
        assert "Return of call_a" not in prompt
        assert "functions_f_0" not in prompt
        used = {"type": "tool_use", "id": "toolu_b", "name": "f", "input": {}}
        answered = {"type": "tool_result", "tool_use_id": "toolu_b", "content": "done"}
        tool = {"name": "f", "description": "F.", "input_schema": SCHEMA}
        turns = [ASK, {"role": "assistant", "content": [used]}, {"role": "user", "content": [answered]}]
        prompt = server.turns(turns, tools=[tool])
        assert f"tool_declare<|im_middle|>{declared}<|im_end|>" in prompt
        assert "<|tool_call_begin|>functions.f:0<" in prompt
        assert "## Return of functions.f:0\n" in prompt


def test_deepseek_v32_chats_out_of_the_box() -> None:
    """The reasoning and the calls of its answers are read without any setting, too."""
    server = Server(V32, None)
    call = '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Köln'
    call += "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    server.engine.script = say(V32.encode(f"Hm.</think>I look.\n\n{call}", add_special_tokens=False))
    with server.clients():
        think: Any = {"chat_template_kwargs": {"thinking": True}}
        answer = server.openai.chat.completions.create(model="tiny", messages=[ASK], tools=[TOOL], extra_body=think)
        assert server.prompt.endswith("<｜User｜>q<｜Assistant｜><think>")
        assert '{"name": "f", "description": "F.", "parameters": {' in server.prompt
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        message: Any = choice.message
        assert (message.reasoning_content, message.content.strip()) == ("Hm.", "I look.")
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Rain."}
        prompt = server.chat([ASK, message.model_dump(exclude_none=True), result], tools=[TOOL], extra_body=think)
        assert "<think>Hm.</think>I look." in prompt
        assert prompt.endswith("\n\n<function_results>\n<result>Rain.</result>\n</function_results>\n\n<think>")
        told = server.turns([ASK], thinking={"type": "enabled", "budget_tokens": 1024})
        assert told.endswith("<｜User｜>q<｜Assistant｜><think>")
        assert server.turns([ASK]).endswith("<｜User｜>q<｜Assistant｜></think>")
        assert server.items([ASK]).endswith("<｜User｜>q<｜Assistant｜></think>")
        begun = {"role": "assistant", "content": "Well,"}
        assert server.turns([ASK, begun]).endswith("<｜User｜>q<｜Assistant｜></think>Well,")


def test_a_model_without_any_way_to_chat_refuses_chats() -> None:
    with Server(without_template(None), None).clients() as server, pytest.raises(openai.BadRequestError) as found:
        server.chat([ASK])
    assert "this model has no chat template; use /v1/completions" in str(found.value)


CALLED: Any = {"id": None, "type": None, "function": {"name": "f", "arguments": 5}}
TURNS: list[tuple[list[Any], str]] = [
    ([{"role": "assistant", "content": None}, ASK], "q"),
    ([{"role": "assistant", "content": None, "tool_calls": []}, ASK], "q"),
    ([{"role": "assistant"}, ASK], "q"),
    ([{"role": "assistant", "content": None, "reasoning_content": "Hm."}, ASK], "q"),
    ([{"role": "assistant", "content": [{"type": "refusal", "refusal": "I won't."}]}, ASK], "I won't."),
    ([{"role": "assistant", "content": None, "tool_calls": [CALLED]}, {"role": "tool", "tool_call_id": ""}], "f"),
    ([{"role": "tool", "tool_call_id": "gone", "content": "Wet."}], "Wet."),
]
"""Turns behind the first question, and their form in the prompt."""


@pytest.mark.parametrize(
    ("tokenizer", "template"), [(tiny(), KIMI), (tiny(), GLM), (tiny(), DEEPSEEK_V31), (V32, None)]
)
def test_turns_that_say_nothing_or_lack_something_are_taken(tokenizer: Tokenizer, template: str | None) -> None:
    with Server(tokenizer, template).clients() as server:
        for turns, seen in TURNS:
            assert seen in server.chat([ASK, *turns], tools=[TOOL]), turns


RESULTS: list[tuple[Any, str]] = [
    (None, "functions.f:0\n<|im_end|>"),
    ({"wet": True}, '{"wet": true}'),
    ([1, 2], "[1, 2]"),
    ([], "[]"),
    ({"type": "computer_screenshot", "image_url": "data:image/png"}, "[An image was here"),
]


@pytest.mark.parametrize(("output", "seen"), RESULTS)
def test_results_that_are_no_text_are_read(output: Any, seen: str) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    given = {"type": "function_call_output", "call_id": "c", "output": output}
    with Server(tiny(), KIMI).clients() as server:
        assert seen in server.items([ASK, call, given])


PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def called(**call: Any) -> Any:
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def given_back(content: Any, **more: Any) -> Any:
    return {"role": "tool", "tool_call_id": "c", "content": content, **more}


F: Any = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
EARLIER: list[tuple[list[Any], str]] = [
    ([called(**F), given_back({"wet": True})], '{"wet": true}'),
    ([called(**F), given_back([{"type": "flight", "id": 3}])], '[{"type": "flight", "id": 3}]'),
    ([called(**F), given_back([{"type": "text", "text": "Wet."}, PNG])], "[An image was here"),
    ([called(**F), given_back([{"type": "text", "text": "Wet."}, {"type": "resource", "uri": "u"}])], '"uri": "u"'),
    ([called(**F), given_back(7)], "7"),
    ([called(**F), given_back(False)], "false"),
    ([called(**F), given_back(["a", "b"])], '["a", "b"]'),
    ([called(**F), {"role": "tool", "content": "Wet."}], "Wet."),
    ([called(**F), given_back("Wet.", tool_call_id=None)], "Wet."),
    ([called(**{**F, "id": 5}), given_back("Wet.", tool_call_id=5)], "Wet."),
    ([called(id="c", type="custom", custom={"name": "f", "input": "x = 1"}), given_back("ok")], "x = 1"),
    ([called(id="c", name="f", args={"city": "Köln"}, type="tool_call"), given_back("ok")], "Köln"),
    ([called(id="c", type="function", function={"name": "", "arguments": "{}"}), given_back("ok")], "ok"),
    ([called(id="c", type="function", function={"arguments": None}), given_back("ok")], "ok"),
    ([called(), given_back("ok")], "ok"),
    (
        [
            {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"city": "Köln"}'}},
            {"role": "function", "name": "f", "content": "Wet."},
        ],
        "Köln",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "See"}, PNG]}, {"role": "assistant", "content": "Yes."}],
        "[An",
    ),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, ASK, {"role": "assistant"}], "hear"),
    ([{"role": "user", "content": None}, {"role": "assistant", "content": "Yes."}], "Yes."),
    (
        [{"role": "assistant", "content": [{"type": "output_text", "text": "Said."}, {"type": "tool_use", "id": "x"}]}],
        "Said.",
    ),
    ([{"role": "assistant", "content": [{"type": "spell", "x": 1}]}], "cannot read: spell"),
    ([{"role": "assistant", "content": {"answer": 1}}], '{"answer": 1}'),
    ([{"role": "assistant", "content": ["one", "two"]}], "two"),
    ([{"role": "assistant", "content": "Said.", "reasoning_content": {"a": 1}, "tool_call_id": 5}], "Said."),
    ([{"role": "assistant", "content": "Said.", "reasoning_content": ["Hm."], "tool_calls": "none"}], "Said."),
]
"""Earlier turns of other servers, libraries and models, and a part of their form in the prompt."""


@pytest.mark.parametrize(
    ("tokenizer", "template"), [(tiny(), KIMI), (tiny(), GLM), (tiny(), DEEPSEEK_V31), (V32, None)]
)
def test_whatever_was_said_earlier_is_taken(tokenizer: Tokenizer, template: str | None) -> None:
    with Server(tokenizer, template).clients() as server:
        for turns, seen in EARLIER:
            assert seen in server.raw("/v1/chat/completions", chat_body([ASK, *turns, ASK])), turns
            if turns[-1]["role"] in ("tool", "function"):
                assert seen in server.raw("/v1/chat/completions", chat_body([ASK, *turns])), turns


def chat_body(messages: list[Any], **more: Any) -> str:
    return json.dumps({"model": "tiny", "messages": messages, "tools": [TOOL], **more})


def test_earlier_reasoning_among_the_parts_of_an_answer_is_reasoning() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    said = {"role": "assistant", "content": [thought, {"type": "text", "text": "a"}]}
    with Server(tiny(), KIMI_K25).clients() as server:
        assert "<think>Hm.</think>a<|im_end|>" in server.raw("/v1/chat/completions", chat_body([ASK, said, ASK]))


def test_what_is_new_is_refused_by_name_where_it_cannot_be_read() -> None:
    new: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "See"}, PNG]}]
    with Server(tiny(), KIMI).clients() as server:
        for messages in (new, [ASK, {"role": "assistant", "content": "Yes."}, *new], [*new, ASK]):
            with pytest.raises(openai.BadRequestError, match="image_url"):
                server.chat(messages)


ITEMS: list[tuple[list[Any], str]] = [
    (
        [
            {"role": "user", "content": [{"type": "input_image", "image_url": "x"}]},
            {"role": "assistant", "content": "a"},
        ],
        "[An",
    ),
    ([{"type": "oracle_call", "id": "x"}, {"role": "assistant", "content": "a"}], "oracle_call"),
    ([{"type": "oracle_call", "id": "x"}], "oracle_call"),
    ([{"type": "message", "role": "assistant", "content": None}], "q"),
    ([{"role": "assistant", "content": {"a": 1}}], '{"a": 1}'),
    ([{"role": "assistant", "content": [{"type": "output_audio"}]}], "output_audio"),
    ([{"type": "custom_tool_call", "call_id": "c", "name": "f", "input": {"a": 1}}], "f"),
    ([{"type": "function_call", "name": None}, {"type": "function_call_output", "output": "Wet."}], "Wet."),
    ([{"type": "function_call", "call_id": None, "name": ""}, {"role": "assistant", "content": "a"}], "a"),
    ([{"role": "assistant", "content": [{"type": "spell"}]}, {"role": "assistant", "content": "a"}], "spell"),
    (
        [
            {"type": "function_call", "call_id": "c", "name": "f"},
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "flight"}]},
        ],
        '"flight"',
    ),
]
TURNS_OF_ANTHROPIC: list[tuple[Any, str]] = [
    ([{"type": "oracle", "x": 1}], "oracle"),
    ([{"type": "text", "text": None}, {"type": "text", "text": "a"}], "a"),
    ([{"type": "tool_use", "id": None, "name": "f"}], "f"),
    (None, "q"),
    ({"x": 1}, '{"x": 1}'),
    (["said"], "said"),
]
SAID_BACK: list[tuple[Any, str]] = [
    ({"wet": True}, '{"wet": true}'),
    ([1, 2], "[1, 2]"),
    ([{"type": "flight", "id": 3}], '"flight"'),
    ([{"type": "text", "text": "Wet."}, {"type": "flight", "id": 3}], '"flight"'),
    (7, "7"),
]
"""Results of tools in Anthropic's form."""


def test_earlier_items_and_turns_of_any_kind_are_taken() -> None:
    with Server(tiny(), KIMI).clients() as server:
        for items, seen in ITEMS:
            assert seen in server.raw("/v1/responses", json.dumps({"model": "tiny", "input": [ASK, *items, ASK]})), (
                items
            )
        head: Any = {"model": "tiny", "max_tokens": 4}
        for content, seen in TURNS_OF_ANTHROPIC:
            turns = [ASK, {"role": "assistant", "content": content}, ASK]
            assert seen in server.raw("/v1/messages", json.dumps({**head, "messages": turns})), content
        for content, seen in SAID_BACK:
            used = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}
            result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": content}]}
            assert seen in server.raw("/v1/messages", json.dumps({**head, "messages": [ASK, used, result]})), content


def test_what_is_too_much_is_left_for_those_who_refuse_it() -> None:
    """Routers put turns into words between others' requests: more calls or parts than a message may have are no work.
    Results find their calls at once, whatever their number is."""
    calls, parts = [0] * (MOST_TOOLS + 1), [0] * (MOST_PARTS + 1)
    made = readable([{"role": "assistant", "tool_calls": calls, "content": parts}, *[ASK] * 2])
    assert made[0]["tool_calls"] is calls
    assert made[0]["content"] is parts
    ids = [f"c{i}" for i in range(MOST_TOOLS)]
    answer = {"role": "assistant", "tool_calls": [{"id": call_id, "function": {"name": "f"}} for call_id in ids]}
    results = [{"role": "tool", "content": "r"}] * MOST_TOOLS
    made = readable([answer, *results, ASK])
    assert [message["tool_call_id"] for message in made[1:-1]] == ids


def test_a_result_that_is_an_error_is_said_to_be_one() -> None:
    call = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
    for content, seen in (
        ("no such city", "[The tool failed.]\nno such city"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "[The tool failed.]\nab"),
        ("", "[The tool failed.]"),
        (None, "[The tool failed.]"),
    ):
        result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content}
        with Server(tiny(), KIMI_K25).clients() as server:

            def prompt(more: dict[str, Any], result: dict[str, Any] = result, server: Server = server) -> str:
                turns = [
                    ASK,
                    {"role": "assistant", "content": [call]},
                    {"role": "user", "content": [{**result, **more}]},
                ]
                return server.turns(turns)

            assert f"{seen}<|im_end|>" in prompt({"is_error": True})
            assert prompt({"is_error": False}) == prompt({}) == prompt({"is_error": None})
            assert "failed" not in prompt({})


def test_instructions_that_are_empty_are_none() -> None:
    with Server(tiny(), KIMI).clients() as server:
        assert server.turns([ASK], system="") == server.turns([ASK])
        assert server.turns([ASK], system=[{"type": "text", "text": ""}]) == server.turns([ASK])
        assert server.items([ASK], instructions="") == server.items([ASK])
        developer = {"role": "developer", "content": "S."}
        assert server.items([developer, ASK], instructions="") == server.items([ASK], instructions="S.")


BEGUN: Any = {"role": "assistant", "content": "It is"}


@pytest.mark.parametrize("field", ["prefix", "partial"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_is_begun_is_gone_on_with(kind: str, field: str) -> None:
    tokenizer, template = KINDS[kind]
    with Server(tokenizer, template).clients() as server:
        begun = server.chat([ASK, {**BEGUN, field: True}])
        asked = {"continue_final_message": True, "add_generation_prompt": False}
        assert begun == server.chat([ASK, BEGUN], extra_body=asked)
        assert begun.endswith("It is")
        raw = json.dumps({"model": "tiny", "messages": [ASK, {**BEGUN, field: True}]})
        url = f"{server.openai.base_url}".replace("/v1/", "/tokenize")
        assert httpx.post(url, json=json.loads(raw)).json()["tokens"] == list(server.engine.requests[-1].prompt)
        plain = server.chat([ASK, BEGUN])
        assert plain == server.chat([ASK, {**BEGUN, field: False}]) != begun
        assert server.chat([ASK, {**BEGUN, field: True}, ASK]) == server.chat([ASK, BEGUN, ASK])


async def test_routers_see_an_answer_that_is_begun() -> None:
    messages = [{**ASK, "content": "q " * 200}, {**BEGUN, "content": "It is " * 200, "prefix": True}]
    raw = json.dumps({"model": "tiny", "messages": messages}).encode()
    body = parse_generation(raw, ChatBody)
    ids = tiny().encode(render_messages(tiny(), ApiConfig(chat_template=KIMI), body), False)
    features = await FeatureReader(tiny(), KIMI).read(raw)
    assert features.tokens == len(ids)


def test_tools_in_the_shapes_of_other_apis_keep_their_parameters() -> None:
    function = TOOL["function"]
    flat = {"name": function["name"], "description": function["description"]}
    with Server(tiny(), KIMI).clients() as server:
        expected = server.chat([ASK], tools=[TOOL])
        for tool in ({**flat, "input_schema": SCHEMA}, {**flat, "type": "function", "parameters": SCHEMA}):
            assert server.chat([ASK], tools=[tool]) == expected
        for kind in ("custom", "web_search", "builtin_function", "mcp"):
            with pytest.raises(openai.BadRequestError, match=kind):
                server.chat([ASK], tools=[{"type": kind, **flat}, TOOL])


def test_the_line_that_changes_with_every_request_of_claude_code_is_left_out() -> None:
    def line(number: int) -> str:
        return f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={number:05x};"

    def block(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}

    with Server(tiny(), KIMI).clients() as server:
        expected = server.turns([ASK], system="You are Claude Code.\nx")
        for number in (1, 2):
            given = (
                f"{line(number)}\nYou are Claude Code.\nx",
                f"{line(number)}\n\nYou are Claude Code.\nx",
                [block(line(number)), block("You are Claude Code.\nx")],
                [block(f"{line(number)}\n"), block("You are Claude Code."), block("x")],
            )
            for system in given:
                assert server.turns([ASK], system=system) == expected
                counted = server.anthropic.messages.count_tokens(model="tiny", messages=[ASK], system=system)
                assert counted.input_tokens == len(server.engine.requests[-1].prompt)
        assert server.turns([ASK], system=line(1)) == server.turns([ASK])
        said = f"What is this?\n{line(1)}"
        assert said in server.turns([ASK], system=said)
        assert line(1) in server.turns([{"role": "user", "content": line(1)}])
