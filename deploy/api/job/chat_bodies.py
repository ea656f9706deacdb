"""Bodies of chats: messages, and fields that control how they become a prompt. The fields of any request that generates
are in `bodies`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    FailFast,
    Field,
    GetJsonSchemaHandler,
    PrivateAttr,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from typing_extensions import override

from deploy.api.http.errors import unsupported
from deploy.api.job.bodies import Body, GenerationBody, at_most, or_null
from deploy.api.job.tools import AskedToolChoice, ToolCallSpec, ToolChoice, ToolSpec, asked_tools, check_choice
from deploy.text.chat import (
    MOST_MESSAGES,
    MOST_TEMPLATE_VARIABLES,
    Content,
    content_of,
    is_begun,
    readable,
    spoken,
    tool_calls_of,
)
from deploy.text.effort import EFFORTS, FIELDS, Thinking, checked, thinking_of
from workers.grammar.text_grammar import TextGrammar

ROLES: Final = ("system", "developer", "user", "assistant", "tool")


def _content(value: Any) -> Content:
    """A message's content. Texts alone are parts of it that are known."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("input should be a string or a list of parts")
    texts: list[str] = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError("a content part should be an object with a type")
        if kind != "text":
            raise unsupported(f"a content part of type {kind[:64]!r}", "messages")
        text = part.get("text")
        if not isinstance(text, str):
            raise ValueError("a text part should have a string in its field text")
        texts.append(text)
    return content_of(texts)


class TextPart(BaseModel):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class Message(Body):
    """Message of a chat."""

    role: Annotated[str, WithJsonSchema({"enum": list(ROLES), "type": "string"})]
    content: Annotated[Content, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]
    """A string, or a list of parts of type text. An assistant's or a tool's message needs none."""
    reasoning_content: str | None = None
    """Reasoning that the assistant wrote before its answer."""
    reasoning: Annotated[Any, WithJsonSchema({})] = None
    """Alias of `reasoning_content`, used where that is not given and this is a string."""
    tool_calls: Annotated[
        list[dict[str, Any]], BeforeValidator(tool_calls_of, json_schema_input_type=list[ToolCallSpec])
    ] = Field(default_factory=list)
    """Tool calls that the assistant made."""
    tool_call_id: str | None = None
    """The call that a tool's message is the result of."""
    name: Annotated[Any, WithJsonSchema({})] = None
    """Name of the speaker or of the tool. Some models' chat templates write it."""

    @model_validator(mode="before")
    @classmethod
    def _by_role(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        role = value.get("role")
        if role == "function" or value.get("function_call"):
            raise unsupported("function calling (functions); use tools: this", "messages")
        if isinstance(role, str) and role not in ROLES:
            raise ValueError(f"unknown role {role[:64]!r}; one of {', '.join(ROLES)} is expected")
        if role == "tool" and not isinstance(value.get("tool_call_id"), str):
            raise ValueError("a tool's message should have the id of the call, a string, in its field tool_call_id")
        if value.get("tool_calls") and role != "assistant":
            raise ValueError("only an assistant's message can have tool_calls")
        if role == "assistant" and isinstance(value.get("content"), list):
            return {**value, "content": spoken(value["content"])}
        if role in ("assistant", "tool") and value.get("content") is None:  # it said nothing
            return {**value, "content": ""}
        return value

    @override
    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Assistants and tools may say nothing."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        described = handler.resolve_ref_schema(schema)
        described["required"].remove("content")
        described["anyOf"] = [
            {"required": ["content"]},
            {"properties": {"role": {"enum": ["assistant", "tool"]}}},
        ]
        content = described["properties"]["content"]
        described["properties"]["content"] = or_null(content)
        described["anyOf"][0]["properties"] = {"content": {"not": {"type": "null"}}}
        return schema


_FLAG: Final = {"type": "boolean"}
_COUNT: Final = {"type": "integer", "minimum": 1}
_REASONING: Final = {
    "type": "object",
    "properties": {"effort": {"enum": list(EFFORTS), "type": "string"}, "enabled": _FLAG, "max_tokens": _COUNT},
}
_THINKING: Final = {
    "anyOf": [
        _FLAG,
        {
            "type": "object",
            "properties": {
                "type": {"enum": ["enabled", "disabled", "adaptive", "auto", "between_tools"]},
                "budget_tokens": _COUNT,
                "keep": {"const": "all"},
                "clear_thinking": _FLAG,
            },
            "required": ["type"],
        },
    ]
}


_Messages = Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)]


class ChatTemplateFields(Body):
    """Fields that control how messages become a prompt."""

    messages: Annotated[list[Message], FailFast(), BeforeValidator(readable, json_schema_input_type=_Messages)] = Field(
        min_length=1, max_length=MOST_MESSAGES
    )
    add_generation_prompt: bool = True
    """End the prompt with what opens an assistant message."""
    continue_final_message: bool = False
    """Leave the last message open, for the model to go on with."""
    chat_template_kwargs: Annotated[dict[str, Any], BeforeValidator(at_most(MOST_TEMPLATE_VARIABLES, "variables"))] = (
        Field(default_factory=dict)
    )
    """Variables for the chat template."""
    tools: Annotated[list[dict[str, Any]], BeforeValidator(asked_tools, json_schema_input_type=list[ToolSpec])] = Field(
        default_factory=list
    )
    """Tools that the model may call."""
    tool_choice: Annotated[ToolChoice, BeforeValidator(check_choice, json_schema_input_type=AskedToolChoice)] = "auto"
    """none: the model is not told of tools. auto: it calls them or not. required or any: it calls at least one. A
    function: it calls this one. Allowed tools: it calls these alone, and at least one of them if that is the mode."""
    add_special_tokens: bool = False
    """Add the begin-of-sequence id and the like once more; templates usually write them."""

    # Whether and how hard the model is to think; see `deploy.text.effort`.
    reasoning_effort: Annotated[str | None, BeforeValidator(partial(checked, "reasoning_effort"))] = None
    """none ... max; what the chat template has a switch for is done."""
    reasoning: Annotated[Any, BeforeValidator(partial(checked, "reasoning")), WithJsonSchema(_REASONING)] = None
    """Thinking settings as {"effort"}, {"enabled"} and {"max_tokens"}."""
    thinking: Annotated[Any, BeforeValidator(partial(checked, "thinking")), WithJsonSchema(_THINKING)] = None
    """Thinking settings as {"type": "enabled", "budget_tokens"}, {"type": "disabled"} or a boolean."""
    enable_thinking: Annotated[Any, BeforeValidator(partial(checked, "enable_thinking")), WithJsonSchema(_FLAG)] = None
    """Whether the model is to think."""
    thinking_budget: Annotated[Any, BeforeValidator(partial(checked, "thinking_budget")), WithJsonSchema(_COUNT)] = None
    """Alias of `max_reasoning_tokens`."""
    thinking_token_budget: Annotated[
        Any, BeforeValidator(partial(checked, "thinking_token_budget")), WithJsonSchema(_COUNT)
    ] = None
    """Alias of `max_reasoning_tokens`."""
    clear_thinking: Annotated[Any, BeforeValidator(partial(checked, "clear_thinking")), WithJsonSchema(_FLAG)] = None
    """Whether the prompt leaves out what the model thought before the last question, where the template knows it."""
    preserve_thinking: Annotated[Any, BeforeValidator(partial(checked, "preserve_thinking")), WithJsonSchema(_FLAG)] = (
        None
    )
    """The opposite of `clear_thinking`."""

    @model_validator(mode="before")
    @classmethod
    def _as_begun(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and is_begun(value.get("messages")):
            return {**value, "continue_final_message": True, "add_generation_prompt": False}
        return value

    _thinks_as_it_can: bool = PrivateAttr(default=False)

    def think_as_it_can(self) -> None:
        """Have a model that cannot do what these fields say think as it always does, in place of a 400."""
        self._thinks_as_it_can = True

    @property
    def thinks_as_it_can(self) -> bool:
        """Whether it was said so."""
        return self._thinks_as_it_can

    def asked_thinking(self) -> Thinking:
        """Return the request's thinking settings, combined from all fields that concern thinking."""
        return thinking_of({name: getattr(self, name) for name in FIELDS})


class ChatBody(ChatTemplateFields, GenerationBody):
    """POST /v1/chat/completions."""

    max_completion_tokens: int | None = Field(default=None, ge=1)
    """The newer name of `max_tokens`; wins over it."""
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0)
    parallel_tool_calls: bool = True
    """false: an answer ends with its first call."""
    max_reasoning_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the reasoning of an answer may have, tags included; it is closed then, and the answer follows."""
    _inputs: Mapping[str, TextGrammar] = PrivateAttr(default_factory=dict)

    @property
    def inputs(self) -> Mapping[str, TextGrammar]:
        """Grammars for the arguments of tools with one text argument, by function name."""
        return self._inputs

    def hold_inputs(self, inputs: Mapping[str, TextGrammar]) -> None:
        """Hold the one argument of these functions, which are strict, to grammars as far as the format of calls can."""
        self._inputs = inputs

    @model_validator(mode="after")
    def _one_bound_of_reasoning(self) -> Self:
        if self.max_reasoning_tokens is None and (budget := self.asked_thinking().budget) is not None:
            self.max_reasoning_tokens = budget
        return self

    @override
    @property
    def constrained(self) -> bool:
        """Whether the answer has a grammar, as tools that are, or must be, called and bounds of reasoning have, too."""
        chosen = self.tool_choice not in ("none", "auto")
        return super().constrained or bool(self.tools) or chosen or self.max_reasoning_tokens is not None
