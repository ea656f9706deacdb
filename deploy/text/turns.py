"""Conversations in the shapes of other APIs as the messages of a chat: Anthropic's turns of content blocks, and the
items of OpenAI's Responses API. Routers and replicas share this: equal conversations must give equal prompts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deploy.text.chat import Content, content_of, joined, reasoning_of
from deploy.text.effort import EFFORT, SWITCHES

Messages = list[dict[str, Any]]
Blocks = Sequence[Mapping[str, Any]]


NOT_SHOWN: Final[Mapping[str, str]] = {
    "image": "[An image was here, which this model cannot see.]",
    "document": "[A document was here, which this model cannot read.]",
    "container_upload": "[A file was here, which this model cannot read.]",
    "redacted_thinking": "[Part of the reasoning was withheld.]",
    "compaction": "[Earlier turns were left out here.]",
}
"""What a model reads in place of Anthropic's blocks that are no text, by their types."""


def said_in(block: Mapping[str, Any]) -> str | None:
    """One of Anthropic's content blocks in words that a model can read; None for those that say nothing by themselves:
    calls, results and thinking."""
    kind = block["type"]
    if kind == "text":
        return str(block["text"])
    if kind == "tool_reference":
        return f"[The tool {block.get('tool_name')} can be called.]"
    if kind == "server_tool_use":
        return f"[The server called its tool {block.get('name')}.]"
    if kind.endswith("_tool_result") and kind != "tool_result":
        return f"[The server's tool gave a result: {kind.removesuffix('_tool_result')}.]"
    if kind in ("document", "search_result") and (text := _text_within(block)):
        return f"{block['title']}\n{text}" if block.get("title") else text
    return NOT_SHOWN.get(kind)


def _text_within(block: Mapping[str, Any]) -> str:
    """The text of a document or of something that was found, where it has one."""
    source = block.get("source")
    held = source if isinstance(source, Mapping) else block
    if held.get("type") == "text" and isinstance(held.get("data"), str):
        return str(held["data"])
    content = held.get("content")
    if isinstance(content, str):
        return content
    parts = [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []
    return "\n".join([part["text"] for part in parts if isinstance(part.get("text"), str)])


def content_of_blocks(blocks: Blocks) -> Content:
    """The texts of Anthropic's content blocks, with words in place of what is none."""
    return content_of([said for block in blocks if (said := said_in(block)) is not None])


def messages_of_turns(system: Blocks, turns: Sequence[tuple[str, Blocks]]) -> Messages:
    """Anthropic's turns, each a role and blocks, behind the system's blocks, which may be none."""
    messages: Messages = [{"role": "system", "content": content_of_blocks(system)}] if system else []
    for role, blocks in turns:
        if role == "system":
            messages.append({"role": "system", "content": content_of_blocks(blocks)})
        else:
            messages += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    return messages


def goes_on(messages: Messages) -> bool:
    """Whether the last message is the beginning of the answer, as Anthropic's clients mean one of the assistant's."""
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def thinking_variables(kind: str | None, effort: str | None = None) -> dict[str, Any]:
    """Template variables for the type in Anthropic's field `thinking` and its `output_config.effort`, under the names
    that the templates of these models know; no `thinking` is off. A variable that no template reads does no harm."""
    told: dict[str, Any] = {} if kind == "adaptive" else dict.fromkeys(SWITCHES, kind == "enabled")
    return told if effort is None else {**told, EFFORT: effort}


def _assistant(blocks: Blocks) -> dict[str, Any]:
    thoughts = [block for block in blocks if block["type"] in ("thinking", "redacted_thinking")]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": content_of_blocks([block for block in blocks if block["type"] != "redacted_thinking"]),
    }
    if thought := "\n".join(_thought(block) for block in thoughts):
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


def _thought(block: Mapping[str, Any]) -> str:
    return str(block["thinking"]) if block["type"] == "thinking" else NOT_SHOWN["redacted_thinking"]


def _user(blocks: Blocks) -> Messages:
    """Results of tools are messages of their own, and stand before what the user says."""
    messages: Messages = []
    for block in blocks:
        if block["type"] == "tool_result":
            content = block.get("content") or ""
            said_back = content if isinstance(content, str) else content_of_blocks(content)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said_back})
    said = [block for block in blocks if block["type"] != "tool_result"]
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
