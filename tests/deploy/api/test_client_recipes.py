"""The recipes of docs/clients.md against a server of the tests. Those in Python are executed as they stand there. For
programs, requests in their public formats, written by hand, are sent with the settings that the page shows."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from test_messages import TOKENIZER
from test_response_tools import CODEX, written
from tool_templates import KIMI

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.messages import Request

PAGE = (Path(__file__).parents[3] / "docs" / "clients.md").read_text()
RECIPES = {part.partition("\n")[0]: part.partition("\n")[2] for part in PAGE.split("\n## ")[1:]}
MODEL = "DeepSeek-V3.1"
URL = "http://127.0.0.1:8000"
ANSWER = "It is 42."
PACKAGES = {
    "OpenAI SDK": "openai",
    "Anthropic SDK": "anthropic",
    "OpenAI Agents SDK": "agents",
    "LiteLLM": "litellm",
    "LangChain": "langchain_openai",
}


class Server:
    """Server whose model calls the tool `name` where the prompt has it, and answers once the prompt has the tool's
    result."""

    def __init__(self, name: str, arguments: dict[str, Any], result: str) -> None:
        self.call, self.name, self.result = written(name, arguments), name, result
        self.engine = FakeEngine(self.script, replace(INFO, name=MODEL, max_context=1 << 15, vocab_size=1024))
        self.app = create_app(self.engine, TOKENIZER, ApiConfig(chat_template=KIMI, api_keys=("none",)))

    def script(self, request: Request) -> Iterator[Any]:
        prompt = TOKENIZER.decode(list(request.prompt), skip_special_tokens=False)
        text = self.call if f'"{self.name}"' in prompt and not self.answered(prompt) else ANSWER
        thinks = not prompt.endswith("<think></think>")
        return say(TOKENIZER.encode("Hm.</think>" * thinks + text, add_special_tokens=False))(request)

    def answered(self, prompt: str) -> bool:
        return f"## Return of functions.{self.name}:0\n{self.result}" in prompt

    @property
    def prompts(self) -> list[str]:
        return [TOKENIZER.decode(list(r.prompt), skip_special_tokens=False) for r in self.engine.requests]

    @contextmanager
    def at(self) -> Iterator[str]:
        with serving(self.app) as port:
            yield f"http://127.0.0.1:{port}"


def block(recipe: str, language: str, url: str) -> str:
    """The only block of this language in the recipe, asking the server at `url`."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```", RECIPES[recipe], re.MULTILINE | re.DOTALL)
    return found.replace(URL, url)


def exported(recipe: str, url: str) -> dict[str, str]:
    return dict(re.findall(r"^export (\w+)=(\S+)$", block(recipe, "sh", url), re.MULTILINE))


def test_every_recipe_is_tried() -> None:
    assert {*RECIPES} == {*PACKAGES, "Claude Code", "Codex CLI", "Open WebUI", "Cline"}
    assert {name for name, text in RECIPES.items() if "```python" in text} == {*PACKAGES}
    assert all(URL in text for text in RECIPES.values())


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.soak] if name in ("LiteLLM", "LangChain") else []),  # of the extra `clients`
                pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed"),
            ],
        )
        for name, package in PACKAGES.items()
    ],
)
async def test_a_recipe_in_python_runs_as_it_stands(recipe: str, tmp_path: Path) -> None:
    server = Server("add", {"a": 19, "b": 23}, "42")
    with server.at() as url:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI", "ANTHROPIC"))}
        given = exported(recipe, url) if "```sh" in RECIPES[recipe] else {}
        (tmp_path / "recipe.py").write_text(block(recipe, "python", url))
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, str(tmp_path / "recipe.py")),
            env={**kept, **given, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # the map would come from the network
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        said, errors = await program.communicate()
    assert program.returncode == 0, errors.decode()[-3000:]
    assert said.decode().strip() == ANSWER, errors.decode()[-3000:]
    assert len(server.engine.requests) == (2 if "def add" in RECIPES[recipe] else 1)
    assert server.answered(server.prompts[-1]) == ("def add" in RECIPES[recipe])


CLAUDE_CODE: dict[str, Any] = {
    "max_tokens": 16384,
    "system": [
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
        {"type": "text", "text": "Working directory: /src", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"},
                {"type": "text", "text": "Which files are here?", "cache_control": {"type": "ephemeral"}},
            ],
        }
    ],
    "tools": [
        {
            "name": "Bash",
            "description": "Runs a command.",
            "input_schema": {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "number"}},
                "required": ["command"],
                "additionalProperties": False,
            },
        }
    ],
    "metadata": {"user_id": "user_0_account__session_0"},
    "thinking": {"type": "enabled", "budget_tokens": 8192},
    "betas": ["interleaved-thinking-2025-05-14", "claude-code-20250219"],
}


def test_claude_code() -> None:
    server = Server("Bash", {"command": "ls"}, "a.py")
    with server.at() as url:
        given = exported("Claude Code", url)
        assert {given["ANTHROPIC_MODEL"], given["ANTHROPIC_DEFAULT_HAIKU_MODEL"]} == {MODEL}
        assert int(given["CLAUDE_CODE_MAX_OUTPUT_TOKENS"]) == CLAUDE_CODE["max_tokens"]
        body = {**CLAUDE_CODE, "model": given["ANTHROPIC_MODEL"]}
        with anthropic.Anthropic(
            base_url=given["ANTHROPIC_BASE_URL"], auth_token=given["ANTHROPIC_AUTH_TOKEN"], max_retries=0
        ) as client:
            with client.beta.messages.stream(**body) as stream:
                assert [event.type for event in stream][-1] == "message_stop"
                first = stream.get_final_message()
            assert first.stop_reason == "tool_use"
            assert [part.type for part in first.content] == ["thinking", "tool_use"]
            assert (first.content[-1].name, first.content[-1].input) == ("Bash", {"command": "ls"})
            result = {
                "type": "tool_result",
                "tool_use_id": first.content[-1].id,
                "content": "a.py",
                "is_error": False,
                "cache_control": {"type": "ephemeral"},
            }
            turns = [
                *body["messages"],
                {"role": "assistant", "content": [part.model_dump(exclude_none=True) for part in first.content]},
                {"role": "user", "content": [result]},
            ]
            counted = client.beta.messages.count_tokens(
                **{name: body[name] for name in ("model", "system", "tools", "thinking")}, messages=turns
            )
            with client.beta.messages.stream(**{**body, "messages": turns}) as stream:
                assert [event.type for event in stream][-1] == "message_stop"
                second = stream.get_final_message()
            assert (second.content[-1].text, second.stop_reason) == (ANSWER, "end_turn")
            assert counted.input_tokens == len(server.engine.requests[-1].prompt)
            title = client.beta.messages.create(
                model=given["ANTHROPIC_DEFAULT_HAIKU_MODEL"],
                max_tokens=512,
                extra_body={"temperature": 1},
                system=[{"type": "text", "text": "Write a title."}],
                messages=[{"role": "user", "content": "Which files are here?"}],
            )
            assert title.content[-1].text == ANSWER


def test_codex() -> None:
    server = Server("exec_command", {"cmd": "ls"}, "a.py")
    with server.at() as url:
        config = tomllib.loads(block("Codex CLI", "toml", url))
        provider = config["model_providers"][config["model_provider"]]
        assert provider["wire_api"] == "responses"
        key = exported("Codex CLI", url)[provider["env_key"]]
        body = {**CODEX, "model": config["model"]}
        with openai.OpenAI(base_url=provider["base_url"], api_key=key, max_retries=0) as client:
            events = list(client.responses.create(**body))
            assert events[-1].type == "response.completed"
            first = events[-1].response
            assert [item.type for item in first.output] == ["reasoning", "function_call"]
            call = first.output[-1]
            assert (call.name, json.loads(call.arguments)) == ("exec_command", {"cmd": "ls"})
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "a.py"}
            turns = [*body["input"], *(item.model_dump(exclude_none=True) for item in first.output), result]
            events = list(client.responses.create(**{**body, "input": turns}))
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == ANSWER


def function(name: str, argument: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


def chatted(client: openai.OpenAI, body: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]], bool]:
    """Return the text of a stream of chunks, why it ends, its calls as the next request has them, and whether it has
    usage."""
    said, reason, usage = "", "", False
    calls: list[dict[str, Any]] = []
    for chunk in client.chat.completions.create(**body, stream=True):
        usage |= chunk.usage is not None
        for choice in chunk.choices:
            assert reason == "", "something comes behind the end"
            said, reason = said + (choice.delta.content or ""), choice.finish_reason or ""
            for delta in choice.delta.tool_calls or []:
                if delta.index == len(calls):
                    named = {"name": delta.function.name, "arguments": ""}
                    calls.append({"index": delta.index, "id": delta.id, "type": "function", "function": named})
                calls[delta.index]["function"]["arguments"] += delta.function.arguments or ""
    return said, reason, calls, usage


def test_open_webui() -> None:
    server = Server("search_notes", {"query": "sum"}, "42")
    with server.at() as url:
        given = exported("Open WebUI", url)
        with openai.OpenAI(
            base_url=given["OPENAI_API_BASE_URL"], api_key=given["OPENAI_API_KEY"], max_retries=0
        ) as client:
            assert [model.id for model in client.models.list()] == [MODEL]
            body: dict[str, Any] = {
                "model": MODEL,
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "The sum?"}],
                "tools": [function("search_notes", "query")],
            }
            said, reason, calls, _ = chatted(client, body)
            assert (said, reason) == ("", "tool_calls")
            assert json.loads(calls[0]["function"]["arguments"]) == {"query": "sum"}
            turns = [
                {"role": "assistant", "content": "", "tool_calls": calls},
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": "42"},
            ]
            body["messages"] = [*body["messages"], *turns]
            assert chatted(client, body)[:3] == (ANSWER, "stop", [])
            title = client.chat.completions.create(
                model=MODEL,
                messages=[{"role": "user", "content": "### Task:\nGenerate a title."}],
                max_completion_tokens=1000,
                stream=False,
            )
            assert title.choices[0].message.content == ANSWER


def test_cline() -> None:
    server = Server("read_file", {"path": "a.py"}, "x = 1")
    with server.at() as url:
        fields = dict(re.findall(r"^\| ([\w ]+) \| `(\S+)` \|$", RECIPES["Cline"], re.MULTILINE))
        base = fields["Base URL"].replace(URL, url)
        with openai.OpenAI(base_url=base, api_key=fields["API Key"], max_retries=0) as client:
            asked = [{"type": "text", "text": "<task>\nWhat is in a.py?\n</task>"}]
            body: dict[str, Any] = {
                "model": fields["Model ID"],
                "messages": [{"role": "system", "content": "You edit code."}, {"role": "user", "content": asked}],
                "temperature": 0,
                "stream_options": {"include_usage": True},
                "tools": [function("read_file", "path")],
                "tool_choice": "auto",
                "parallel_tool_calls": False,
            }
            said, reason, calls, usage = chatted(client, body)
            assert (said, reason, usage) == ("", "tool_calls", True)
            assert json.loads(calls[0]["function"]["arguments"]) == {"path": "a.py"}
            turns = [
                {"role": "assistant", "content": None, "tool_calls": calls},
                {"role": "tool", "tool_call_id": calls[0]["id"], "content": "x = 1"},
                {"role": "user", "content": [{"type": "text", "text": "<environment_details>"}]},
            ]
            body["messages"] = [*body["messages"], *turns]
            assert chatted(client, body) == (ANSWER, "stop", [], True)
