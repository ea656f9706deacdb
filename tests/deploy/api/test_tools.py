"""Tools and reasoning in chats: the openai client against a real server whose engine says what models would."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from fake_engine import INFO, FakeEngine, out, say, serving
from tiny_tokenizer import tiny, with_special
from tool_templates import DEEPSEEK_R1, DEEPSEEK_V3, DEEPSEEK_V31, GLM, HY4, KIMI, MISTRAL

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.parsing.registry import MARKERS
from tests.deploy.parsing.written_calls import with_ending
from workers.protocol.plan import TopLogprobs

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <b>now</b>.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
ASK: Any = [{"role": "user", "content": "Weather in Köln?"}]
THINK: Any = {"chat_template_kwargs": {"thinking": True}}
LARGE = replace(INFO, max_context=4096, vocab_size=1024)
V31_CALL = '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Köln", "days": %d}<｜tool▁call▁end｜>'
SAID = {
    "kimi_k2": (
        KIMI,
        "Two cities.</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        '<|tool_call_argument_begin|>{"city": "Köln", "days": 1}<|tool_call_end|><|tool_call_begin|>'
        'functions.get_weather:1<|tool_call_argument_begin|>{"city": "Köln", "days": 2}<|tool_call_end|>'
        "<|tool_calls_section_end|>",
    ),
    "deepseek_v31": (
        DEEPSEEK_V31,
        f"Two cities.</think>I look.<｜tool▁calls▁begin｜>{V31_CALL % 1}{V31_CALL % 2}<｜tool▁calls▁end｜>",
    ),
    "glm": (
        GLM,
        "Two cities.</think>I look."
        + "".join(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
            f"<arg_key>days</arg_key><arg_value>{days}</arg_value></tool_call>\n"
            for days in (1, 2)
        ),
    ),
    "hy_v4": (
        HY4,
        "Two cities.</think>I look.<tool_calls>"
        + "".join(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
            f"<arg_key>days</arg_key><arg_value>{days}</arg_value></tool_call>"
            for days in (1, 2)
        )
        + "</tool_calls>",
    ),
    "mistral": (
        MISTRAL,
        "[THINK]Two cities.[/THINK]I look."
        + "".join(f'[TOOL_CALLS]get_weather[ARGS]{{"city": "Köln", "days": {days}}}' for days in (1, 2)),
    ),
}


class Served:
    """A model that has something to say."""

    def __init__(self, template: str, text: str, width: int = 1, special: tuple[str, ...] = (), **config: Any) -> None:
        self.tokenizer = with_special(*special) if special else tiny()
        self.ids = self.tokenizer.encode(text, add_special_tokens=False)
        self.engine = FakeEngine(say(self.ids, width=width), LARGE)
        self.app = create_app(self.engine, self.tokenizer, ApiConfig(chat_template=template, **config))

    @contextmanager
    def client(self) -> Iterator[openai.OpenAI]:
        with (
            serving(self.app) as port,
            openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        ):
            yield client

    @property
    def prompt(self) -> str:
        """The prompt that the engine got last."""
        return self.tokenizer.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)


def streamed(client: openai.OpenAI, **body: Any) -> tuple[dict[str, Any], list[Any]]:
    """The message that a client puts together, and the events."""
    events = list(
        client.chat.completions.create(
            model="tiny", messages=ASK, stream=True, stream_options={"include_usage": True}, **body
        )
    )
    message: dict[str, Any] = {"content": "", "reasoning": "", "calls": {}, "finish": None}
    for event in events:
        for choice in event.choices:
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id:
                    assert call.index == len(message["calls"])
                    message["calls"][call.index] = [call.id, call.function.name, ""]
                message["calls"][call.index][2] += call.function.arguments
            message["finish"] = choice.finish_reason or message["finish"]
    return message, events


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", SAID)
def test_calls_and_reasoning_streamed_and_not(name: str, special: bool) -> None:
    """The markers may also be special tokens, which are left out of texts otherwise."""
    template, text = SAID[name]
    tags = ("[THINK]", "[/THINK]") if name == "mistral" else ("<think>", "</think>")
    tokens = (*MARKERS[name], *tags) if special else ()
    served = Served(template, text, special=tokens)
    with served.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], extra_body=THINK)
        message, events = streamed(client, tools=[TOOL], extra_body=THINK)
        served.engine.script = say(served.ids, width=5)
        assert [*streamed(client, tools=[TOOL], extra_body=THINK)[0]["calls"].values()][1][1:] == message["calls"][1][
            1:
        ]
        choice = answer.choices[0]
        assert choice.finish_reason == message["finish"] == "tool_calls"
        assert choice.message.content == message["content"] == "I look."
        assert choice.message.reasoning_content == message["reasoning"] == "Two cities."
        called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert called == [("get_weather", {"city": "Köln", "days": days}) for days in (1, 2)]
        assert [(call[1], json.loads(call[2])) for call in message["calls"].values()] == called
        ids = [call.id for call in choice.message.tool_calls]
        if name == "kimi_k2":
            assert ids == ["functions.get_weather:0", "functions.get_weather:1"]
            assert ids == [call[0] for call in message["calls"].values()]
        else:
            assert len({*ids, *(call[0] for call in message["calls"].values())}) == 4
        assert max(len(event.choices[0].delta.tool_calls or ()) for event in events[:-1]) == 1
        assert answer.usage == events[-1].usage
        reasoning = served.tokenizer.encode(text[: text.index(tags[1]) + len(tags[1])], add_special_tokens=False)
        assert answer.usage.completion_tokens_details.reasoning_tokens == len(reasoning)
        assert answer.usage.completion_tokens == len(served.ids) + 1


@pytest.mark.parametrize("parser", ["auto", "hy_v4"])
def test_tags_of_hy4_with_an_ending_of_the_checkpoints_own(parser: str) -> None:
    """The vocabulary says which; they are special tokens, and so is every tag of an answer."""
    _, plain = SAID["hy_v4"]
    text = with_ending(plain, ":open")
    tags = [with_ending(tag, ":open") for tag in (*MARKERS["hy_v4"], "<think>", "</think>")]
    served = Served(HY4, text, special=tuple(tags), tool_parser=parser, reasoning_parser=parser)
    with served.client() as client:
        extra = {"chat_template_kwargs": {"ending": ":open"}}
        answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], extra_body=extra)
        message, _ = streamed(client, tools=[TOOL], extra_body=extra)
        assert served.prompt.endswith("<assistant><think:open>")
        choice = answer.choices[0]
        assert choice.message.content == message["content"] == "I look."
        assert choice.message.reasoning_content == message["reasoning"] == "Two cities."
        called = [(call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
        assert called == [("get_weather", {"city": "Köln", "days": days}) for days in (1, 2)]
        assert [(call[1], json.loads(call[2])) for call in message["calls"].values()] == called


CALL: Any = {"id": "functions.get_weather:0", "type": "function"}
CALL["function"] = {"name": "get_weather", "arguments": '{"city":  "Köln", "days": 2}'}
HISTORY: Any = [
    *ASK,
    {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "functions.get_weather:0", "content": "Rain."},
]
RENDERED = {
    KIMI: "<think>Hm.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    '<|tool_call_argument_begin|>{"city":  "Köln", "days": 2}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    "<|im_tool|>tool<|im_middle|>## Return of functions.get_weather:0\nRain.",
    DEEPSEEK_V31: '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city":  "Köln", "days": 2}<｜tool▁call▁end｜>'
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁output▁begin｜>Rain.<｜tool▁output▁end｜>",
    DEEPSEEK_V3: '<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{"city": "Köln", "days": 2}\n```',
    GLM: "<|assistant|><think>Hm.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln</arg_value>"
    "<arg_key>days</arg_key><arg_value>2</arg_value></tool_call><|observation|><tool_response>Rain.</tool_response>",
    HY4: "<assistant><think>Hm.</think><tool_calls><tool_call>get_weather<arg_key>city</arg_key><arg_value>Köln"
    "</arg_value><arg_key>days</arg_key><arg_value>2</arg_value></tool_call></tool_calls><tool_response>Rain.",
}


@pytest.mark.parametrize("template", RENDERED)
def test_tools_calls_and_results_are_written_as_the_template_has_them(template: str) -> None:
    served = Served(template, "Rain.")
    with served.client() as client:
        client.chat.completions.create(model="tiny", messages=HISTORY, tools=[TOOL])
        assert RENDERED[template] in served.prompt
        assert '"name": "get_weather"' in served.prompt
        assert "The weather <b>now</b>." in served.prompt
        client.chat.completions.create(model="tiny", messages=HISTORY, tools=[TOOL], tool_choice="none")
        assert "The weather" not in served.prompt
        assert RENDERED[template] in served.prompt
        tokens = httpx.post(
            f"{client.base_url}".replace("/v1/", "/tokenize"), json={"messages": HISTORY, "tools": [TOOL]}
        ).json()
        assert "The weather" in served.tokenizer.decode(tokens["tokens"], skip_special_tokens=False)


def test_parallel_calls_can_be_switched_off() -> None:
    template, text = SAID["deepseek_v31"]
    for width in (1, 1000):
        served = Served(template, text, width)
        with served.client() as client:
            message, events = streamed(client, tools=[TOOL], parallel_tool_calls=False)
            assert len(message["calls"]) == 1
            assert message["finish"] == "tool_calls"
            assert events[-1].usage.completion_tokens < len(served.ids)
            answer = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], parallel_tool_calls=False)
            assert len(answer.choices[0].message.tool_calls) == 1


def test_without_tools_calls_are_text() -> None:
    template, text = SAID["glm"]
    with Served(template, text).client() as client:
        for more in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
            choice = client.chat.completions.create(model="tiny", messages=ASK, **more).choices[0]
            assert choice.message.content == text.split("</think>")[1]
            assert (choice.message.tool_calls, choice.finish_reason) == (None, "stop")


def test_broken_calls_are_content() -> None:
    text = "<｜tool▁calls▁begin｜>" + V31_CALL.replace('"Köln"', "Köln am Rhein") % 1
    with Served(DEEPSEEK_V31, text).client() as client:
        choice = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL]).choices[0]
        content = 'get_weather{"city": Köln am Rhein, "days": 1}'
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (content, None, "stop")
        message, _ = streamed(client, tools=[TOOL])
        assert (message["content"], message["finish"]) == (content, "stop")


def test_an_answer_that_is_cut_says_so() -> None:
    template, text = SAID["deepseek_v31"]
    served = Served(template, text)
    with served.client() as client:
        cut = len(served.ids) - 120
        choice = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], max_tokens=cut).choices[0]
        assert choice.finish_reason == "length"
        assert len(choice.message.tool_calls) == 1
        assert streamed(client, tools=[TOOL], max_tokens=cut)[0]["finish"] == "length"
        for count in range(1, len(served.ids), 7):
            streamed(client, tools=[TOOL], max_tokens=count)


def test_n_choices_stop_strings_and_log_probabilities() -> None:
    template, text = SAID["kimi_k2"]
    served = Served(template, text)
    scores = TopLogprobs(-0.5, (5, 6), (-0.5, -1.5))
    served.engine.script = lambda request: [
        *(out(token, logprobs=[scores] if request.sampling.logprobs >= 0 else []) for token in served.ids),
        out(1, finish="stop", logprobs=[scores] if request.sampling.logprobs >= 0 else []),
    ]
    with served.client() as client:
        answer = client.chat.completions.create(
            model="tiny", messages=ASK, tools=[TOOL], n=2, logprobs=True, top_logprobs=1
        )
        for choice in answer.choices:
            assert len(choice.message.tool_calls) == 2
            assert len(choice.logprobs.content) == len(served.ids) + 1
        message, events = streamed(client, tools=[TOOL], logprobs=True, extra_body={"return_token_ids": True})
        assert len(message["calls"]) == 2
        tokens = [t for event in events for choice in event.choices for t in getattr(choice, "token_ids", None) or ()]
        assert tokens == [*served.ids, 1]
        choice = client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL], stop="look.").choices[0]
        assert (choice.message.content, choice.finish_reason) == ("I ", "stop")


def test_reasoning_follows_the_prompt() -> None:
    served = Served(KIMI, "It rains.")
    with served.client() as client:
        choice = client.chat.completions.create(model="tiny", messages=ASK).choices[0]
        assert (choice.message.content, choice.message.reasoning_content) == ("", "It rains.")
        off: Any = {"chat_template_kwargs": {"thinking": False}}
        answer = client.chat.completions.create(model="tiny", messages=ASK, extra_body=off)
        assert answer.choices[0].message.content == "It rains."
        assert not hasattr(answer.choices[0].message, "reasoning_content")
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    served = Served(DEEPSEEK_V31, "Hm.</think>It rains.")
    with served.client() as client:
        message = client.chat.completions.create(model="tiny", messages=ASK, extra_body=THINK).choices[0].message
        assert (message.content, message.reasoning_content) == ("It rains.", "Hm.")
        begun: Any = [*ASK, {"role": "assistant", "content": "<think>Well, "}]
        more: Any = {"add_generation_prompt": False, "continue_final_message": True}
        message = client.chat.completions.create(model="tiny", messages=begun, extra_body=more).choices[0].message
        assert (message.content, message.reasoning_content) == ("It rains.", "Hm.")


def test_parsers_by_name_and_none() -> None:
    text = "Hm.</think>It rains."
    with Served(DEEPSEEK_R1, text).client() as client:
        message, _ = streamed(client)
        assert (message["content"], message["reasoning"]) == ("It rains.", "Hm.")
    with Served(DEEPSEEK_R1, text, reasoning_parser="none").client() as client:
        assert streamed(client)[0]["content"] == text
    unknown = "{{ tools | tojson if tools else '' }}{% for m in messages %}{{ m.content }}{% endfor %}"
    with Served(unknown, text).client() as client:
        with pytest.raises(openai.BadRequestError, match="--tool-parser"):
            client.chat.completions.create(model="tiny", messages=ASK, tools=[TOOL])
        assert streamed(client)[0]["content"] == text
    with Served(unknown, V31_CALL % 1, tool_parser="deepseek_v31", reasoning_parser="deepseek_r1").client() as client:
        assert len(streamed(client, tools=[TOOL])[0]["calls"]) == 1  # though the reasoning has not ended
    with pytest.raises(ValueError, match="tool_parser must be one of auto, none, deepseek_v3"):
        ApiConfig(tool_parser="gpt")


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("name", [name for name in SAID if name != "mistral"])
def test_stop_strings_are_looked_for_behind_the_reasoning(name: str, width: int) -> None:
    template, _ = SAID[name]
    text = "Is it END? END.\n\n</think>\n\nIt is the END of it."
    served = Served(template, text, width=width)
    with served.client() as client:
        for stops, content, reason in (
            (["END"], "It is the ", "END"),
            (["\n\n"], "It is the END of it.", None),
            (["</think>", "Is it"], "It is the END of it.", None),
            (["of it"], "It is the END ", "of it"),
            (["it.", "END?", "of it."], "It is the END ", "of it."),
        ):
            answer = client.chat.completions.create(model="tiny", messages=ASK, stop=stops, extra_body=THINK)
            message, _ = streamed(client, stop=stops, extra_body=THINK)
            choice = answer.choices[0]
            assert choice.message.content == message["content"] == content
            assert choice.message.reasoning_content == message["reasoning"] == "Is it END? END."
            assert choice.finish_reason == message["finish"] == "stop"
            assert choice.model_dump()["stop_reason"] == reason
        kept = client.chat.completions.create(
            model="tiny", messages=ASK, stop=["END"], extra_body={**THINK, "include_stop_str_in_output": True}
        )
        assert kept.choices[0].message.content == "It is the END"
        most = len(served.tokenizer.encode("Is it END? END.", add_special_tokens=False))
        cut = client.chat.completions.create(
            model="tiny", messages=ASK, stop=["END"], max_tokens=most, extra_body=THINK
        )
        assert (cut.choices[0].message.content, cut.choices[0].finish_reason) == ("", "length")
        late = client.chat.completions.create(
            model="tiny", messages=ASK, stop=["END"], extra_body={**THINK, "min_tokens": len(served.ids)}
        )
        assert late.choices[0].message.content == "It is the END of it."


@pytest.mark.parametrize("width", [1, 6])
@pytest.mark.parametrize("name", SAID)
def test_stop_strings_end_content_and_no_call(name: str, width: int) -> None:
    """Clients cannot know how a model writes its calls: those are told whole, whatever stands in them."""
    template, text = SAID[name]
    served = Served(template, text, width=width)
    with served.client() as client:
        for stops, content, calls in (
            (["I look"], "", 0),
            (["look.", "city"], "I ", 0),
            (["Köln"], "I look.", 2),
            (["get_weather", "city", "days", "1"], "I look.", 2),
            ([">", "]", '"', "｜"], "I look.", 2),
            (["\n", ".<", ".["], "I look.", 2),
        ):
            answer = client.chat.completions.create(
                model="tiny", messages=ASK, tools=[TOOL], stop=stops, extra_body=THINK
            )
            message, _ = streamed(client, tools=[TOOL], stop=stops, extra_body=THINK)
            choice = answer.choices[0]
            arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls or ()]
            assert arguments == [{"city": "Köln", "days": days} for days in (1, 2)][:calls], stops
            assert [json.loads(call[2]) for call in message["calls"].values()] == arguments
            assert (choice.message.content or "") == message["content"] == content, stops
            assert choice.finish_reason == message["finish"] == ("tool_calls" if calls else "stop")
            assert (choice.model_dump()["stop_reason"] in stops) is not bool(calls)
            assert choice.message.reasoning_content == message["reasoning"] == "Two cities."


@pytest.mark.parametrize(
    ("said", "more", "content", "reason"),
    [
        (" It is END of it.", {}, "I look. It is ", "END"),
        (" It is END of it.", {"include_stop_str_in_output": True}, "I look. It is END", "END"),
        (" It is END of it.", {"min_tokens": True}, "I look. It is END of it.", None),
        (" It is the E", {}, "I look. It is the E", None),
        (" It is EN<tool_call>get_weather</tool_call>D", {}, "I look. It is END", None),
        (" It is EN</tool_call>D of it.", {}, "I look. It is ", "END"),
    ],
)
def test_stop_strings_behind_a_call(said: str, more: dict[str, Any], content: str, reason: str | None) -> None:
    template, text = SAID["glm"]
    served = Served(template, text.strip() + said)
    if "min_tokens" in more:
        more = {"min_tokens": len(served.ids)}
    with served.client() as client:
        body: Any = {"tools": [TOOL], "stop": ["END"], "extra_body": {**THINK, **more}}
        choice = client.chat.completions.create(model="tiny", messages=ASK, **body).choices[0]
        message, _ = streamed(client, **body)
        assert choice.message.content == message["content"] == content
        assert choice.model_dump()["stop_reason"] == reason
        assert len(choice.message.tool_calls) == len(message["calls"]) == 2 + ("get_weather" in said)


def test_the_setting_that_watches_all_text_cuts_calls() -> None:
    for name, (template, text) in SAID.items():
        served = Served(template, text, stop_in_reasoning=True)
        with served.client() as client:
            body: Any = {"model": "tiny", "messages": ASK, "tools": [TOOL], "stop": ["ln"], "extra_body": THINK}
            choice = client.chat.completions.create(**body).choices[0]
            assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None), name
            assert choice.message.content.startswith("I look.")
            assert not any(marker in choice.message.content for marker in MARKERS[name])


def test_a_setting_has_stop_strings_end_the_reasoning_too() -> None:
    served = Served(KIMI, "Is it END? END.</think>It is the END.", stop_in_reasoning=True)
    with served.client() as client:
        answer = client.chat.completions.create(model="tiny", messages=ASK, stop=["END"], extra_body=THINK)
        assert answer.choices[0].message.content == ""
        assert answer.choices[0].message.reasoning_content == "Is it"
        assert answer.choices[0].finish_reason == "stop"
