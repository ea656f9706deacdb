"""The bodies of Anthropic's Messages API, /v1/messages and /v1/messages/count_tokens, and the chats that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BaseModel, BeforeValidator, FailFast, Field, WithJsonSchema, model_validator

from deploy.api.http.body import parse_object, validate
from deploy.api.http.errors import ApiError, TooLong, invalid, unsupported
from deploy.api.job.bodies import Body, SamplingFields
from deploy.api.job.chat_bodies import ChatBody, TextPart
from deploy.api.job.unsupported import reject_unsupported
from deploy.text.changed_tools import CHANGES, told_by_turns
from deploy.text.chat import MOST_MESSAGES, MOST_TOOLS, NOT_SHOWN, in_json, unknown
from deploy.text.response_tools import named
from deploy.text.turns import goes_on, messages_of_turns, said_in, thinking_fields

Known = Mapping[str, Mapping[str, type[Any]]]
"""The fields of each known type of block, with their types."""
_TEXTS: Final[Known] = {"text": {"text": str}}
_SHOWN_IN_WORDS: Final[Known] = {
    **_TEXTS,
    **{kind: {} for kind in ("image", "document", "container_upload", "search_result", "tool_reference")},
}
"""Blocks that a model reads either as they are or as words that stand for them; see `deploy.text.turns`."""
_OF_SERVER: Final = (
    "server_tool_use",
    "web_search_tool_result",
    "web_fetch_tool_result",
    "tool_search_tool_result",
    "code_execution_tool_result",
    "bash_code_execution_tool_result",
    "text_editor_code_execution_tool_result",
    "mcp_tool_use",
    "mcp_tool_result",
    "mcp_tool_listing",
    "advisor_tool_result",
    "fallback",
    "compaction",
)
"""Blocks that record what other servers did during earlier turns."""
_OF_ASSISTANT: Final[Known] = {
    **_TEXTS,
    "thinking": {"thinking": str},
    "redacted_thinking": {},
    "tool_use": {"id": str, "name": str},
    **{kind: {} for kind in _OF_SERVER},
}
_OF_USER: Final[Known] = {**_SHOWN_IN_WORDS, "tool_result": {"tool_use_id": str}}
_OF_SYSTEM: Final[Known] = {**_TEXTS, **{kind: {} for kind in CHANGES}}
_KNOWN: Final = {"user": _OF_USER, "assistant": _OF_ASSISTANT, "system": _OF_SYSTEM}
_NEW_ONES_REFUSED: Final = ("image", "document", "container_upload")
"""Blocks that the last user turn must not hold: the model would not see what it is asked about."""
_TYPES: Final[dict[type[Any], str]] = {str: "a string", dict: "an object"}

Blocks = list[dict[str, Any]]


_BLOCK: Final = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_CONTENT: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": _BLOCK}]}


def blocks_of(value: Any, known: Known, where: str) -> Blocks:
    """Content as blocks, each of a type in `known` with these fields. ValueError, 400 for blocks that nobody reads."""
    if isinstance(value, str):
        return [{"type": "text", "text": value}]
    if not isinstance(value, list):
        raise ValueError("input should be a string or a list of content blocks")
    for block in value:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if not isinstance(kind, str):
            raise ValueError("a content block should be an object with a type")
        if kind not in known:
            raise unsupported(f"a content block of type {kind[:64]!r} here", where)
        for name, wanted in known[kind].items():
            if not isinstance(block.get(name), wanted):
                raise ValueError(f"a content block of type {kind} should have {_TYPES[wanted]} in its field {name}")
    return value


def _system(value: Any) -> Blocks:
    return blocks_of(value, _TEXTS, "system")


def _turn(value: Any) -> Any:
    """A message whose content is blocks that its role can have."""
    role = value.get("role") if isinstance(value, Mapping) else None
    if not isinstance(role, str) or role not in _KNOWN or "content" not in value:
        raise ValueError("a message should have a role, user, assistant or system, and content")
    return {"role": role, "content": blocks_of(value["content"], _KNOWN[role], "messages")}


def _earlier(turns: Any) -> Any:
    """Turns, of which all but the newest are such as can be read, whatever they hold: what was said once must not keep
    a conversation from going on."""
    if not isinstance(turns, list) or len(turns) > MOST_MESSAGES:
        return turns
    return [*map(_readable, turns[:-1]), *turns[-1:]]


def _readable(turn: Any) -> Any:
    role = turn.get("role") if isinstance(turn, Mapping) else None
    if not isinstance(role, str) or role not in _KNOWN:
        return turn
    content = turn.get("content")
    if not isinstance(content, list):
        return {**turn, "content": in_json(content or "")}
    return {**turn, "content": [_readable_block(block, _KNOWN[role]) for block in content]}


def _readable_block(block: Any, known: Known) -> Any:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if not isinstance(kind, str) or kind not in known:
        return {"type": "text", "text": block if isinstance(block, str) else unknown(kind)}
    return {**block, **{name: in_json(block.get(name) or "") for name in known[kind]}}


class Turn(BaseModel):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[dict[str, Any]], WithJsonSchema(_CONTENT)]
    """A string, or blocks: text, tool_result of users; text, thinking, tool_use of assistants. Images and the like in
    earlier turns become words."""


class ClientTool(Body):
    """A function that the model may call. Tools of other types are left out."""

    type: Annotated[str, WithJsonSchema({"const": "custom"})] = "custom"
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """Arguments are valid for the schema."""


def _tools(value: Any) -> Any:
    """Return the tools that the model is told of. ValueError for more than `MOST_TOOLS`."""
    if isinstance(value, list) and len(value) > MOST_TOOLS:
        raise ValueError(f"at most {MOST_TOOLS} tools are allowed, not {len(value)}")
    return [tool for tool in value if _own_type(tool) is None] if isinstance(value, list) else value


def _own_type(tool: Any) -> str | None:
    """The type of a tool that Anthropic defines, and runs or knows the arguments of; None of the client's own."""
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return kind if isinstance(kind, str) and kind != "custom" else None


class MessagesToolChoice(Body):
    """The tool, if any, that the model is to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool to call."""
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _one_tool(self) -> Self:
        if self.type == "tool" and not self.name:
            raise ValueError("a choice of type tool should have the name of the tool in its field name")
        return self


class Thinking(Body):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(default=None, ge=1)
    """Tokens that it may think, tags included."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_what_is_thought(cls, value: Any) -> Any:
        """A bound beside a type that asks for no thinking says nothing."""
        if isinstance(value, Mapping) and value.get("type") != "enabled":
            return {name: item for name, item in value.items() if name != "budget_tokens"}
        return value


class OutputFormat(Body):
    """The format that the answer must have."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """Format of the answer and reasoning effort."""

    format: OutputFormat | None = None
    effort: str | None = None
    """Is the `reasoning_effort` of chats; values that nobody knows have no effect."""


_Turns = Annotated[list[Turn], Field(min_length=1, max_length=MOST_MESSAGES)]


class MessagesPrompt(Body):
    """POST /v1/messages/count_tokens; fields of both endpoints."""

    model: str
    messages: Annotated[
        list[Annotated[Turn, BeforeValidator(_turn)]],
        FailFast(),
        BeforeValidator(_earlier, json_schema_input_type=_Turns),
    ] = Field(min_length=1, max_length=MOST_MESSAGES)
    system: Annotated[Blocks, BeforeValidator(_system, json_schema_input_type=str | list[TextPart])] = Field(
        default_factory=list
    )
    tools: Annotated[list[ClientTool], BeforeValidator(_tools)] = Field(default_factory=list)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    context_management: Annotated[Any, WithJsonSchema({"type": "object"})] = None
    """Edits: whether earlier thinking stays in the prompt, where the chat template knows it. Others have no effect."""

    @property
    def form(self) -> OutputFormat | None:
        """What the answer must look like."""
        return (None if self.output_config is None else self.output_config.format) or self.output_format

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if self.output_format is not None and self.form != self.output_format:
            raise invalid(
                "output_format: output_config.format says something else; give one of them",
                "output_format",
                "conflicting_parameters",
            )
        return self


class MessagesBody(MessagesPrompt, SamplingFields):
    """POST /v1/messages."""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    temperature: float = Field(default=1.0, ge=0.0, le=1.0)
    """0 is greedy."""
    top_k: int = Field(default=0, ge=0)


NAMES: Final = {
    "response_format": "output_config",
    "max_reasoning_tokens": "thinking",
    "guided_begin_after": "output_config",
    "stop": "stop_sequences",
}
"""The names that this API has for fields of the chat API."""


@contextmanager
def own_names(body: MessagesPrompt) -> Iterator[None]:
    """Errors about a chat name the fields that the client gave, in `body`."""
    try:
        yield
    except TooLong as error:
        raise _as_anthropic_says(error) from None
    except ApiError as error:
        if error.param == "response_format" and body.output_format is not None:
            error.param = "output_format"
        error.param = NAMES.get(error.param or "", error.param)
        raise


def _as_anthropic_says(error: TooLong) -> ApiError:
    """Describe a conversation that is too long in the words by which agents know that it is time to make it shorter."""
    if error.prompt >= error.most:
        message = f"prompt is too long: {error.prompt} tokens > {error.most} maximum"
    else:
        message = (
            f"input length and `max_tokens` exceed context limit: {error.prompt} + {error.generated} > {error.most}, "
            "decrease input length or `max_tokens` and try again"
        )
    return invalid(message, "messages", error.code)


def parse_messages(raw: bytes) -> tuple[MessagesBody, ChatBody, list[str]]:
    """The body of /v1/messages, the chat that it is, and the types of tools of which the model is not told; 400 for
    what is wrong with it."""
    value = parse_object(raw)
    reject_unsupported(value, "messages", MessagesBody.model_fields)
    value |= _told(value)
    body = validate(MessagesBody, value)
    same = {"max_tokens": body.max_tokens, "stream": body.stream, "stop": body.stop_sequences}
    left_out = [named(kind) for tool in value.get("tools") or () if (kind := _own_type(tool)) is not None]
    return body, _chat_of(body, **same, **body.shared()), left_out


def _told(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that system turns change; 400 for a turn that asks for a format of the answer, which only
    the request does."""
    turns = value.get("messages")
    for turn in turns if isinstance(turns, list) else ():
        config = turn.get("output_config") if isinstance(turn, Mapping) and turn.get("role") == "system" else None
        if isinstance(config, Mapping) and config.get("format") is not None:
            raise unsupported("output_config.format of a turn; use the request's own output_config: this", "messages")
    return told_by_turns(value)


def parse_prompt(raw: bytes) -> ChatBody:
    """Parse the body of /v1/messages/count_tokens to the chat that it is; 400 for what is wrong with it."""
    value = parse_object(raw)
    asked = {name: given for name, given in value.items() if name != "compaction"}  # it is no part of what is counted
    reject_unsupported(asked, "messages", MessagesBody.model_fields)
    return _chat_of(validate(MessagesPrompt, value | _told(value)))


def _check_new(turn: Turn) -> None:
    """400 for what the newest turn shows that the model cannot see."""
    for block in turn.content if turn.role == "user" else ():
        if block["type"] in _NEW_ONES_REFUSED and said_in(block) in NOT_SHOWN.values():
            raise unsupported(f"a content block of type {block['type']!r} here", "messages")


def _chat_of(body: MessagesPrompt, **more: Any) -> ChatBody:
    _check_new(body.messages[-1])
    messages = messages_of_turns(body.system, [(turn.role, turn.content) for turn in body.messages])
    begun = goes_on(messages)
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": messages,
        "continue_final_message": begun,
        "add_generation_prompt": not begun,
        **thinking_fields(
            None if body.thinking is None else body.thinking.type,
            None if body.output_config is None else body.output_config.effort,
            body.context_management,
        ),
        **more,
    }
    if body.thinking is not None and body.thinking.type == "enabled":
        fields["max_reasoning_tokens"] = body.thinking.budget_tokens
    if (form := body.form) is not None:
        schema = {"name": "answer", "schema": form.schema_, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    with own_names(body):
        chat = validate(ChatBody, fields | _chat_tools(body))
    chat.think_as_it_can()
    return chat


def _chat_tools(body: MessagesPrompt) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if body.tools:
        fields["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.input_schema,
                    "strict": tool.strict,
                },
            }
            for tool in body.tools
        ]
    if (choice := body.tool_choice) is not None:
        kinds: dict[str, Any] = {"auto": "auto", "any": "required", "none": "none"}
        named = {"type": "function", "function": {"name": choice.name or ""}}
        fields["tool_choice"] = kinds.get(choice.type, named)
        fields["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    return fields
