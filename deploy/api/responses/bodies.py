"""The body of OpenAI's Responses API, /v1/responses, and the chat that it becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Final, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from deploy.api.http.body import parse_object, validate
from deploy.api.http.errors import ApiError, invalid, unsupported
from deploy.api.job.bodies import SamplingFields, StopStrings
from deploy.api.job.chat_bodies import ChatBody
from deploy.api.job.unsupported import VERBOSITIES, reject_unsupported
from deploy.text.chat import MOST_MESSAGES, MOST_TOOLS, Content, content_of
from deploy.text.effort import checked
from deploy.text.response_tools import AskedTools, format_of, qualified, read_tools, with_added
from deploy.text.turns import ITEMS, Messages, configured, messages_of_items, readable_items, with_instructions
from workers.grammar.text_grammar import TextGrammar, TextGrammarError

Items = list[dict[str, Any]]


def _items(value: Any) -> Items:
    """The input as items, each of a type that is known. ValueError, 400 for items that nobody reads."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list) or len(value) > MOST_MESSAGES:
        raise ValueError(f"input should be a string or a list of at most {MOST_MESSAGES} items")
    if not value:
        raise ValueError("input should have at least one item")
    items = []
    for given in readable_items(value):
        item = {"type": "message", **given} if isinstance(given, Mapping) else {}
        kind = item.get("type")
        if not isinstance(kind, str):
            raise ValueError("an item should be an object with a type, or with a role and content")
        if kind not in ITEMS:
            raise unsupported(f"an item of type {kind[:64]!r}", "input")
        for name in ITEMS[kind]:
            if not isinstance(item.get(name), str):
                raise ValueError(f"an item of type {kind} should have a string in its field {name}")
        if kind == "additional_tools" and not isinstance(item.get("tools"), list):
            raise ValueError(f"an item of type {kind} should have a list in its field tools")
        items.append(item)
    read_tools(with_added((), items))
    return items


def _choice(value: Any) -> Any:
    """The field `tool_choice`, once it is known that chats can have it."""
    if isinstance(value, Mapping) and value.get("type") in ("none", "auto", "required", "any"):
        return value["type"]
    if isinstance(value, Mapping) and value.get("type") == "allowed_tools":
        tools = value.get("tools")
        if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
            raise ValueError('allowed tools should have a mode and a list of tools, {"type": "function", "name": ...}')
    elif isinstance(value, Mapping) and value.get("type") not in ("function", "custom"):
        kind = str(value.get("type"))[:64]
        raise unsupported(f"tool_choice of type {kind!r}, a tool that the model is not told of,", "tool_choice")
    return value


def _choice_of_chat(choice: Any) -> Any:
    """Convert a tool choice to the form that chats have."""
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") != "allowed_tools":
        return _named(choice)
    tools, mode = choice["tools"], choice.get("mode")
    known = [_named(tool) for tool in tools if tool.get("type") in ("function", "custom")]
    if tools and not known and mode == "auto":
        return "none"  # the model is told of none of them
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": known}}


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function or a custom tool that is chosen, as chats have it."""
    name = tool.get("name")
    if isinstance(name, str):
        name = qualified(name, tool.get("namespace"))
    return {"type": "function", "function": {"name": name}}


def _tools(value: Any) -> Any:
    """The field `tools`, once it is known that they can be taken apart."""
    if not isinstance(value, list) or len(value) > MOST_TOOLS:
        raise ValueError(f"tools should be a list of at most {MOST_TOOLS}")
    read_tools(value)
    return value


def _form(value: Any) -> Any:
    """The field `text` as `response_format` of chats."""
    if not isinstance(value, Mapping):
        raise ValueError("text should be an object")
    if value.get("verbosity") not in (None, *VERBOSITIES):
        raise ValueError("text.verbosity should be low, medium or high")
    form = value.get("format") or {"type": "text"}
    if not isinstance(form, Mapping):
        raise ValueError("text.format should be an object")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}


_ANY_OBJECT: Final = {"type": "object"}


class ResponsesBody(SamplingFields):
    """POST /v1/responses."""

    model: str
    input: Annotated[Items, BeforeValidator(_items), WithJsonSchema({"type": ["string", "array"]})]
    """A string, or items: messages, calls of functions and what they gave, reasoning."""
    instructions: str | None = None
    """A system message before all others."""
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    tools: Annotated[list[Any], BeforeValidator(_tools)] = Field(default_factory=list)
    """Functions and custom tools that the model may call, alone or in namespaces. Others are left out."""
    tool_choice: Annotated[Any, BeforeValidator(_choice)] = "auto"
    """none, auto, required, a function or a custom tool, or some of them as allowed tools."""
    parallel_tool_calls: bool = True
    text: Annotated[Any, BeforeValidator(_form), WithJsonSchema(_ANY_OBJECT)] = None
    """Format that the answer must have, in `format`."""
    previous_response_id: str | None = None
    """A response that this one goes on from, where the server keeps them."""
    store: bool = True
    """Keep this response, where the server keeps any."""
    metadata: dict[str, str] = Field(default_factory=dict)
    """Metadata. The answer repeats it as it is."""

    reasoning: Annotated[Any, BeforeValidator(partial(checked, "reasoning")), WithJsonSchema(_ANY_OBJECT)] = None
    """Reasoning effort, in `effort`. It takes effect where the chat template has a switch for it."""

    # Extensions.
    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    chat_template_kwargs: Annotated[dict[str, Any], WithJsonSchema(_ANY_OBJECT)] = Field(default_factory=dict)
    stop: StopStrings = Field(default_factory=list)

    @model_validator(mode="after")
    def _as_items_configure_it(self) -> Self:
        self.configure(self.input)
        return self

    def configure(self, items: Sequence[Any]) -> None:
        """Take what these items say of how the answer is to be, in place of what the fields say."""
        changed = configured(items)
        if "reasoning" in changed:
            self.reasoning = {**(self.reasoning or {}), **changed["reasoning"]}
        if "text" in changed:
            form = _form(changed["text"])
            self.text = form if "format" in changed["text"] else self.text


def _reject_include(raw: Mapping[str, Any]) -> None:
    """400 for what `include` asks for and no answer has."""
    include = raw.get("include")
    if isinstance(include, list) and "message.output_text.logprobs" in include:
        raise unsupported("log-probabilities of a response", "include")


NAMES: Final = {
    "response_format": "text",
    "guided_begin_after": "text",
    "messages": "input",
    "max_tokens": "max_output_tokens",
}
"""The names that this API has for fields of the chat API."""
_TEXTS: Final = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def named_here(error: ApiError) -> ApiError:
    """An error about a chat, with the field that the client gave."""
    first, dot, rest = (error.param or "").partition(".")
    if first in NAMES:
        error.param = NAMES[first] + dot + rest
    return error


def parse_response(raw: bytes) -> ResponsesBody:
    """The body of /v1/responses; 400 for what is wrong with it."""
    value = parse_object(raw)
    reject_unsupported(value, "responses", ResponsesBody.model_fields)
    _reject_include(value)
    return validate(ResponsesBody, value)


def chat_of(body: ResponsesBody, messages: Messages, tools: AskedTools) -> ChatBody:
    """The chat of these messages, that of the body last. 400 for what is no chat."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": with_instructions(messages, body.instructions),
        "max_completion_tokens": body.max_output_tokens,
        "tools": tools.functions,
        "tool_choice": _choice_of_chat(body.tool_choice),
        "response_format": body.text,
    }
    same = ("max_reasoning_tokens", "reasoning", "stream", "parallel_tool_calls", "stop")
    try:
        more = {name: getattr(body, name) for name in same if name in body.model_fields_set}
        more |= body.shared()
        chat = validate(ChatBody, {**fields, **more, "chat_template_kwargs": body.chat_template_kwargs})
    except ApiError as error:
        raise named_here(error) from None
    chat.hold_inputs({name: TextGrammar(*grammar) for name, grammar in tools.grammars.items()})
    return chat


def tools_of(body: ResponsesBody, earlier: Sequence[Any] = ()) -> AskedTools:
    """The tools of a body that goes on from a conversation with the items `earlier`, with the grammars that calls of
    custom tools are held to; others are left out by name. 400 where a tool in `tools` and one that an item adds become
    functions of one name, and for too many."""
    try:
        asked = read_tools(with_added(body.tools, [*earlier, *body.input]))
    except ValueError as error:
        raise invalid(f"tools: {error}", "tools", "invalid_value") from None
    if len(asked.functions) > MOST_TOOLS:
        raise invalid(f"tools: at most {MOST_TOOLS} are allowed, not {len(asked.functions)}", "tools", "invalid_value")
    described = [tool["function"] for tool in asked.functions]
    functions = {function["name"]: function for function in described if isinstance(function.get("name"), str)}
    for name, grammar in [*asked.grammars.items()]:
        try:
            TextGrammar(*grammar).ebnf(in_json=True)
        except TextGrammarError:
            asked.left_out.append(format_of(asked.origins[name].name))
            del asked.grammars[name]
        else:
            functions[name]["strict"] = True
    return asked


def standing(items: Sequence[Any]) -> Items:
    """What these items say of requests that go on from them, as few items: which tools there are besides those in
    `tools`, and what `ResponsesBody.configure` takes."""
    tools, changed = with_added((), items), configured(items)
    added = [{"type": "additional_tools", "tools": tools}] if tools else []
    return [*added, {"type": "configuration_update", **changed}] if changed else added


def messages_of(items: Sequence[dict[str, Any]]) -> Messages:
    """Items as messages; 400 for content that nobody reads."""
    return messages_of_items(items, _content)


def _content(value: Any) -> Content:
    """Content as a message has it."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ApiError(400, "input: content should be a string or a list of parts", param="input", code="invalid_value")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise unsupported(f"a content part of type {str(kind)[:64]!r}", "input")
        texts.append(part["text"])
    return content_of(texts)
