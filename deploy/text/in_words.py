"""Parts of a conversation that are no text, in words or JSON that a model can read. Routers and replicas share this:
equal conversations must give equal prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from deploy.text.chat import MOST_MESSAGES, MOST_TOOLS, Content, content_of, reasoning_of

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
