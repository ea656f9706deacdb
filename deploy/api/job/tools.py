"""Tools of a chat, and calls of earlier answers, as requests describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, Field, ValidationError

from deploy.text.chat import MOST_TOOLS, function_of, tools_of


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: bool | None = None
    """Arguments are valid for the schema, whatever the model makes of it. Where a call must be made they are, too,
    unless this is false: then they are any JSON object."""


class ToolSpec(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class CalledFunction(BaseModel):
    """Name and arguments of a call."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | list[Any] | None = None
    """JSON, as text as the answer had it, be it valid or not."""


class ToolCallSpec(BaseModel):
    """A call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(BaseModel):
    """Function that must be called."""

    name: str = Field(min_length=1)


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MOST_TOOLS)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tools."""
        return frozenset(tool.function.name for tool in self.tools)


class AllowedToolsChoice(BaseModel):
    """The model calls these tools or none. It is told of all tools, so that prompts stay equal from turn to turn."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Word = Literal["none", "auto", "required"]
ToolChoice = Word | NamedTool | AllowedToolsChoice
AskedToolChoice = Word | Literal["any"] | NamedTool | AllowedToolsChoice
"""As a request may have it: `any` is Mistral's word for `required`."""
_WORDS: Final[Mapping[str, Word]] = {"none": "none", "auto": "auto", "required": "required", "any": "required"}


def check_choice(choice: Any) -> ToolChoice:
    """The field `tool_choice`. ValueError."""
    if isinstance(choice, str) and choice in _WORDS:
        return _WORDS[choice]
    if isinstance(choice, Mapping):
        choice = _as_chats_have_it(choice)
        if isinstance(choice, str):
            return _WORDS[choice]
    kind: type[NamedTool | AllowedToolsChoice] = NamedTool
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        kind = AllowedToolsChoice
    try:
        return kind.model_validate(choice, strict=True)
    except ValidationError:
        named = '{"type": "function", "function": {"name": ...}}'
        allowed = '{"mode": "auto" or "required", "tools": [' + named + ", ...]}"
        wanted = f"none, auto, required or {named}"
        if kind is AllowedToolsChoice:
            wanted = f'{{"type": "allowed_tools", "allowed_tools": {allowed}}}'
        raise ValueError(f"input should be {wanted}") from None


def _as_chats_have_it(choice: Mapping[str, Any]) -> Any:
    """A choice in the form of chats, which clients also write as other APIs have it."""
    kind, name = choice.get("type"), choice.get("name")
    if isinstance(kind, str) and kind in _WORDS:
        return kind
    if kind in ("function", "tool") and isinstance(name, str) and "function" not in choice:
        return {"type": "function", "function": {"name": name}}
    return choice


def may_answer(choice: ToolChoice) -> bool:
    """Whether an answer may call tools, and need not."""
    return choice == "auto" or (isinstance(choice, AllowedToolsChoice) and choice.allowed_tools.mode == "auto")


def asked_tools(value: Any) -> list[dict[str, Any]]:
    """The field `tools`, as `tools_of` has it, and of each function whether it is strict. ValueError."""
    tools = tools_of(value)
    for tool, given in zip(tools, value, strict=True):
        strict = function_of(given).get("strict")
        if strict is not None and not isinstance(strict, bool):
            raise ValueError("a function's strict should be true or false")
        tool["function"]["strict"] = strict
    return tools


def shown(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tools as the model is told of them."""
    return [
        {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
        for tool in tools
    ]
