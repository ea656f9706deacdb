"""The demo model's chat template: tools and thinking, and plain chats as the model was trained on them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import openai
import pytest
from demo_server import demo
from fake_engine import INFO, FakeEngine, say, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.text.tokenizer import Tokenizer
from workers.config import DEMO_MODEL

TRAINED_ON = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The template of the chats that the model was trained on: those of `assets/training`."""
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "paint",
        "description": "Paints a wall.",
        "parameters": {
            "type": "object",
            "properties": {"color": {"enum": ["red", "green"]}, "coats": {"type": "integer"}},
            "required": ["color", "coats"],
        },
    },
}
STOP: Any = {"type": "function", "function": {"name": "stop"}}
ASK: Any = [{"role": "user", "content": "Paint it."}]
CALL: Any = {"type": "function", "function": {"name": "paint", "arguments": '{"color": "red", "coats": 2}'}, "id": "c1"}
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=20)},
        optional={"name": st.just("Ann")},
    ),
    min_size=1,
    max_size=5,
)


def tokenizer() -> Tokenizer:
    found = Tokenizer.load(DEMO_MODEL)
    assert found is not None
    return found


TOKENIZER = tokenizer()


@settings(max_examples=200, deadline=None)
@given(MESSAGES, st.booleans())
def test_plain_chats_are_what_the_model_was_trained_on(messages: list[dict[str, str]], opened: bool) -> None:
    def ids(**template: Any) -> list[int]:
        text = TOKENIZER.render_chat(messages, add_generation_prompt=opened, **template)
        return TOKENIZER.encode(text, add_special_tokens=False)

    assert ids() == ids(template=TRAINED_ON)


def test_tools_calls_results_and_reasoning_are_written() -> None:
    earlier = {"role": "assistant", "content": "Done.", "reasoning_content": "Long ago."}
    called = {"role": "assistant", "content": "", "reasoning_content": "Which?", "tool_calls": [CALL]}
    results = [{"role": "tool", "content": said, "tool_call_id": "c1"} for said in ("Wet.", "Dry.")]
    text = TOKENIZER.render_chat([*ASK, earlier, *ASK, called, *results], tools=[TOOL])
    described, said = text.split("<|user|>", 1)
    assert described.startswith("<|bos|><|system|># Tools\n" + json.dumps(TOOL["function"]))
    assert said == (
        "Paint it.<|assistant|>Done.<|eos|><|user|>Paint it.<|assistant|><think>Which?</think><tool_call>paint"
        "<arg_key>color</arg_key><arg_value>red</arg_value><arg_key>coats</arg_key><arg_value>2</arg_value></tool_call>"
        "<|eos|><|user|><tool_response>Wet.</tool_response><tool_response>Dry.</tool_response><|assistant|>"
    )


ENDINGS: list[tuple[dict[str, Any], str]] = [
    ({}, "<|assistant|>"),
    ({"reasoning_effort": "auto"}, "<|assistant|>"),
    ({"reasoning_effort": "high"}, "<|assistant|><think>"),
    ({"thinking": {"type": "enabled"}}, "<|assistant|><think>"),
    ({"reasoning_effort": "none"}, "<|assistant|><think></think>"),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "<|assistant|><think></think>"),
]


@pytest.mark.parametrize(("fields", "ending"), ENDINGS)
def test_fields_of_thinking_open_or_close_the_reasoning(fields: dict[str, Any], ending: str) -> None:
    engine = FakeEngine(
        say(TOKENIZER.encode("Hm.</think>Fine.", add_special_tokens=False)),
        replace(INFO, max_context=2048, vocab_size=TOKENIZER.size),
    )
    with (
        serving(create_app(engine, TOKENIZER, ApiConfig())) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        message = client.chat.completions.create(model="tiny", messages=ASK, extra_body=fields).choices[0].message
        opened = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], extra_body=fields)
    plain, with_tools = (TOKENIZER.decode(request.prompt, skip_special_tokens=False) for request in engine.requests)
    assert plain == f"<|bos|><|user|>Paint it.{ending}"
    assert with_tools.endswith(f"Paint it.{ending}")
    thinks = ending.endswith("<think>")
    for said in (message, opened.choices[0].message):
        assert said.content == ("Fine." if thinks else "Hm.</think>Fine.")
        assert getattr(said, "reasoning_content", None) == ("Hm." if thinks else None)


BOUND: list[tuple[dict[str, Any], str]] = [
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {**TOOL["function"], "strict": True}}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"max_reasoning_tokens": 5}, "max_reasoning_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BOUND)
def test_what_is_bound_behind_reasoning_says_that_it_cannot_be(fields: dict[str, Any], param: str) -> None:
    """The end of reasoning is several tokens of this vocabulary."""
    engine = FakeEngine(
        say(TOKENIZER.encode("Hm.", add_special_tokens=False)),
        replace(INFO, max_context=2048, vocab_size=TOKENIZER.size),
    )
    with (
        serving(create_app(engine, TOKENIZER, ApiConfig())) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):

        def ask(effort: str) -> None:
            more = {**fields, "reasoning_effort": effort}
            client.chat.completions.create(model="tiny", messages=ASK, extra_body=more)

        with pytest.raises(openai.BadRequestError, match=f"{param}: is enforced .*reasoning_effort: none") as found:
            ask("high")
        assert found.value.param == param
        ask("none")


@pytest.mark.long
async def test_the_demo_model_calls_tools_as_it_is_served() -> None:
    """No setting of a server is needed; the calls come through OpenAI's client, and the model goes on behind the
    result."""
    asked: Any = {"model": "demo", "messages": ASK, "tools": [TOOL, STOP], "max_tokens": 300, "temperature": 0.0}
    named = {"type": "function", "function": {"name": "stop"}}
    async with demo(3) as client:
        answer = await client.chat.completions.create(**asked, tool_choice="required", parallel_tool_calls=False)
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or ()
        assert call.type == "function"
        arguments = json.loads(call.function.arguments)
        if call.function.name == "paint":
            assert arguments["color"] in ("red", "green")
            assert type(arguments["coats"]) is int
        answer = await client.chat.completions.create(**asked, tool_choice=named)
        [stop] = answer.choices[0].message.tool_calls or ()
        assert (stop.function.name, json.loads(stop.function.arguments)) == ("stop", {})
        result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
        asked |= {"messages": [*ASK, choice.message, result], "max_tokens": 5}
        answer = await client.chat.completions.create(**asked)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
