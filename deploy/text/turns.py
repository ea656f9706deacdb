"""Conversations in the shapes of other APIs as the messages of a chat: Anthropic's turns of content blocks, and the
items of OpenAI's Responses API. Routers and replicas share this: equal conversations must give equal prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from deploy.text.changed_tools import CHANGES, changed_tool
from deploy.text.chat import (
    BESIDE,
    NOT_SHOWN,
    Content,
    content_of,
    in_json,
    joined,
    reasoning_of,
    result_of,
    said,
    spoken,
    unknown,
)
from deploy.text.effort import EFFORT, EFFORTS, RANKED
from deploy.text.response_tools import INPUT, qualified

Messages = list[dict[str, Any]]
Blocks = Sequence[Mapping[str, Any]]


SAID_BACK: Final = ("text", "image", "document", "container_upload", "search_result", "tool_reference")
"""Types of the blocks of a tool's result that have words of their own."""


SILENT: Final = ("tool_use", "tool_result", "thinking", "fallback", "mcp_tool_listing")
"""Blocks that say nothing by themselves."""


def said_in(block: Mapping[str, Any]) -> str | None:
    """One of Anthropic's content blocks in words that a model can read; None for those that say nothing by themselves:
    calls, results and thinking."""
    kind = block["type"]
    if kind == "text":
        return in_json(block.get("text") or "")
    if kind == "tool_reference":
        return f"[The tool {block.get('tool_name')} can be called.]"
    if kind == "server_tool_use":
        return f"[The server called its tool {block.get('name')}.]"
    if kind.endswith("_tool_result") and kind != "tool_result":
        return f"[The server's tool gave a result: {kind.removesuffix('_tool_result')}.]"
    if kind in ("document", "search_result") and (text := _text_within(block)):
        return f"{block['title']}\n{text}" if block.get("title") else text
    if kind in CHANGES:
        return f"[The tool {changed_tool(block)} {CHANGES[kind]}.]"
    if kind in SILENT:
        return None
    return NOT_SHOWN.get(kind) or unknown(kind)


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


_BILLING: Final = re.compile(r"\s*x-anthropic-billing-header:[^\n]*\n*")
"""Line that Claude Code puts before its system prompt. It is for Anthropic's servers, says nothing to a model, and
changes with every request, so that no prompt would begin as the one before it."""


def _told(system: Blocks) -> Content:
    """What the system's blocks tell the model."""
    texts = [said_in(block) or "" for block in system]
    kept = [_BILLING.sub("", text, count=1) if _BILLING.match(text) else text for text in texts]
    return content_of([text for text, was in zip(kept, texts, strict=True) if text or not was])


def messages_of_turns(system: Blocks, turns: Sequence[tuple[str, Blocks]]) -> Messages:
    """Anthropic's turns, each a role and blocks, behind the system's blocks, which may be none or say nothing."""
    told = _told(system)
    messages: Messages = [{"role": "system", "content": told}] if told else []
    for role, blocks in turns:
        if role == "system":
            messages.append({"role": "system", "content": content_of_blocks(blocks)})
        else:
            messages += [_assistant(blocks)] if role == "assistant" else _user(blocks)
    return messages


def goes_on(messages: Messages) -> bool:
    """Whether the last message is the beginning of the answer, as Anthropic's clients mean one of the assistant's."""
    return messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")


def thinking_fields(kind: str | None, effort: str | None = None, management: Any = None) -> dict[str, Any]:
    """The fields of a chat (`deploy.text.effort`) for the type in Anthropic's field `thinking`, of which none is off,
    its `output_config.effort`, of which one that nobody knows says nothing, and its `context_management`."""
    fields: dict[str, Any] = {"thinking": {"type": kind or "disabled"}}
    if (keeps := _keeps_thinking(management)) is not None:
        fields["preserve_thinking"] = keeps
    return fields | {EFFORT: effort} if effort in RANKED else fields


def _keeps_thinking(management: Any) -> bool | None:
    """Whether earlier thinking stays in the prompt by an edit for that in `context_management`: all of it, or that of
    the last turn alone. None where there is no such edit, or one for several turns, which no chat template knows."""
    edits = management.get("edits") if isinstance(management, Mapping) else None
    for edit in edits if isinstance(edits, list) else ():
        if isinstance(edit, Mapping) and str(edit.get("type")).startswith("clear_thinking"):
            keep = edit.get("keep", 1)
            kind = keep.get("type") if isinstance(keep, Mapping) else keep
            turns = keep.get("value") if isinstance(keep, Mapping) else keep
            return True if kind == "all" else False if turns == 1 else None
    return None


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
            said_back = _said_back(block.get("content") or "")
            if block.get("is_error") is True:
                said_back = _failed(said_back)
            messages.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": said_back})
    said = [block for block in blocks if block["type"] != "tool_result"]
    if said or not messages:
        messages.append({"role": "user", "content": content_of_blocks(said)})
    return messages


FAILED: Final = "[The tool failed.]"
"""Words that a result begins with which is said to be an error: the templates of chats have no place for that."""


def _failed(content: Content) -> Content:
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    return content_of([f"{FAILED}\n{texts[0]}" if texts[0] else FAILED, *texts[1:]])


def _said_back(content: Any) -> Content:
    """The result of a tool: its blocks as they are said, and JSON of what is none."""
    blocks = content if isinstance(content, list) else []
    kinds = [block.get("type") if isinstance(block, Mapping) else None for block in blocks]
    if not any(kind in SAID_BACK for kind in kinds):
        return result_of(content)
    known = zip(blocks, kinds, strict=True)
    return content_of([said_in(block) or "" if kind in SAID_BACK else in_json(block) for block, kind in known])


_CALLS: Final[Mapping[str, tuple[str, str]]] = {
    "local_shell_call": ("local_shell", "action"),
    "shell_call": ("shell", "action"),
    "apply_patch_call": ("apply_patch", "operation"),
    "computer_call": ("computer", "action"),
}
"""Calls of tools that have an item type of their own, by type: the name that a model reads, and the field with the
arguments."""
_OF_RESPONSES_SERVER: Final = (
    "web_search_call",
    "file_search_call",
    "code_interpreter_call",
    "image_generation_call",
    "mcp_call",
    "tool_search_call",
)
_LEFT_OUT: Final = (
    "item_reference",
    "mcp_list_tools",
    "mcp_approval_request",
    "mcp_approval_response",
    "ghost_snapshot",
    "additional_tools",
    "configuration_update",
    "agent_reasoning",
)
_COMPACTIONS: Final = ("compaction", "compaction_summary", "context_compaction")
ITEMS: Final[Mapping[str, tuple[str, ...]]] = {
    "message": ("role",),
    "function_call": ("call_id", "name"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("call_id", "name", "input"),
    "custom_tool_call_output": ("call_id",),
    "reasoning": (),
    **dict.fromkeys(_CALLS, ()),
    **{f"{kind}_output": () for kind in _CALLS},
    **dict.fromkeys(_OF_RESPONSES_SERVER, ()),
    "tool_search_output": (),
    **dict.fromkeys(("program", "program_output", "agent_message"), ()),
    **dict.fromkeys(_COMPACTIONS, ()),
    **dict.fromkeys(_LEFT_OUT, ()),
}
"""Fields of each known item type that must be strings."""


def _call_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """A call of the assistant."""
    kind = item["type"]
    if kind == "function_call":
        name, arguments = qualified(item["name"], item.get("namespace")), item.get("arguments")
    elif kind == "custom_tool_call":
        name, arguments = qualified(item["name"], item.get("namespace")), {INPUT: item["input"]}
    else:
        name, where = _CALLS[kind]
        given = item.get(where)
        arguments = given if isinstance(given, Mapping) else {}
    return {"id": _call_id(item), "type": "function", "function": {"name": name, "arguments": arguments}}


def _call_id(item: Mapping[str, Any]) -> str:
    """Return the id by which a call and its result belong together. Some items have it as their own id."""
    return next((item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)), "")


def _spoken(value: Any) -> Any:
    """Return the content that an assistant wrote, refusals among it."""
    return spoken(value) if isinstance(value, list) else value


def _said_by_item(item: Mapping[str, Any]) -> str:
    """Describe a server's action in words that a model can read."""
    kind = item["type"]
    if kind in _COMPACTIONS:
        return NOT_SHOWN["compaction"]
    if kind == "tool_search_output":
        tools = item.get("tools")
        names = [tool.get("name") for tool in tools if isinstance(tool, Mapping)] if isinstance(tools, list) else []
        return f"[Tools were found: {', '.join(name for name in names if isinstance(name, str)) or 'none'}.]"
    if kind == "program_output":
        return f"[The server's program gave: {in_json(item.get('result') or '')}]"
    called = kind.removesuffix("_call")
    action = item.get("action")
    query = action.get("query") if isinstance(action, Mapping) else None
    return f"[The server called its tool {called}{f': {query}' if isinstance(query, str) else ''}.]"


def readable_items(items: Sequence[Any]) -> list[Any]:
    """Items, of which those up to the newest one of the assistant are such as can be read, whatever they are, and the
    results behind it. What is new behind it, or nothing follows, stays as it is."""
    last = max((place for place, item in enumerate(items) if _of_assistant(item)), default=-1)
    earlier = last if last < len(items) - 1 else last - 1
    return [
        _readable(item) if place <= earlier or (last >= 0 and _is_result(item)) else item
        for place, item in enumerate(items)
    ]


def _is_result(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return isinstance(kind, str) and kind in ITEMS and kind.endswith("_call_output")


def _of_assistant(item: Any) -> bool:
    if not isinstance(item, Mapping):
        return False
    kind = item.get("type", "message")
    if kind in ("additional_tools", "configuration_update", "agent_message"):
        return False
    return item.get("role") == "assistant" if kind == "message" else not str(kind).endswith("_output")


def configured(items: Sequence[Any]) -> dict[str, Any]:
    """What items of the input change of the request's fields `reasoning`, its effort alone, and `text`, by name. The
    last one of each field within them holds."""
    changed: dict[str, Any] = {}
    for item in items:
        if not isinstance(item, Mapping) or item.get("type") != "configuration_update":
            continue
        reasoning = item.get("reasoning")
        if isinstance(reasoning, Mapping) and reasoning.get("effort") in EFFORTS:
            changed["reasoning"] = {"effort": reasoning["effort"]}
        if isinstance(item.get("text"), Mapping):
            changed["text"] = {**changed.get("text", {}), **_given(item["text"])}
    return changed


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _of_agent(item: Mapping[str, Any]) -> Content:
    """What another agent says."""
    said, author = result_of(item.get("content", item.get("message"))), item.get("author")
    head = (
        f"[A message of the agent {author}:]\n" if isinstance(author, str) and author else "[A message of an agent:]\n"
    )
    return head + said if isinstance(said, str) else [{"type": "text", "text": head}, *said]


def _readable(item: Any) -> Any:
    if not isinstance(item, Mapping):
        return item
    kind = item.get("type", "message")
    if not isinstance(kind, str) or kind not in ITEMS:
        return {"type": "message", "role": "assistant", "content": unknown(kind)}
    made = {**item, **{name: in_json(item.get(name) or "") for name in ITEMS[kind] if name != "role"}}
    for name in ("content", "summary") if kind in ("message", "reasoning") else ():
        if name in made:
            made[name] = said(made[name], () if kind == "reasoning" else BESIDE)
    return made


def messages_of_items(items: Sequence[Mapping[str, Any]], read: Callable[[Any], Content]) -> Messages:
    """Items of the Responses API, each with a type in `ITEMS`: what an assistant thought, said and called in one go is
    one message. `read` makes a message's content of an item's, and raises for what it cannot."""
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
        if kind in _LEFT_OUT:
            continue
        if kind == "reasoning":
            thought = next((read(item[name]) for name in ("content", "summary") if item.get(name)), None)
            if thought is not None:  # else it is encrypted, and nobody here can read it
                assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = joined(thought)
        elif kind == "message" and item["role"] == "assistant":
            said = assistant("content", "tool_calls")
            said["content"] = read(_spoken(item.get("content")))
            if (reasoning := reasoning_of(item)) is not None:
                said["reasoning_content"] = reasoning
        elif kind in ("function_call", "custom_tool_call") or kind in _CALLS:
            assistant().setdefault("tool_calls", []).append(_call_of(item))
        elif kind == "message":
            answer = None
            messages.append({"role": item["role"], "content": read(item.get("content"))})
        elif kind == "agent_message":
            answer = None
            messages.append({"role": "user", "content": _of_agent(item)})
        elif kind.endswith("_call_output"):
            answer = None
            content = result_of(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": _call_id(item), "content": content})
        else:
            assistant("content", "tool_calls")["content"] = _said_by_item(item)
    return messages


def with_instructions(messages: Messages, instructions: str | None) -> Messages:
    """The messages behind the field `instructions`, which may be empty. Templates want one system message, and
    first."""
    if not instructions:
        return messages
    system: dict[str, Any] = {"role": "system", "content": instructions}
    if messages and messages[0]["role"] in ("system", "developer"):
        given: Content = messages[0]["content"]
        first, *more = [given] if isinstance(given, str) else [part["text"] for part in given]
        system["content"] = content_of([f"{instructions}\n\n{first}", *more])
        messages = messages[1:]
    return [system, *messages]
