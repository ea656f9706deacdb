"""Tools of a chat, and calls of earlier answers, as requests describe them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, Field

from deploy.api.errors import unsupported


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """The JSON schema of its arguments."""
    strict: Literal[False] | None = None


class ToolSpec(BaseModel):
    """A tool."""

    type: Literal["function"] = "function"
    function: FunctionSpec


class CalledFunction(BaseModel):
    """What was called, and how."""

    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] = "{}"
    """JSON, as text as the answer had it."""


class ToolCallSpec(BaseModel):
    """A call of an earlier answer."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


def check_strict(tools: Any) -> None:
    """400 for a function that is to be called with valid arguments by construction."""
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if isinstance(function, Mapping) and function.get("strict"):
            raise unsupported("strict: true in a tool's function", "tools")


def check_choice(choice: Any) -> str:
    """The field `tool_choice`, of which `none` and `auto` can be had; 400."""
    if choice in ("none", "auto"):
        return str(choice)
    if choice == "required" or isinstance(choice, Mapping):
        raise unsupported("tool_choice other than none and auto: a call that the model must make", "tool_choice")
    raise ValueError("input should be none or auto")
