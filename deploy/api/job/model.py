"""The model that is served, as requests need it: its names, its tokenizer and chat template, and how its answers are
read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, Final

import kernels
from deploy.api.http.errors import ApiError, TooLong, engine_down, invalid, model_not_found, unsupported
from deploy.api.job.chat_bodies import ChatBody, ChatTemplateFields
from deploy.api.job.defaults import SamplingDefaults
from deploy.api.job.tools import may_answer, shown
from deploy.config.api import ApiConfig
from deploy.parsing.answer import AnswerParser, ReasoningFormat, ReasoningParser, Where
from deploy.parsing.registry import (
    MARKERS,
    REASONING_PARSERS,
    TOOL_PARSERS,
    named_for,
    reasoning_parser_of,
    tool_parser_of,
)
from deploy.text.chat import ChatTemplateError, ToolsUnknown, joined, template_message
from deploy.text.effort import SWITCHES
from deploy.text.handed import HandedPrompts
from deploy.text.tokenizer import Tokenizer, TooManyTokens
from workers.protocol.front import Engine, ModelInfo

TEXT_TOKENS = 2**20
"""Most tokens of a text that are counted, if the context is not half as long."""


class ServedModel:
    """Model that the front serves. There is one per application."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        config: ApiConfig,
        numerics: Mapping[str, object],
        sampling_defaults: SamplingDefaults,
        handed: HandedPrompts | None = None,
    ) -> None:
        """`numerics`: the engine's settings that decide how it rounds. `handed`: prompts that routers have encoded."""
        self.tokenizer, self.config, self.sampling_defaults = tokenizer, config, sampling_defaults
        self.reader = Reader(tokenizer, config)
        self._engine, self._numerics, self._handed = engine, dict(numerics), handed

    def info(self) -> ModelInfo:
        """Facts about the model, from the engine; 503 while there is no engine."""
        if self._engine.fault is not None:
            raise engine_down(self._engine.fault)
        try:
            return self._engine.info
        except RuntimeError as error:
            raise ApiError(503, f"starting: {error}", kind="server_error", code="starting") from None

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of what decides which numbers come out: model, version, the engine's numeric settings and the
        ranks that share out its cache. 503 while there is no model."""
        info = self.info()
        parts = [kernels.__version__, info.name, sorted(self._numerics.items()), info.cache_shards]
        return f"fp_{blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"

    def names(self) -> tuple[str, ...]:
        """Names a request may give."""
        return self.config.served_model_names or (self.info().name,)

    def check_name(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name not in self.names():
            raise model_not_found(name)

    def needs_tokenizer(self, param: str, instead: str = "") -> Tokenizer:
        """The tokenizer; 400 naming `param` where there is none, and what works `instead`."""
        if self.tokenizer is None:
            raise invalid(f"{param}: this model has no tokenizer{instead}", param, "no_tokenizer")
        return self.tokenizer

    def render(self, body: ChatTemplateFields) -> str:
        """The prompt text of a chat; 400 when there can be none."""
        tokenizer = self.needs_tokenizer("messages", "; only /v1/completions with token ids works")
        self.reader.check_thinking(body)
        return render_messages(tokenizer, self.config, body)

    def most_tokens(self) -> int:
        """Tokens of a text beyond which it is not encoded: no model could read it."""
        return max(TEXT_TOKENS, 2 * self.info().max_context)

    async def encode(self, texts: Sequence[str], add_special_tokens: bool, param: str) -> list[Sequence[int]]:
        """Ids of prompt texts. 400 without tokenizing when one cannot fit."""
        tokenizer, info = self.needs_tokenizer(param), self.info()
        floor = max((len(text) for text in texts), default=0) // tokenizer.longest_token
        if floor >= info.max_context:
            raise too_long(floor, 1, info, param, at_least=True)
        if self._handed is not None and len(texts) == 1:
            ids = self._handed.ids(texts[0], add_special_tokens)
            if ids:
                return [ids]
        most = self.most_tokens()
        try:
            prompts = await tokenizer.encode_all_async(texts, add_special_tokens, most)
        except TooManyTokens:
            raise too_long(most, 1, info, param, at_least=True) from None
        if not all(prompts):
            raise invalid(f"{param}: no token is left of it", param, "empty_prompt")
        return [tuple(ids) for ids in prompts]

    async def tokenize(self, text: str, add_special_tokens: bool, param: str) -> list[int]:
        """Ids of a text that is no prompt, and may be longer than one; 400 for one that is much longer."""
        tokenizer, most = self.needs_tokenizer(param), self.most_tokens()
        try:
            return await tokenizer.encode_async(text, add_special_tokens, most)
        except TooManyTokens:
            part = "them" if param == "messages" else "it"
            raise invalid(f"{param}: more than {most} tokens; send {part} in parts", param) from None


def too_long(prompt: int, generated: int, info: ModelInfo, param: str, at_least: bool = False) -> ApiError:
    """400 context_length_exceeded."""
    return TooLong(prompt, generated, info.max_context, param, at_least)


def render_messages(tokenizer: Tokenizer, config: ApiConfig, body: ChatTemplateFields) -> str:
    """The prompt text of a chat; 400 when the messages do not fit the template."""
    if body.add_generation_prompt and body.continue_final_message:
        raise invalid(
            "continue_final_message: set add_generation_prompt to false with it, they exclude each other",
            "continue_final_message",
        )
    tools = shown(body.tools) if body.tools and body.tool_choice != "none" else ()
    try:
        return tokenizer.render_chat(
            [template_message(message.role, message.content, message.model_dump()) for message in body.messages],
            tools=tools,
            template=config.chat_template,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            thinking=body.asked_thinking(),
            extra=body.chat_template_kwargs,
            control_tokens_in_text=config.control_tokens_in_text,
        )
    except ToolsUnknown as error:
        raise unsupported(str(error), "tools" if body.tools else "messages") from None
    except ChatTemplateError as error:
        raise invalid(str(error), "messages") from None


@dataclass(frozen=True)
class Reading:
    """Rules for reading the answers to one request."""

    parser: Callable[[Callable[[], str]], AnswerParser]
    """Makes the parser of one answer, which takes the ids of its tool calls from the function that it is given."""
    kept: frozenset[int]
    """Special tokens that the parser needs to see."""
    one_call: bool
    """An answer ends with its first call."""
    where: Where = "outside"
    """Whether answers begin with reasoning."""
    reasoning: ReasoningFormat | None = None
    """Format of the reasoning; None if it is not told apart."""
    calls: str | None = None
    """The name of the format of calls, if there may be any."""
    stops_in_reasoning: bool = False
    """Stop strings end the reasoning, too, not the answer after it alone."""


PLAIN: Final = Reading(lambda _: AnswerParser(None, None), frozenset(), one_call=False)
"""Rules for answers of which all is content."""


class Reader:
    """The parsers with which a model's answers are read. There is one per application."""

    def __init__(self, tokenizer: Tokenizer | None, config: ApiConfig) -> None:
        calls, reasoning = _parsers_of(tokenizer, config.chat_template)
        self.tools = _chosen(config.tool_parser, calls, tokenizer)
        self.reasoning = _chosen(config.reasoning_parser, reasoning, tokenizer)
        self._tokenizer, self._template = tokenizer, config.chat_template
        self._stops_in_reasoning = config.stop_in_reasoning
        self._kept_of_tools = _kept(tokenizer, MARKERS[self.tools]) if self.tools else frozenset()
        form = REASONING_PARSERS[self.reasoning] if self.reasoning else None
        self._kept_of_reasoning = frozenset() if form is None else _kept(tokenizer, (form.open, form.close))

    def check_thinking(self, body: ChatTemplateFields) -> None:
        """400 for what the model cannot do of what a request says of thinking."""
        asked = body.asked_thinking()
        if asked.thinks is None or self._tokenizer is None or {*SWITCHES} & body.chat_template_kwargs.keys():
            return
        if body.thinks_as_it_can:
            return
        if self.reasoning is None:
            if not asked.mild:
                raise invalid(
                    f"{asked.field}: it is not known how this model reasons; leave it out, or start the server with "
                    f"--reasoning-parser ({', '.join(REASONING_PARSERS)})",
                    asked.field,
                    "unsupported_value",
                )
        elif not asked.thinks and not self._tokenizer.known_thinking(self._template, bool(body.tools)).can_be_off:
            raise invalid(
                f"{asked.field}: this model always reasons, its chat template has no switch for it; leave it out, or "
                "bound the reasoning by max_reasoning_tokens",
                asked.field,
                "unsupported_value",
            )

    def reading(self, body: ChatBody, prompt: str) -> Reading | None:
        """Return the rules for reading the answers to a chat whose prompt is `prompt`; None where all of an answer is
        content. 400 for tools whose calls nobody could read."""
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
            where = form.continues(joined(body.messages[-1].content)) if goes_on else form.begins(prompt)
        tools, schemas = self.tools if uses_tools else None, _schemas(body)
        free, form_or_calls = not _bound_behind_reasoning(body), body.formed and may_answer(body.tool_choice)

        def parser(call_id: Callable[[], str]) -> AnswerParser:
            calls = None if tools is None else TOOL_PARSERS[tools](schemas, call_id)
            return AnswerParser(None if form is None else ReasoningParser(form, where), calls, free, form_or_calls)

        kept = (self._kept_of_tools if uses_tools else frozenset()) | self._kept_of_reasoning
        one_call = uses_tools and not body.parallel_tool_calls
        return Reading(parser, kept, one_call, where, form, tools, self._stops_in_reasoning)


def _parsers_of(tokenizer: Tokenizer | None, template: str | None) -> tuple[str | None, str | None]:
    """The names of the parsers of calls and of reasoning as chats are written, with `template` unless it is None."""
    if tokenizer is None:
        return None, None
    if (encoder := tokenizer.encoder_for(template)) is not None:
        return encoder.tool_parser, encoder.reasoning_parser
    with_tools, without = (tokenizer.template_for(template, tools=tools) for tools in (True, False))
    return tool_parser_of(with_tools), reasoning_parser_of(without)


def _chosen(setting: str, by_chats: str | None, tokenizer: Tokenizer | None) -> str | None:
    """The name of a parser, with the ending that the vocabulary's tags have, where that is the checkpoint's own."""
    name = by_chats if setting == "auto" else None if setting == "none" else setting
    return named_for(name, () if tokenizer is None else map(tokenizer.token_string, range(tokenizer.size)))


def _kept(tokenizer: Tokenizer | None, markers: tuple[str, ...]) -> frozenset[int]:
    """The special tokens that markers are made of."""
    if tokenizer is None:
        return frozenset()
    return frozenset(
        token for token in tokenizer.special_ids if any(tokenizer.token_string(token) in marker for marker in markers)
    )


def _schemas(body: ChatBody) -> dict[str, Mapping[str, Any]]:
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in body.tools}


def _bound_behind_reasoning(body: ChatBody) -> bool:
    """Whether something is enforced that begins where the closing tag of the reasoning stands, so that a call before it
    would not be bound, or be cut."""
    strict = any(tool["function"]["strict"] for tool in body.tools)
    return body.tool_choice != "auto" or strict or body.formed or body.max_reasoning_tokens is not None
