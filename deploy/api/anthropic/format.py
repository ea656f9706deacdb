"""Writing answers in Anthropic's shape: a message of content blocks, and the named events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import ConfigDict
from typing_extensions import override

from deploy.api.generation.choice import Choice, DraftTokens, Piece, draft_counts
from deploy.api.generation.generate import Format, named_event
from deploy.api.http.openapi import Answer
from deploy.api.job.job import Job
from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning

STOP_REASONS: Final = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}

SIGNATURE: Final = "unsigned"
"""Signature of thinking blocks. Clients keep thinking in a conversation only if its signature is not empty. This server
needs none: it trusts whoever sends thinking back."""


class ThinkingTokens(DraftTokens):
    """Breakdown of the output tokens: reasoning tokens and draft counts."""

    thinking_tokens: int


class MessageUsage(Answer):
    """Token counts as Anthropic has them."""

    input_tokens: int
    """Prompt tokens that were not cached."""
    cache_creation_input_tokens: Literal[0]
    cache_read_input_tokens: int
    """Prompt tokens that were cached."""
    output_tokens: int
    output_tokens_details: ThinkingTokens


class TextBlock(Answer):
    """Text of the answer."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Answer):
    """Reasoning that came before the answer."""

    type: Literal["thinking"]
    thinking: str
    signature: str
    """Clients send it back; nothing depends on it."""


class ToolUseBlock(Answer):
    """A call that the client is to make."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageAnswer(Answer):
    """POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ThinkingBlock | ToolUseBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageEvent(Answer):
    """Event of its stream, after `data: `; Anthropic describes its other fields."""

    model_config = ConfigDict(extra="allow")
    own_ending: ClassVar[bool] = True

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]


class MessageTokens(Answer):
    """POST /v1/messages/count_tokens."""

    input_tokens: int


class MessagesFormat(Format):
    """/v1/messages, of one answer."""

    def __init__(self, job: Job, request_id: str) -> None:
        self._job = job
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": job.model}
        self._index = -1
        """Index of the newest content block."""
        self._open = ""
        """The type of the block that is open; empty if none is."""

    @override
    def opening(self, choice: Choice) -> bytes | None:
        """The message before it has content."""
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        message = {**self._head, **nothing, "usage": self._usage(choice)}
        return named_event({"type": "message_start", "message": message})

    @override
    def template(self, index: int) -> tuple[bytes, bytes]:
        raise NotImplementedError("the text of messages is told apart")

    @override
    def writer(self, index: int) -> Callable[[Piece], bytes]:
        return self._written

    @override
    def chunk(self, choice: Choice, text: Piece) -> bytes:
        written = self._written(text)
        if choice.finish is None:
            return written
        end = {"type": "message_delta", "delta": _ending(choice), "usage": self._usage(choice)}
        return written + self._close() + named_event(end) + named_event({"type": "message_stop"})

    @override
    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Add nothing: the events before are all."""
        return b""

    @override
    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        [choice], [text] = choices, texts
        content = blocks_of(text if isinstance(text, list) else [Content(text)] if text else [])
        whole = {**self._head, "content": content, **_ending(choice), "usage": self._usage(choice)}
        return orjson.dumps(whole)

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Usage in Anthropic's terms: `input_tokens` are those that were not cached."""
        prompt = len(self._job.prompts[0].ids)
        return {
            "input_tokens": prompt - choice.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.cached_tokens,
            "output_tokens": choice.generated,
            "output_tokens_details": {
                "thinking_tokens": choice.reasoning_tokens,
                **draft_counts(self._job, [choice]),
            },
        }

    def _written(self, piece: Piece) -> bytes:
        events = piece if isinstance(piece, list) else [Content(piece)] if piece else []
        return b"".join(map(self._event, events))

    def _event(self, event: Event) -> bytes:
        if isinstance(event, Content):
            begin = self._begin("text", {"type": "text", "text": ""})
            return begin + self._delta({"type": "text_delta", "text": event.text})
        if isinstance(event, Reasoning):
            begin = self._begin("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return begin + self._delta({"type": "thinking_delta", "thinking": event.text})
        if isinstance(event, CallBegin):
            return self._close() + self._begin("tool_use", _tool_use(event, {}))
        if isinstance(event, Arguments):
            return self._delta({"type": "input_json_delta", "partial_json": event.text})
        return self._close()

    def _begin(self, kind: str, block: dict[str, Any]) -> bytes:
        """Open a block of this kind, unless the one that is open is one."""
        if self._open == kind:
            return b""
        closed = self._close()
        self._open = kind
        self._index += 1
        return closed + named_event({"type": "content_block_start", "index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return named_event({"type": "content_block_delta", "index": self._index, "delta": delta})

    def _close(self) -> bytes:
        if not self._open:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": SIGNATURE}) if self._open == "thinking" else b""
        self._open = ""
        return signed + named_event({"type": "content_block_stop", "index": self._index})


def blocks_of(events: Sequence[Event]) -> list[dict[str, Any]]:
    """The content of a whole message. Calls that are not complete are none."""
    blocks: list[dict[str, Any]] = []
    begun: CallBegin | None = None
    arguments: list[str] = []
    for event in events:
        if isinstance(event, Content | Reasoning):
            kind = "text" if isinstance(event, Content) else "thinking"
            if not blocks or blocks[-1]["type"] != kind:
                blocks.append({"type": kind, kind: ""} | ({"signature": SIGNATURE} if kind == "thinking" else {}))
            blocks[-1][kind] += event.text
        elif isinstance(event, CallBegin):
            begun, arguments = event, []
        elif isinstance(event, Arguments):
            arguments.append(event.text)
        elif isinstance(event, CallEnd) and begun is not None:
            blocks.append(_tool_use(begun, orjson.Fragment("".join(arguments))))
        elif isinstance(event, CallBroken):
            begun = None
    return blocks


def _tool_use(call: CallBegin, given: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": given}


def _ending(choice: Choice) -> dict[str, Any]:
    stopped = choice.stop_reason if isinstance(choice.stop_reason, str) else None
    reason = STOP_REASONS[choice.finish_reason or "stop"]
    return {"stop_reason": "stop_sequence" if stopped is not None else reason, "stop_sequence": stopped}
