"""Prompts of models that come without a chat template: a function each, in place of the template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from deploy.text.deepseek_chat import encode_v32
from deploy.text.deepseek_v4_chat import encode_v4
from workers.model_folder import config_values


class Encode(Protocol):
    """A chat to its prompt."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt text, special tokens included. `messages` and `tools` are as chat templates get them, arguments of
        calls as objects; a `developer` keeps its role. `variables`: what a chat template would get as such.
        ChatTemplateError for messages that it cannot write."""


@dataclass(frozen=True)
class Encoder:
    """Encoder of chats, and how the answers to its prompts are read."""

    encode: Encode
    tool_parser: str
    """The name of the parser of calls (`deploy.parsing.registry`)."""
    reasoning_parser: str
    """Name of the parser of reasoning."""
    variables: frozenset[str]
    """Variables of `deploy.text.effort` that control its thinking."""


ENCODERS: Final[Mapping[str, Encoder]] = {
    "deepseek_v32": Encoder(
        encode_v32, tool_parser="deepseek_v32", reasoning_parser="deepseek_v3", variables=frozenset({"thinking"})
    ),
    "deepseek_v4": Encoder(
        encode_v4,
        tool_parser="deepseek_v32",
        reasoning_parser="deepseek_v3",
        variables=frozenset({"thinking", "reasoning_effort", "drop_thinking"}),
    ),
}
"""Encoders by `model_type`."""


def encoder_of(folder: Path) -> Encoder | None:
    """The encoder for a model folder by the `model_type` of its config.json; None where there is none."""
    try:
        config = config_values(folder)
    except (OSError, ValueError):
        return None
    kind = config.get("model_type") if isinstance(config, dict) else None
    return ENCODERS.get(kind) if isinstance(kind, str) else None
