"""Changes of the tools and the effort within one of Anthropic's conversations, by its system turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from deploy.text.effort import RANKED

CHANGES: Final[Mapping[str, str]] = {
    "tool_addition": "can be called from here on",
    "tool_removal": "can no longer be called",
}
"""Blocks of system turns that change which tools there are, and what is said of the tool."""


def changed_tool(block: Mapping[str, Any]) -> str:
    """The name of the tool that a block of `CHANGES` is about; "" if it has none."""
    tool = block.get("tool")
    held = tool.get("definition", tool) if isinstance(tool, Mapping) else None
    name = held.get("name", held.get("server_name")) if isinstance(held, Mapping) else None
    return name if isinstance(name, str) else ""


def told_by_turns(data: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of one of Anthropic's bodies that system turns within its messages change: which tools there are, the
    effort, and the messages, without the turns that were for one turn of the user alone or say nothing else."""
    turns = data.get("messages")
    if not isinstance(turns, list) or not any(
        isinstance(turn, Mapping) and turn.get("role") == "system" for turn in turns
    ):
        return {}
    last = max((place for place, turn in enumerate(turns) if _has_role(turn, "user")), default=-1)
    told: dict[str, Any] = {"messages": []}
    changed: dict[str, Any] = {}
    """Definitions of tools by name, None of those that are no more."""
    defined: dict[str, Any] = {}
    """The last definition that a turn gave of each tool, whether there is the tool or not."""
    for place, turn in enumerate(turns):
        if not _has_role(turn, "system"):
            told["messages"].append(turn)
            continue
        config, content = turn.get("output_config"), turn.get("content")
        if isinstance(config, Mapping) and config.get("effort") in RANKED:
            given = data.get("output_config")
            told["output_config"] = {**(given if isinstance(given, Mapping) else {}), "effort": config["effort"]}
        for block in content if isinstance(content, list) else ():
            if isinstance(block, Mapping) and block.get("type") in (*CHANGES,):
                _change(changed, defined, block)
        passed = turn.get("clear_at") == "next_user_message" and place < last
        if not passed and (content is not None or not isinstance(config, Mapping)):
            told["messages"].append(turn)
    tools = data.get("tools")
    if changed and isinstance(tools, list | None):  # anything else is told to be none
        kept = [tool for tool in tools or () if not _is_named(tool, changed)]
        told["tools"] = kept + [definition for definition in changed.values() if definition is not None]
    return told


def _has_role(turn: Any, role: str) -> bool:
    return isinstance(turn, Mapping) and turn.get("role") == role


def _change(changed: dict[str, Any], defined: dict[str, Any], block: Mapping[str, Any]) -> None:
    """Note what a block of `CHANGES` does to a tool."""
    name, tool = changed_tool(block), block.get("tool")
    definition = tool.get("definition") if isinstance(tool, Mapping) else None
    if block["type"] == "tool_removal":
        changed[name] = None
    elif isinstance(definition, Mapping):
        changed[name] = defined[name] = definition
    elif name in defined:
        changed[name] = defined[name]
    else:
        changed.pop(name, None)  # a tool that was there before


def _is_named(tool: Any, names: Mapping[str, Any]) -> bool:
    name = tool.get("name") if isinstance(tool, Mapping) else None
    return isinstance(name, str) and name in names
