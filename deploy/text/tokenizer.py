"""A model folder's tokenizer and chat template, as the HTTP front uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from deploy.text.chat import BREAK, ChatTemplateError, ControlTokens, speaks_of_tools, with_system_messages
from deploy.text.content_parts import separators, with_joined_parts
from deploy.text.deepseek_chat import with_tools_in_system_message
from deploy.text.detok import ByteDetokenizer, Detokenizer, TextStream, WindowDetokenizer
from deploy.text.effort import EFFORT, KEEPERS, SWITCHES, KnownThinking, Thinking, tried
from deploy.text.encoders import Encoder, encoder_of
from deploy.text.kimi_chat import DECLARATIONS, is_of_kimi, sorted_by_name, with_own_ids
from deploy.text.mending import without_halves
from deploy.text.segments import Cuts
from deploy.text.stop import StopMatcher
from deploy.text.template_variables import RESERVED_TEMPLATE_NAMES, read_variables
from deploy.text.tool_template import ToolTemplate
from deploy.text.turn_order import in_strict_order
from deploy.text.typescript import declarations
from workers.vocabulary.folder import load_tokenizer, special_ids
from workers.vocabulary.spelling import byte_vocabulary

INLINE_CHARS = 4_000
"""Texts up to this length are encoded in the event loop (about 1 ms); longer ones in a thread."""
INLINE_IDS = 4_000
"""Number of ids up to which they are decoded in the event loop; more are decoded in a thread."""
LONG_CHARS = 2**18
"""Texts longer than this are encoded one after another. While it is encoded a text takes up to 250 bytes a character:
the longest of a few requests at once would be more memory than there is."""

PIECE_CHARS = 2**16
"""Texts that may have too many tokens are counted in pieces of this length."""


class TooManyTokens(Exception):
    """A text has more tokens than its reader wants to know of."""


class Tokenizer:
    """Text to ids, ids to text, messages to text.

    `hf` is a transformers fast tokenizer: it keeps the folder's conventions (begin-of-sequence id, chat template);
    encoding and decoding go straight to its backend, as batches of one: only in those does it let the interpreter go
    while it works. Otherwise the event loop would stand still for as long as a thread encodes.
    """

    def __init__(self, hf: Any, encoder: Encoder | None = None) -> None:
        """`encoder` writes chats where neither the folder nor the settings have a chat template."""
        self._hf = hf
        self._encoder = None if hf.chat_template else encoder
        self._backend = hf.backend_tokenizer
        self.special_ids = special_ids(self._backend)
        """Ids that `skip_special_tokens` leaves out of a text."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        self.size = 1 + max(vocabulary.values())
        """Largest id + 1; a model's vocabulary may be padded beyond it."""
        self._tokens = [""] * self.size
        for token, index in vocabulary.items():
            self._tokens[index] = token
        self._control_tokens = ControlTokens(self._backend)
        self._tool_templates: dict[str | None, ToolTemplate] = {}
        self._separators: dict[str | None, dict[str, str]] = {}
        self._known_thinking: dict[str, KnownThinking] = {}
        self._long = asyncio.Lock()
        """Held while a text of more than `LONG_CHARS` is encoded."""
        self._bytes = byte_vocabulary(self._backend)
        self._shown_bytes = [b"" if i in self.special_ids else raw for i, raw in enumerate(self._bytes or ())]
        self._kept_bytes: dict[frozenset[int], list[bytes]] = {}
        """Bytes of the tokens as in `_shown_bytes`, by the set of special tokens that are shown. There are as many sets
        as parsers."""
        lengths = map(len, self._bytes if self._bytes is not None else (token.encode() for token in self._tokens))
        self.longest_token = max(lengths)
        """Bytes of the longest token: a text of more than `longest_token` * n bytes has more than n tokens."""

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer | None:
        """The tokenizer of a model folder, None if it holds none. ValueError when it cannot be read."""
        hf = load_tokenizer(Path(folder))
        return None if hf is None else cls(hf, encoder_of(Path(folder)))

    @cached_property
    def cuts(self) -> Cuts:
        """Where texts may be cut. A router asks for it, and nobody else."""
        return Cuts(self._backend)

    @property
    def writes_bytes(self) -> bool:
        """Whether its tokens are bytes of text, one after the other, as grammars need it."""
        return self._bytes is not None

    @property
    def has_chat_template(self) -> bool:
        """Whether the folder brings a chat template, or is that of a model whose chats an encoder writes."""
        return bool(self._hf.chat_template) or self._encoder is not None

    def encoder_for(self, template: str | None) -> Encoder | None:
        """Return the encoder that writes chats in place of a chat template; None where there is a template, `template`
        or the folder's."""
        return self._encoder if template is None else None

    def template_for(self, template: str | None, tools: bool) -> str:
        """The text of the chat template that is used, `template` unless it is None; empty for none. Folders may have
        several, one of them for chats with tools."""
        if template is not None:
            return template
        given: str | dict[str, str] | None = self._hf.chat_template
        if not isinstance(given, dict):
            return given or ""
        names = ["tool_use"] if tools else []
        chosen = [name for name in (*names, "default", *(given if len(given) == 1 else ())) if name in given]
        return given[chosen[0]] if chosen else ""

    def thinking_variables(self, thinking: Thinking, template: str | None, tools: bool) -> dict[str, Any]:
        """Return the variables that tell the chat template how the model is to think; `template` and `tools`: see
        `template_for`."""
        return thinking.variables(self.known_thinking(template, tools))

    def thinking_switches(self, template: str | None, tools: bool) -> frozenset[str]:
        """Return those of the variables of `deploy.text.effort` that the chat template, or the encoder in its place,
        reads."""
        encoder = self.encoder_for(template)
        read = read_variables(self.template_for(template, tools)) if encoder is None else encoder.variables
        return read & {*SWITCHES, EFFORT, *KEEPERS}

    def known_thinking(self, template: str | None, tools: bool) -> KnownThinking:
        """What the chat template, or the encoder in its place, can be told of thinking, found out by trying it."""
        text = "" if self.encoder_for(template) is not None else self.template_for(template, tools)
        if text not in self._known_thinking:

            def render(variables: Mapping[str, Any]) -> str | None:
                try:
                    return self._apply([{"role": "user", "content": "Hello"}], [], text or template, variables)
                except ChatTemplateError:
                    return None

            self._known_thinking[text] = tried(render, self.thinking_switches(template, tools))
        return self._known_thinking[text]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the begin-of-sequence id and the like if the tokenizer adds them. ValueError where it is
        no Unicode text, as Python makes of arguments and files with bytes that are not UTF-8."""
        first, *more = text.split(BREAK)
        try:
            [encoding] = self._backend.encode_batch_fast([first], add_special_tokens=add_special_tokens)
            behind = self._backend.encode_batch_fast(more, add_special_tokens=False) if more else ()
        except TypeError:
            raise ValueError("the text holds bytes that are not UTF-8") from None
        ids: list[int] = encoding.ids
        for encoding in behind:
            ids += encoding.ids
        return ids

    async def encode_async(self, text: str, add_special_tokens: bool = True, most: int | None = None) -> list[int]:
        """`encode_all_async` of one text."""
        [ids] = await self.encode_all_async([text], add_special_tokens, most)
        return ids

    def _check_length(self, text: str, most: int) -> None:
        """TooManyTokens for a text of many more than `most` tokens, found without encoding it whole: that takes up to
        250 bytes of memory per token, and time in which the interpreter stands still to give them back.

        The pieces of a text have a few tokens more than the text: about one for each.
        """
        text = text.replace(BREAK, "")
        if len(text.encode()) <= most:  # a token is a byte or more
            return
        room = most + len(text) // PIECE_CHARS + 1
        for begin in range(0, len(text), PIECE_CHARS):
            room -= len(self.encode(text[begin : begin + PIECE_CHARS], add_special_tokens=False))
            if room < 0:
                raise TooManyTokens(most)

    async def encode_all_async(
        self, texts: Sequence[str], add_special_tokens: bool = True, most: int | None = None
    ) -> list[list[int]]:
        """`encode` of several texts that does not hold the event loop up, be they long or many. TooManyTokens where one
        has more than about `most`."""

        def encode_all() -> list[list[int]]:
            encoded = []
            for text in texts:
                if most is not None:
                    self._check_length(text, most)
                encoded.append(self.encode(text, add_special_tokens))
            return encoded

        characters = sum(map(len, texts))
        if characters <= INLINE_CHARS:
            return encode_all()
        if characters <= LONG_CHARS:
            return await asyncio.to_thread(encode_all)

        def ended(encoding: asyncio.Task[list[list[int]]]) -> None:
            self._long.release()
            if not encoding.cancelled():
                encoding.exception()  # read here: the caller may have been cancelled

        await self._long.acquire()
        encoding = asyncio.create_task(asyncio.to_thread(encode_all))
        encoding.add_done_callback(ended)
        return await asyncio.shield(encoding)  # a thread goes on when its caller is cancelled

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of all ids at once; incomplete UTF-8 becomes U+FFFD."""
        text: str
        [text] = self._backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)
        return text

    async def decode_async(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """`decode` that does not hold the event loop up over many ids."""
        if len(ids) <= INLINE_IDS:
            return self.decode(ids, skip_special_tokens)
        return await asyncio.to_thread(self.decode, ids, skip_special_tokens)

    def detokenizer(self, skip_special_tokens: bool = True, kept: frozenset[int] = frozenset()) -> Detokenizer:
        """An incremental decoder for one sequence. Special tokens in `kept` are never skipped."""
        if self._bytes is not None:
            if not skip_special_tokens:
                return ByteDetokenizer(self._bytes)
            return ByteDetokenizer(self._shown_with(kept) if kept else self._shown_bytes)
        return WindowDetokenizer(self._backend, self.special_ids - kept if skip_special_tokens else frozenset())

    def _shown_with(self, kept: frozenset[int]) -> list[bytes]:
        assert self._bytes is not None
        if kept not in self._kept_bytes:
            hidden = self.special_ids - kept
            self._kept_bytes[kept] = [b"" if i in hidden else raw for i, raw in enumerate(self._bytes)]
        return self._kept_bytes[kept]

    def stream(
        self,
        stops: tuple[str, ...] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        kept: frozenset[int] = frozenset(),
    ) -> TextStream:
        """The text of one generated sequence, watched for stop strings. `kept`: see `detokenizer`."""
        matcher = StopMatcher(stops, include_stop) if stops else None
        return TextStream(self.detokenizer(skip_special_tokens, kept), matcher)

    def token_string(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for an id that is not used."""
        return self._tokens[token] if 0 <= token < self.size else ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes the token stands for."""
        if self._bytes is not None:
            return self._bytes[token] if 0 <= token < self.size else b""
        return self.decode([token], skip_special_tokens=False).encode("utf-8", "replace")

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        thinking: Thinking | None = None,
        extra: Mapping[str, Any] | None = None,
        control_tokens_in_text: bool = False,
    ) -> str:
        """The prompt text of a chat, special tokens included; encode it without adding any. It holds breaks
        (`deploy.text.chat`) where messages, tools or variables spell a control token, unless
        `control_tokens_in_text`.

        `messages` and `tools`: as `deploy.text.chat` makes them. `template` overrides the folder's; it is told of
        `thinking` by its variables, and `extra` goes to it as variables, too, which have the last word.
        ChatTemplateError when the template rejects the messages or there is none, ToolsUnknown when it would leave out
        tools, calls or their results.
        """
        extra = extra or {}
        if reserved := RESERVED_TEMPLATE_NAMES.intersection(extra):
            raise ChatTemplateError(f"chat_template_kwargs must not set {', '.join(sorted(reserved))}")
        if template is None and not self.has_chat_template:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        if thinking is not None:
            extra = {**self.thinking_variables(thinking, template, bool(tools)), **extra}
        given = [dict(message) for message in messages]
        if self.encoder_for(template) is None:
            given = with_system_messages(given)
        if any(isinstance(message["content"], list) for message in given):
            given = with_joined_parts(given, self._separators_of(template))
        try:
            text = self._rendered(
                given,
                tools,
                template,
                extra,
                control_tokens_in_text,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
            )
        except RecursionError:
            raise ChatTemplateError("tools or chat_template_kwargs are nested too deeply") from None
        return without_halves(text)

    def _rendered(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template: str | None,
        extra: Mapping[str, Any],
        control_tokens_in_text: bool,
        **ending: bool,
    ) -> str:
        """`render_chat` of messages whose content is text. RecursionError for what is nested too deeply."""
        leaves_tools_to_system = fences = False
        if tools or speaks_of_tools(messages):
            of_kimi = is_of_kimi(text := self.template_for(template, tools=bool(tools)))
            if of_kimi:
                messages, tools = with_own_ids(messages), sorted_by_name(tools)
            if tools and DECLARATIONS in text and (declared := declarations(tools)) is not None:
                extra = {**extra, DECLARATIONS: declared}
            tool_template = self._tool_template(template)
            messages, tools = tool_template.messages(messages), tool_template.tools(tools)
            leaves_tools_to_system = bool(tools) and tool_template.leaves_tools_to_system
            fences = tool_template.fences_arguments
        if not control_tokens_in_text:
            messages = self._control_tokens.messages(messages)
            tools = self._control_tokens.broken(tools)
            extra = {name: self._control_tokens.broken(value) for name, value in extra.items()}
        if leaves_tools_to_system:
            messages, tools = with_tools_in_system_message(messages, tools, fences), ()
        given_tools = [dict(tool) for tool in tools]
        try:
            return self._apply(messages, given_tools, template, extra, **ending)
        except ChatTemplateError as refusal:
            ordered = in_strict_order(messages, ending["continue_final_message"])
            if ordered == messages or self.encoder_for(template) is not None:
                raise
            try:
                return self._apply(ordered, given_tools, template, extra, **ending)
            except ChatTemplateError:
                raise refusal from refusal.__cause__

    def _separators_of(self, template: str | None) -> dict[str, str]:
        if self.encoder_for(template) is not None:
            return {}
        if template not in self._separators:

            def render(messages: Sequence[dict[str, Any]]) -> str:
                return self._apply([*messages], [], template, {})

            as_text = self._tool_template(template).arguments_as_text
            self._separators[template] = separators(render, as_text)
        return self._separators[template]

    def _tool_template(self, template: str | None) -> ToolTemplate:
        if self.encoder_for(template) is not None:
            return ToolTemplate(knows_tools=True, arguments_as_text=False)
        if template not in self._tool_templates:

            def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> str:
                return self._apply([*messages], [*tools], template, {})

            self._tool_templates[template] = ToolTemplate.tried(render)
        return self._tool_templates[template]

    def _apply(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        template: str | None,
        variables: Mapping[str, Any],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        ending = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        if (encoder := self.encoder_for(template)) is not None:
            return encoder.encode(messages, tools, variables=variables, **ending)
        if not (chosen := self.template_for(template, tools=bool(tools))):
            names = ", ".join(sorted(self._hf.chat_template or ()))
            raise ChatTemplateError(
                f"of this model's chat templates ({names}) none is for this chat; name one with --chat-template"
            )
        try:
            if any(message.get("content", "") is None for message in messages):
                return self._with_empty_fields(messages, tools, chosen, {**variables, **ending})
            text: str = self._hf.apply_chat_template(
                messages, tools=tools or None, chat_template=chosen, tokenize=False, **ending, **variables
            )
        except Exception as error:  # templates are programs: they fail in any way they like
            raise ChatTemplateError(f"the chat template rejects these messages: {error}") from error
        return text

    def _with_empty_fields(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        template: str,
        variables: Mapping[str, Any],
    ) -> str:
        """Render as `apply_chat_template` does, but with empty fields: it leaves them out, and here templates find
        them."""
        from transformers.utils.chat_template_utils import render_jinja_template

        given = {**self._hf.special_tokens_map, **variables}
        rendered: Any = render_jinja_template([messages], tools=tools or None, chat_template=template, **given)
        [text], _ = rendered
        return str(text)
