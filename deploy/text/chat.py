"""A chat's messages and tools as its template gets them, and parts of a conversation that are no text, in words or JSON
that a model can read. Routers and replicas share this: equal chats must give equal prompts.

Control tokens, as those that name roles, belong to the chat template alone (`ControlTokens`). Where a message, or
anything else that a client gave, spells one out, it is encoded as the ordinary text that it is. Before a chat is
rendered a break is put into every control token that the client's texts spell. A template handles the break as any
other letters; when the prompt is encoded, it is taken out and the text on its two sides is encoded apart.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

MOST_MESSAGES: Final = 8192
"""Most messages of a chat. Each is looked at by itself, and a body has room for hundreds of thousands of empty ones."""
MOST_TEMPLATE_VARIABLES: Final = 256
"""Most template variables of a chat. The template's engine handles each by itself, several times."""
MOST_TOOLS: Final = 1024
"""Most tools of a chat, and most calls of a message."""

Content = str | list[dict[str, str]]
"""Content of a message: a text, or several parts of one, each `{"type": "text", "text": ...}`."""


class ChatTemplateError(Exception):
    """The messages do not fit the chat template, or there is none; the text says why."""


class ToolsUnknown(ChatTemplateError):
    """The chat template would leave tools, or what was done with them, out without a word. The text names
    them."""


def template_message(role: str, content: Content, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One message. What else the client gave is in `more`; answers keep their reasoning and their calls, results the
    call that they belong to, and all of them the name of who speaks."""
    message: dict[str, Any] = {"role": role, "content": content}
    more = more or {}
    if role == "assistant":
        if (reasoning := reasoning_of(more)) is not None:
            message["reasoning_content"] = reasoning
        if calls := more.get("tool_calls"):
            message["tool_calls"] = tool_calls_of(calls)
    if role == "tool" and isinstance(more.get("tool_call_id"), str):
        message["tool_call_id"] = more["tool_call_id"]
    if isinstance(name := more.get("name"), str) and name:
        message["name"] = name
    return message


def reasoning_of(message: Mapping[str, Any]) -> str | None:
    """Return the reasoning that an assistant wrote before its answer; None if there is none. vLLM and others call the
    field `reasoning`."""
    given = (message.get(name) for name in ("reasoning_content", "reasoning"))
    return next((text for text in given if isinstance(text, str)), None)


def content_of(texts: Sequence[str]) -> Content:
    """The content of a message that came as several parts of text."""
    return [{"type": "text", "text": text} for text in texts] if len(texts) > 1 else "".join(texts)


def is_begun(messages: Any) -> bool:
    """Whether the last message of a chat is said to be the beginning of the answer, as the APIs of DeepSeek and Mistral
    (`prefix`) and of Kimi (`partial`) have it."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    return last.get("prefix") is True or last.get("partial") is True


def spoken(parts: Sequence[Any]) -> list[Any]:
    """The parts of what an assistant said, refusals as text."""
    return [
        {"type": "text", "text": part.get("refusal")}
        if isinstance(part, Mapping) and part.get("type") == "refusal"
        else part
        for part in parts
    ]


def joined(content: Content, separator: str = "\n") -> str:
    """Content as one text. What stands between parts is the chat template's choice where it takes them apart
    (`deploy.text.content_parts`)."""
    return content if isinstance(content, str) else separator.join(part["text"] for part in content)


def with_system_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages whose `developer` turns are system messages. Chat templates know OpenAI's newer role under its older
    name."""
    return [{**message, "role": "system"} if message["role"] == "developer" else {**message} for message in messages]


def tool_results_in_order(
    calls: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The results of a message's calls, in the order of the calls as far as their ids say which is whose."""
    places = {call["id"]: place for place, call in reversed([*enumerate(calls)])}
    found = [places.get(result.get("tool_call_id", "")) for result in results]
    if None in found or len({*found}) < len(found):
        return [*results]
    return [result for _, result in sorted(zip(found, results, strict=True), key=lambda pair: pair[0] or 0)]


def speaks_of_tools(messages: Sequence[dict[str, Any]]) -> bool:
    """Whether there are calls or their results."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def tools_of(value: Any) -> list[dict[str, Any]]:
    """The field `tools`, each tool with the fields that templates know, in one order. ValueError."""
    tools = []
    for tool in _list(value, "tools"):
        function = function_of(tool) if isinstance(tool, Mapping) else None
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind not in ("", "function"):
            raise ValueError(f"a tool of type {kind[:64]!r} is not supported here: tools are functions")
        if not isinstance(function, Mapping) or kind not in (None, "", "function"):
            raise ValueError('a tool should be {"type": "function", "function": {"name": ..., "parameters": ...}}')
        described: dict[str, Any] = {"name": _name(function)}
        if (description := function.get("description")) is not None:
            if not isinstance(description, str):
                raise ValueError("a tool's description should be a string")
            described["description"] = description
        if (parameters := function.get("parameters", function.get("input_schema"))) is not None:
            if not isinstance(parameters, Mapping):
                raise ValueError("a tool's parameters should be an object: the JSON schema of its arguments")
            described["parameters"] = parameters
        tools.append({"type": "function", "function": described})
    return tools


def function_of(tool: Mapping[str, Any]) -> Any:
    """The function that a tool is, which clients also write as the Responses API has it: without an object of its
    own. Some name its parameters as Anthropic's API does."""
    return tool if "function" not in tool and isinstance(tool.get("name"), str) else tool.get("function")


def tool_calls_of(value: Any) -> list[dict[str, Any]]:
    """The field `tool_calls` of a message, arguments as the text that the model wrote, whatever that is: a chat whose
    model once wrote no JSON goes on. ValueError."""
    calls = []
    for call in _list(value, "tool_calls"):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type") not in (None, "function"):
            raise ValueError('a call should be {"id": ..., "type": "function", "function": {"name", "arguments"}}')
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        if isinstance(arguments, Mapping | list | int | float):
            try:
                arguments = json.dumps(arguments, ensure_ascii=False)
            except RecursionError:
                raise ValueError("a call's arguments are nested too deeply") from None
        call_id = "" if call.get("id") is None else call["id"]
        if not isinstance(arguments, str) or not isinstance(call_id, str):
            raise ValueError("a call's id and arguments should be strings")
        calls.append({"id": call_id, "type": "function", "function": {"name": _name(function), "arguments": arguments}})
    return calls


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{what} should be a list")
    if len(value) > MOST_TOOLS:
        raise ValueError(f"at most {MOST_TOOLS} {what} are allowed, not {len(value)}")
    return value


def _name(function: Mapping[str, Any]) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ValueError("a function should have a name")
    return name


NOT_SHOWN: Final[Mapping[str, str]] = {
    "image": "[An image was here, which this model cannot see.]",
    "document": "[A document was here, which this model cannot read.]",
    "container_upload": "[A file was here, which this model cannot read.]",
    "redacted_thinking": "[Part of the reasoning was withheld.]",
    "compaction": "[Earlier turns were left out here.]",
}
"""Texts that a model reads in place of Anthropic's blocks that are no text, by type."""
_HEARD: Final = "[A recording was here, which this model cannot hear.]"
_SEEN: Final = "[A video was here, which this model cannot see.]"
IN_WORDS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("image", "input_image", "image_url", "computer_screenshot"), NOT_SHOWN["image"]),
    **dict.fromkeys(("document", "input_file", "file"), NOT_SHOWN["document"]),
    **dict.fromkeys(("audio", "input_audio", "audio_url"), _HEARD),
    **dict.fromkeys(("video", "input_video", "video_url"), _SEEN),
}
"""Texts that a model reads in place of parts of OpenAI's APIs, and of MCP's results, that are no text, by type."""
_TEXTS: Final = ("text", "input_text", "output_text", "reasoning_text", "summary_text")
MOST_PARTS: Final = 8192
"""Most parts of a message that are put into words."""
BESIDE: Final = ("thinking", "reasoning", "redacted_thinking", "tool_use", "tool_call", "function_call")
"""Parts that other libraries keep beside what an assistant said, and that are no part of it."""


def text_of(part: Any) -> str | None:
    """The text of a part of content, in words where it is none; None for a part of a type that nobody knows."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        return None
    text = part.get("refusal" if kind == "refusal" else "text")
    return text if kind in (*_TEXTS, "refusal") and isinstance(text, str) else IN_WORDS.get(kind)


def result_of(value: Any) -> Content:
    """The result of a tool as content: words in place of images and files, and JSON where it is no text at all."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    parts = value if isinstance(value, list) else [value]
    texts = [None if isinstance(part, str) else text_of(part) for part in parts]
    if all(text is None for text in texts):
        return in_json(value)
    return content_of([in_json(part) if text is None else text for part, text in zip(parts, texts, strict=True)])


def in_json(value: Any) -> str:
    """JSON of a value, characters beyond ASCII as they are; a string as it is. ValueError for what is nested too
    deeply."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError:
        raise ValueError("a message is nested too deeply") from None


def said(value: Any, leave_out: Sequence[str] = ()) -> Content:
    """Content of an earlier turn."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, list):
        return in_json(value)
    if len(value) > MOST_PARTS:
        return value  # it is refused later
    typed = [(part.get("type") if isinstance(part, Mapping) else None, part) for part in value]
    texts = [(kind, text_of(part)) for kind, part in typed if kind not in leave_out]
    return content_of([unknown(kind) if text is None else text for kind, text in texts])


def unknown(kind: Any) -> str:
    """Words for a part of an earlier turn whose type nobody knows."""
    return f"[Something was here that this model cannot read{f': {kind[:64]}' if isinstance(kind, str) else ''}.]"


def readable(messages: Any) -> Any:
    """Messages of a chat, earlier turns of which hold what no request may newly hold, or lack what they should have:
    what was said once must not keep a conversation from going on. What is behind the assistant's last message is new,
    but for results of its calls, and the last message is so, too, if it is the assistant's."""
    if not isinstance(messages, list) or len(messages) > MOST_MESSAGES:
        return messages
    last = max((place for place, message in enumerate(messages) if _role(message) == "assistant"), default=-1)
    made: list[Any] = []
    waiting: dict[str, None] = {}
    """Ids of the calls that have no result yet, in their order."""
    for place, message in enumerate(messages):
        role = _role(message)
        if role == "assistant" and place < len(messages) - 1:
            message = _earlier_answer(message)
            calls = message.get("tool_calls")
            waiting = dict.fromkeys(call["id"] for call in calls) if _few(calls) else {}
        elif role in ("tool", "function"):
            message = _result(message, waiting)
        elif place < last and role in ("user", "system", "developer"):
            message = {**message, "content": said(message.get("content"))}
            message.pop("tool_calls", None)
        made.append(message)
    return made


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def _few(calls: Any) -> TypeGuard[list[Any]]:
    """Whether these are no more calls than a message may have; a message with more is refused later."""
    return isinstance(calls, list) and len(calls) <= MOST_TOOLS


def _result(message: Mapping[str, Any], waiting: dict[str, None]) -> Mapping[str, Any]:
    """The result of a call. One without an id is the next call's, and one of the older role `function`, too."""
    call_id = message.get("tool_call_id")
    if isinstance(call_id, int):
        call_id = str(call_id)
    elif not isinstance(call_id, str) and waiting:
        call_id = next(iter(waiting))
    if not isinstance(call_id, str):
        return message
    waiting.pop(call_id, None)
    return {**message, "role": "tool", "tool_call_id": call_id, "content": result_of(message.get("content"))}


def _earlier_answer(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of the assistant that others follow."""
    content = message.get("content")
    made = {name: value for name, value in message.items() if name != "function_call"}
    made["content"] = said(content, BESIDE)
    made.pop("tool_call_id", None)
    if not isinstance(made.get("reasoning_content") or "", str):
        texts = made.pop("reasoning_content")
        made["reasoning"] = "".join(text_of(text) or "" for text in texts) if isinstance(texts, list) else None
    if reasoning_of(made) is None and (thought := _thought(content) or _thought_beside(made)):
        made["reasoning"] = thought
    calls = message.get("tool_calls")
    if not calls and isinstance(function := message.get("function_call"), Mapping):
        calls = [{"id": f"call_{function.get('name')}", "function": function}]
    if _few(calls):
        made["tool_calls"] = [_call(call) for call in calls]
    elif not isinstance(calls, list):
        made.pop("tool_calls", None)
    return made


def _thought_beside(message: Mapping[str, Any]) -> str:
    """Return the reasoning that a message has in a field of its own as LiteLLM keeps it, or OpenRouter does."""
    if thought := _thought(message.get("thinking_blocks")):
        return thought
    details = message.get("reasoning_details")
    parts = [part for part in details if isinstance(part, Mapping)] if isinstance(details, list) else []
    texts = ([part[name] for part in parts if isinstance(part.get(name), str)] for name in ("text", "summary"))
    return next((joined for some in texts if (joined := "".join(some))), "")


def _thought(parts: Any) -> str:
    """Return the reasoning in parts of what an assistant said, as Mistral's API has it."""
    parts = parts if isinstance(parts, list) else []
    found = [part.get("thinking") for part in parts if isinstance(part, Mapping) and part.get("type") == "thinking"]
    texts = [text for thought in found for text in (thought if isinstance(thought, list) else [thought])]
    return "".join(said for text in texts if (said := text_of(text)) is not None)


def _call(call: Any) -> dict[str, Any]:
    """An earlier call as a function's, with an id and a name, whatever library wrote it."""
    given: Mapping[str, Any] = call if isinstance(call, Mapping) else {}
    held = next((given[name] for name in ("function", "custom") if isinstance(given.get(name), Mapping)), given)
    name, call_id = held.get("name"), given.get("id")
    made: dict[str, Any] = {
        "id": call_id if isinstance(call_id, str) else "" if call_id is None else in_json(call_id),
        "type": "function",
    }
    arguments = next((held[name] for name in ("arguments", "args") if name in held), None)
    if "input" in held and arguments is None:
        arguments = {"input": held["input"]}
    made["function"] = {"name": name if isinstance(name, str) and name else "unknown", "arguments": arguments}
    return made


BREAK: Final = secrets.token_hex(8)
"""Drawn anew for each process and never shown, so no text of a client holds it. Letters and digits alone: filters of
templates leave them as they are."""
_CONTROL: Final = re.compile(r"[<\[(|｜].*[>\])|｜]", re.DOTALL)
_THINKING: Final = ("<think>", "</think>")
"""Tags by which templates find the reasoning in earlier answers, to leave it out."""
_OF_ANSWERS: Final = ("content", "reasoning_content")


class ControlTokens:
    """Control tokens of one tokenizer."""

    def __init__(self, backend: Any) -> None:
        """Collect the tokens that a `tokenizers.Tokenizer` adds to its vocabulary: special ones and those in
        brackets."""
        added = backend.get_added_tokens_decoder().values()
        texts = [(token.content, token.special) for token in added]
        tokens = [token for token, special in texts if len(token) > 1 and (special or _CONTROL.fullmatch(token))]
        self._all = beginnings(tokens)
        self._in_answers = beginnings([token for token in tokens if token not in _THINKING])

    def broken(self, value: Any) -> Any:
        """A value of JSON, every control token in its strings broken; names of fields, too."""
        return _broken(value, self._all)

    def messages(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages, broken. Earlier answers keep the tags of their reasoning."""
        made = []
        for message in messages:
            pattern = self._in_answers if message["role"] == "assistant" else self._all
            made.append(
                {name: _broken(value, pattern if name in _OF_ANSWERS else self._all) for name, value in message.items()}
            )
        return made


def beginnings(tokens: list[str]) -> re.Pattern[str] | None:
    """Return a pattern that finds the first character of each of `tokens`, others' beginnings inside of them, too; None
    for no tokens."""
    if not tokens:
        return None
    after: dict[str, list[str]] = {}
    for token in tokens:
        after.setdefault(token[0], []).append(token[1:])
    # A set of characters comes first: that is what a search skips text by.
    behind = "|".join(f"(?<={re.escape(first)})(?={_tree(rest)})" for first, rest in sorted(after.items()))
    return re.compile(f"[{re.escape(''.join(sorted(after)))}](?:{behind})")


def _tree(texts: list[str]) -> str:
    """A regular expression for any of `texts` that looks at each character once: tokens can be hundreds."""
    if "" in texts:
        return ""
    after: dict[str, list[str]] = {}
    for text in texts:
        after.setdefault(text[0], []).append(text[1:])
    options = [re.escape(first) + _tree(rest) for first, rest in sorted(after.items())]
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def _broken(value: Any, pattern: re.Pattern[str] | None) -> Any:
    if pattern is None:
        return value
    if isinstance(value, str):
        return pattern.sub(_with_break, value)
    if isinstance(value, Mapping):
        return {_broken(name, pattern): _broken(item, pattern) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_broken(item, pattern) for item in value]
    return value


def _with_break(match: re.Match[str]) -> str:
    return match.group() + BREAK
