"""Fields about thinking, and turns that hold thinking, reach an encoder that writes chats in place of a template."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from test_thinking_fields import OFF, ON, OPEN
from tiny_tokenizer import without_template

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from deploy.routing.request_features import FeatureReader
from deploy.text.effort import EFFORTS
from deploy.text.encoders import ENCODERS
from workers.protocol.request import NO_ROOT, pack_keys, page_keys, unpack_keys

PUBLISHED = Path(__file__).parent.parent / "text" / "published"
EXAMPLE = json.loads((PUBLISHED / "deepseek_v32_example.json").read_text())
PROMPT = (PUBLISHED / "deepseek_v32_example.txt").read_text().removesuffix("\n")
BEGIN, END, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
V32 = without_template(ENCODERS["deepseek_v32"], BEGIN, END, USER, ASSISTANT, "｜DSML｜", "</think>")
THINKS, ANSWERS = f"{USER}q{ASSISTANT}<think>", f"{USER}q{ASSISTANT}</think>"
ASK: Any = {"role": "user", "content": "q"}
ENABLED: Any = {"type": "enabled", "budget_tokens": 1024}


@dataclass
class Clients:
    """Clients of a server whose model is DeepSeek V3.2."""

    openai: openai.OpenAI
    anthropic: anthropic.Anthropic
    engine: FakeEngine

    @property
    def prompt(self) -> str:
        """The newest."""
        return V32.decode(self.engine.requests[-1].prompt, skip_special_tokens=False)

    def turns(self, messages: list[Any], **body: Any) -> str:
        """The prompt of a request to /v1/messages."""
        self.anthropic.messages.create(model="tiny", max_tokens=4, messages=messages, **body)
        return self.prompt

    async def routed_keys(self, body: dict[str, Any]) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """The page hashes that a router reads off `body`, and those of the newest prompt."""
        found = await FeatureReader(V32, None).read(json.dumps({"model": "tiny", **body}).encode())
        made = page_keys(self.engine.requests[-1].prompt)
        return tuple(found.keys(NO_ROOT)), tuple(unpack_keys(pack_keys(made)))


@contextmanager
def served() -> Iterator[Clients]:
    answer = V32.encode("Fine.", add_special_tokens=False)
    engine = FakeEngine(say(answer), replace(INFO, max_context=8192, vocab_size=1024))
    with (
        serving(create_app(engine, V32, ApiConfig())) as port,
        openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=f"http://127.0.0.1:{port}", api_key="none", max_retries=0) as other,
    ):
        yield Clients(client, other, engine)


def blocks(message: dict[str, Any]) -> list[Any]:
    """An assistant's message as Anthropic's clients keep it."""
    made: list[Any] = []
    if thought := message.get("reasoning_content"):
        made.append({"type": "thinking", "thinking": thought, "signature": ""})
    if text := message.get("content"):
        made.append({"type": "text", "text": text})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = json.loads(function["arguments"])
        made.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments})
    return made


def as_turns(messages: list[dict[str, Any]]) -> list[Any]:
    """Messages of a chat as Anthropic's turns: results that follow each other are one turn of the user."""
    turns: list[Any] = []
    for message in messages:
        if message["role"] == "assistant":
            turns.append({"role": "assistant", "content": blocks(message)})
        elif message["role"] == "tool":
            if turns[-1]["role"] != "user":
                turns.append({"role": "user", "content": []})
            made = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}
            turns[-1]["content"].append(made)
        else:
            turns.append({**message})
    return turns


def as_items(messages: list[dict[str, Any]]) -> list[Any]:
    """The same as items of the Responses API."""
    items: list[Any] = []
    for message in messages:
        if message["role"] == "tool":
            call_id, output = message["tool_call_id"], message["content"]
            items.append({"type": "function_call_output", "call_id": call_id, "output": output})
            continue
        if thought := message.get("reasoning_content"):
            text = {"type": "summary_text", "text": thought}
            items.append({"type": "reasoning", "id": f"rs_{len(items)}", "summary": [text]})
        if said := message.get("content"):
            items.append({"role": message["role"], "content": said})
        for call in message.get("tool_calls", ()):
            items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


SYSTEM, *SAID = EXAMPLE["messages"]
FUNCTIONS = [tool["function"] for tool in EXAMPLE["tools"]]
OF_ANTHROPIC: Any = [
    {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]} for each in FUNCTIONS
]
OF_RESPONSES: Any = [{"type": "function", "strict": False, **each} for each in FUNCTIONS]


def test_the_encoder_s_own_switch_is_what_thinking_is_told_by() -> None:
    assert V32.thinking_switches(None, tools=False) == V32.thinking_switches(None, tools=True) == {"thinking"}
    # A template from the settings takes the encoder's place, and its switch is another.
    assert V32.thinking_switches("{{ enable_thinking }}{{ reasoning_effort }}", tools=False) == {
        "enable_thinking",
        "reasoning_effort",
    }


def test_every_field_of_chats_about_thinking_reaches_the_encoder() -> None:
    with served() as clients:
        for cases, ending in ((ON, THINKS), (OFF, ANSWERS), (OPEN, ANSWERS)):
            for fields in cases:
                clients.openai.chat.completions.create(model="tiny", messages=[ASK], extra_body=fields)
                assert clients.prompt == BEGIN + ending, fields


def test_efforts_of_chats_and_responses_reach_the_encoder() -> None:
    with served() as clients:
        for effort in EFFORTS:
            given: Any = effort
            wanted = BEGIN + (ANSWERS if effort in ("none", "auto", "default") else THINKS)
            clients.openai.chat.completions.create(model="tiny", messages=[ASK], reasoning_effort=given)
            assert clients.prompt == wanted, effort
            clients.openai.responses.create(model="tiny", input=[ASK], reasoning={"effort": given})
            assert clients.prompt == wanted, effort


def test_thinking_of_anthropic_s_clients_reaches_the_encoder() -> None:
    """The clients' effort does not reach it: V3.2 knows no degrees, and thinking is what has it think."""
    with served() as clients:
        for thinking, wanted in (
            (ENABLED, THINKS),
            ({"type": "disabled"}, ANSWERS),
            ({"type": "adaptive"}, ANSWERS),
            (None, ANSWERS),
        ):
            fields: dict[str, Any] = {} if thinking is None else {"thinking": thinking}
            assert clients.turns([ASK], **fields) == BEGIN + wanted, thinking
            counted = clients.anthropic.messages.count_tokens(model="tiny", messages=[ASK], **fields)
            assert counted.input_tokens == len(clients.engine.requests[-1].prompt)
            for effort in ("low", "max"):
                body = {**fields, "extra_body": {"output_config": {"effort": effort}}}
                assert clients.turns([ASK], **body) == BEGIN + wanted, (thinking, effort)


async def test_routers_make_the_encoder_s_prompts() -> None:
    """A long result stands behind what was thought: hashes are of whole pages, and would not show how a prompt ends."""
    long = "the quick brown fox jumps over the lazy dog. " * 30
    messages: Any = [ASK, SAID[1], {"role": "tool", "tool_call_id": SAID[1]["tool_calls"][0]["id"], "content": long}]
    turns = as_turns(messages)
    with served() as clients:
        for cases in (ON[:8], (*OFF[:5], *OPEN)):
            seen = set()
            for fields in cases:
                clients.openai.chat.completions.create(model="tiny", messages=messages, extra_body=fields)
                found, made = await clients.routed_keys({"messages": messages, **fields})
                assert found == made != (), fields
                seen.add(made)
            assert len(seen) == 1
        for thinking in (ENABLED, {"type": "disabled"}, {"type": "adaptive"}):
            clients.turns(turns, thinking=thinking)
            found, made = await clients.routed_keys({"messages": turns, "max_tokens": 4, "thinking": thinking})
            assert found == made != (), thinking
            seen.add(made)
        assert len(seen) == 2


@pytest.mark.parametrize("most", [1, 3, 6, 8, 11, 12])
def test_the_published_example_over_all_three_endpoints(most: int) -> None:
    """Wherever its conversation stands. What was thought before the second question is no longer written then."""
    said = SAID[:most]
    with served() as clients:
        given: Any = {"model": "tiny", "reasoning_effort": "high"}
        clients.openai.chat.completions.create(messages=[SYSTEM, *said], tools=EXAMPLE["tools"], **given)
        prompt = clients.prompt
        if most >= 8:
            assert PROMPT.startswith(prompt)
        clients.openai.responses.create(
            model="tiny",
            instructions=SYSTEM["content"],
            input=as_items(said),
            tools=OF_RESPONSES,
            reasoning={"effort": "high"},
        )
        assert clients.prompt == prompt
        turned = clients.turns(as_turns(said), system=SYSTEM["content"], tools=OF_ANTHROPIC, thinking=ENABLED)
        # The last turn of an assistant without calls is what the answer begins with.
        goes_on = said[-1]["role"] == "assistant" and "tool_calls" not in said[-1]
        assert turned == (prompt.removesuffix(END) if goes_on else prompt)
        if most == len(SAID):
            assert (prompt, turned) == (PROMPT, PROMPT.removesuffix(END))


def test_thinking_of_earlier_turns_is_written_as_far_as_the_model_reads_it() -> None:
    thought: Any = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    withheld: Any = {"type": "redacted_thinking", "data": "x"}
    used: Any = {"type": "tool_use", "id": "a", "name": "f", "input": {"city": "Köln"}}
    answered: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "Rain."}]}
    call = '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n<｜DSML｜parameter name="city" string="true">Köln'
    call += "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>" + END
    result = "\n\n<function_results>\n<result>Rain.</result>\n</function_results>"
    text: Any = {"type": "text", "text": "I look."}

    def called(*content: Any) -> list[Any]:
        return [ASK, {"role": "assistant", "content": [*content, text, used]}, answered]

    with served() as clients:
        for content, written in (
            ((thought,), "Hm."),
            ((thought, withheld), "Hm.\n[Part of the reasoning was withheld.]"),
            ((withheld,), "[Part of the reasoning was withheld.]"),
            ((), ""),
        ):
            turns = called(*content)
            wanted = f"{BEGIN}{THINKS}{written}</think>I look.{call}{result}\n\n<think>"
            assert clients.turns(turns, thinking=ENABLED) == wanted
            off = f"{BEGIN}{ANSWERS}I look.{call}{result}\n\n</think>"
            assert clients.turns(turns) == off
            # A new question has what was thought before it left out.
            later = [*turns, {"role": "assistant", "content": [thought, text]}, ASK]
            past = f"{BEGIN}{ANSWERS}I look.{call}{result}\n\n</think>I look.{END}{THINKS}"
            assert clients.turns(later, thinking=ENABLED) == past
        # A system turn before a question is written where it stands.
        system = {"role": "system", "content": "Be short."}
        turns = [ASK, {"role": "assistant", "content": [thought, text]}, system, ASK]
        assert clients.turns(turns, thinking=ENABLED) == f"{BEGIN}{ANSWERS}I look.{END}Be short.{THINKS}"
