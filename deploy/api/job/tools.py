"""Tools of a chat, and calls of earlier answers, as requests describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from deploy.api.http.errors import unsupported
from deploy.text.chat import tools_of


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
    """What was called, and how."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | list[Any] | None = None
    """JSON, as text as the answer had it, be it valid or not."""


class ToolCallSpec(BaseModel):
    """A call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class NamedFunction(BaseModel):
    """One of the functions."""

    name: str = Field(min_length=1)


class NamedTool(BaseModel):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def check_choice(choice: Any) -> str | NamedTool:
    """The field `tool_choice`. ValueError or 400."""
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        raise unsupported("tool_choice of type allowed_tools; give these tools alone: this", "tool_choice")
    if choice in ("none", "auto", "required"):
        return str(choice)
    try:
        return NamedTool.model_validate(choice, strict=True)
    except ValidationError:
        wanted = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise ValueError(f"input should be {wanted}") from None


def asked_tools(value: Any) -> list[dict[str, Any]]:
    """The field `tools`, as `tools_of` has it, and of each function whether it is strict. ValueError."""
    tools = tools_of(value)
    for tool, given in zip(tools, value, strict=True):
        strict = given["function"].get("strict")
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
