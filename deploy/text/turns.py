"""Conversations in the shapes of other APIs as the messages of a chat: Anthropic's turns of content blocks, and the
items of OpenAI's Responses API. Routers and replicas share this: equal conversations must give equal prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from deploy.text.chat import Content, content_of, joined, reasoning_of

Messages = list[dict[str, Any]]
Blocks = Sequence[Mapping[str, Any]]


def content_of_blocks(blocks: Blocks) -> Content:
    """The texts of Anthropic's content blocks."""
    return content_of([block["text"] for block in blocks if block["type"] == "text"])


def messages_of_turns(system: Blocks, turns: Sequence[tuple[str, Blocks]]) -> Messages:
    """Anthropic's turns, each a role and blocks, behind the system's blocks, which may be none."""
    messages: Messages = [{"role": "system", "content": content_of_blocks(system)}] if system else []
    for role, blocks in turns:
        messages += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    return messages


def goes_on(messages: Messages) -> bool:
    """Whether the last message is the beginning of the answer, as Anthropic's clients mean one of the assistant's."""
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def thinking_variables(kind: str | None) -> dict[str, bool]:
    """Template variables for the type in Anthropic's field `thinking`, under the names that the templates of these
    models know it by; None where there is no such field."""
    return {} if kind == "adaptive" else dict.fromkeys(("thinking", "enable_thinking"), kind == "enabled")


def _assistant(blocks: Blocks) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content_of_blocks(blocks)}
    if thought := "\n".join(block["thinking"] for block in blocks if block["type"] == "thinking"):
        message["reasoning_content"] = thought
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": block["name"], "arguments": block.get("input")},
        }
        for block in blocks
        if block["type"] == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def _user(blocks: Blocks) -> Messages:
    """Results of tools are messages of their own, and stand before what the user says."""
    messages: Messages = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            said_back = content if isinstance(content, str) else content_of_blocks(content)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said_back})
    said = [block for block in blocks if block["type"] == "text"]
    if said or not messages:
        messages.append({"role": "user", "content": content_of_blocks(said)})
    return messages


def messages_of_items(items: Sequence[Mapping[str, Any]], read: Callable[[Any], Content]) -> Messages:
    """Items of the Responses API, each with a type: what an assistant thought, said and called in one go is one
    message. `read` makes a message's content of an item's, and raises for what it cannot."""
    messages: Messages = []
    answer: dict[str, Any] | None = None
    """The assistant's message that goes on."""

    def assistant(*taken: str) -> dict[str, Any]:
        nonlocal answer
        if answer is None or any(answer.get(name) for name in taken):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        return answer

    for item in items:
        kind = item["type"]
        if kind == "reasoning":
            thought = next((read(item[name]) for name in ("content", "summary") if item.get(name)), "")
            assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = joined(thought)
        elif kind == "message" and item["role"] == "assistant":
            said = assistant("content", "tool_calls")
            said["content"] = read(item.get("content"))
            if (reasoning := reasoning_of(item)) is not None:
                said["reasoning_content"] = reasoning
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item.get("arguments")}
            call = {"id": item["call_id"], "type": "function", "function": function}
            assistant().setdefault("tool_calls", []).append(call)
        else:
            answer = None
            content = read(item.get("content" if kind == "message" else "output"))
            if kind == "message":
                messages.append({"role": item["role"], "content": content})
            else:
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def with_instructions(messages: Messages, instructions: str | None) -> Messages:
    """The messages behind the field `instructions`. Templates want one system message, and first."""
    if instructions is None:
        return messages
    system: dict[str, Any] = {"role": "system", "content": instructions}
    if messages and messages[0]["role"] in ("system", "developer"):
        given: Content = messages[0]["content"]
        first, *more = [given] if isinstance(given, str) else [part["text"] for part in given]
        system["content"] = content_of([f"{instructions}\n\n{first}", *more])
        messages = messages[1:]
    return [system, *messages]
