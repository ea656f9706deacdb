"""How an answer with reasoning and tool calls in it is read."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from deploy.api.http.errors import invalid
from deploy.api.job.bodies import ChatBody
from deploy.config.api import ApiConfig
from deploy.parsing.assistant import AnswerParser
from deploy.parsing.reasoning import CLOSE, OPEN, ReasoningFormat, ReasoningParser, Where
from deploy.parsing.registry import MARKERS, REASONING_PARSERS, TOOL_PARSERS, reasoning_parser_of, tool_parser_of
from deploy.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Reading:
    """How the answers to one request are read."""

    parser: Callable[[], AnswerParser]
    """Makes the parser of one answer."""
    kept: frozenset[int]
    """Special tokens that the parser needs to see."""
    one_call: bool
    """An answer ends with its first call."""
    where: Where = "outside"
    """Whether answers begin with reasoning."""
    reasoning: ReasoningFormat | None = None
    """How reasoning is told apart, if it is."""
    calls: str | None = None
    """The name of the format of calls, if there may be any."""


PLAIN: Final = Reading(lambda: AnswerParser(None, None), frozenset(), one_call=False)
"""All of an answer is content."""


class Reader:
    """Which parsers the answers of a model are read with. One per application."""

    def __init__(self, tokenizer: Tokenizer | None, config: ApiConfig) -> None:
        template = "" if tokenizer is None else tokenizer.template_for(config.chat_template, tools=False)
        with_tools = "" if tokenizer is None else tokenizer.template_for(config.chat_template, tools=True)
        self.tools = _chosen(config.tool_parser, tool_parser_of(with_tools))
        self.reasoning = _chosen(config.reasoning_parser, reasoning_parser_of(template))
        self._kept_of_tools = _kept(tokenizer, MARKERS[self.tools]) if self.tools else frozenset()
        self._kept_of_reasoning = _kept(tokenizer, (OPEN, CLOSE)) if self.reasoning else frozenset()

    def reading(self, body: ChatBody, prompt: str) -> Reading | None:
        """How the answers to a chat are read whose prompt is `prompt`; None where all of them is content. 400 for tools
        whose calls nobody could read."""
        uses_tools = bool(body.tools) and body.tool_choice != "none"
        if uses_tools and self.tools is None:
            raise invalid(
                "tools: it is not known how this model writes calls; start the server with --tool-parser "
                f"({', '.join(TOOL_PARSERS)})",
                "tools",
            )
        form = None if self.reasoning is None else REASONING_PARSERS[self.reasoning]
        if form is None and not uses_tools:
            return None
        where: Where = "outside"
        if form is not None:
            goes_on = body.continue_final_message
            where = form.continues(body.messages[-1].content) if goes_on else form.begins(prompt)
        tools, schemas = self.tools if uses_tools else None, _schemas(body)

        def parser() -> AnswerParser:
            calls = None if tools is None else TOOL_PARSERS[tools](schemas, _call_id)
            return AnswerParser(None if form is None else ReasoningParser(form, where), calls)

        kept = (self._kept_of_tools if uses_tools else frozenset()) | self._kept_of_reasoning
        return Reading(parser, kept, uses_tools and not body.parallel_tool_calls, where, form, tools)


def _chosen(setting: str, by_template: str | None) -> str | None:
    return by_template if setting == "auto" else None if setting == "none" else setting


def _kept(tokenizer: Tokenizer | None, markers: tuple[str, ...]) -> frozenset[int]:
    """The special tokens that markers are made of."""
    if tokenizer is None:
        return frozenset()
    return frozenset(
        token for token in tokenizer.special_ids if any(tokenizer.token_string(token) in marker for marker in markers)
    )


def _schemas(body: ChatBody) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in body.tools}


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
