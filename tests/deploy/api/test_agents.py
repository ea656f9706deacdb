"""The loop of OpenAI's Agents SDK with a local tool, against a running server whose model follows a script: it calls
the tool, gets what the tool gave, and answers with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from fake_engine import INFO, FakeEngine, say, serving
from tiny_tokenizer import tiny
from tool_templates import DEEPSEEK_V3

from deploy.api.app import create_app
from deploy.config.api import ApiConfig
from workers.protocol.messages import Request

agents = pytest.importorskip("agents")

CALL = (
    "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 19, "b": 23}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)


def script(request: Request) -> Iterator[Any]:
    """Calls, and once it is told what came of that, says it."""
    prompt = tiny().decode(list(request.prompt), skip_special_tokens=False)
    text = "It is 42." if "<｜tool｜>42" in prompt else CALL
    return say(tiny().encode(text, add_special_tokens=False))(request)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("api", ["chat", "responses"])
async def test_a_tool_is_called_and_its_result_answered_with(api: str, streamed: bool) -> None:
    calls: list[tuple[int, int]] = []

    @agents.function_tool
    def add(a: int, b: int) -> int:
        """Adds two numbers."""
        calls.append((a, b))
        return a + b

    agents.set_tracing_disabled(True)
    engine = FakeEngine(script, replace(INFO, max_context=4096))
    kinds = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}
    with serving(create_app(engine, tiny(), ApiConfig(chat_template=DEEPSEEK_V3))) as port:
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="x", max_retries=0) as client:
            model = kinds[api](model="tiny", openai_client=client)
            agent = agents.Agent(name="adder", instructions="Add with the tool.", model=model, tools=[add])
            if streamed:
                result = agents.Runner.run_streamed(agent, "What is 19 + 23?")
                kinds_seen = {event.type async for event in result.stream_events()}
                assert "run_item_stream_event" in kinds_seen
            else:
                result = await agents.Runner.run(agent, "What is 19 + 23?")
    assert calls == [(19, 23)]
    assert result.final_output == "It is 42."
    assert len(engine.requests) == 2
