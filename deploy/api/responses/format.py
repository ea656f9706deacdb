"""How answers are written as responses: the whole object, and the numbered events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from deploy.api.anthropic.format import named_event
from deploy.api.generation.choice import Choice, Piece
from deploy.api.http.errors import invalid
from deploy.api.job.job import Job
from deploy.api.openai.format import draft_counts
from deploy.api.responses.bodies import ResponsesBody
from deploy.api.responses.items import OutputWriter
from deploy.parsing.events import Content


class ResponsesFormat:
    """/v1/responses. See `Format`; of one answer."""

    def __init__(
        self, job: Job, body: ResponsesBody, name: str, stored: bool, on_end: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        """`name`: the response's id. `stored`: whether it can be gone on from. `on_end` gets the output once it is
        complete. 400 for what of `body` could not be written."""
        self._job, self._on_end = job, on_end
        self._items = OutputWriter()
        self._number = 0
        """Of the next event."""
        self._head: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(time.time()),
            "model": job.model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "store": stored,
            "temperature": body.temperature,
            "text": {"format": _flat(body.text, "json_schema") if body.text else {"type": "text"}},
            "tool_choice": _flat(body.tool_choice, "function"),
            "tools": [{"parameters": None, "strict": None, **_flat(tool, "function")} for tool in body.tools],
            "top_p": body.top_p,
            "truncation": "disabled",
        }
        try:
            orjson.dumps(self._head)
        except TypeError:
            raise invalid("tools and text come back with the answer, and one of them is nested too deeply") from None

    def opening(self, choice: Choice) -> bytes | None:
        """The response before it has output."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return b"".join(self._numbered({"type": f"response.{kind}", "response": begun}) for kind in _BEGINNINGS)

    def template(self, index: int) -> tuple[bytes, bytes]:
        """See `Format`."""
        raise NotImplementedError("the text of responses is told apart")

    def writer(self, index: int) -> Callable[[Piece], bytes]:
        """See `Format`."""
        return self._written

    def chunk(self, choice: Choice, text: Piece) -> bytes:
        """See `Format`."""
        written = self._written(text)
        if choice.finish is None:
            return written
        status = _status(choice)
        last = b"".join(map(self._numbered, self._items.close(status)))
        return written + last + self._numbered({"type": f"response.{status}", "response": self._ended(choice)})

    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Nothing more."""
        return b""

    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        """See `Format`."""
        [choice], [text] = choices, texts
        self._written(text)
        self._items.close(_status(choice))
        return orjson.dumps(self._ended(choice))

    def _ended(self, choice: Choice) -> dict[str, Any]:
        output, status = self._items.output, _status(choice)
        self._on_end(output)
        prompt = len(self._job.prompts[0].ids)
        usage = {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": choice.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": choice.generated,
            "output_tokens_details": {
                "reasoning_tokens": choice.reasoning_tokens,
                **draft_counts(self._job, [choice]),
            },
            "total_tokens": prompt + choice.generated,
        }
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {**self._head, "status": status, "incomplete_details": details, "output": output, "usage": usage}

    def _written(self, piece: Piece) -> bytes:
        events = piece if isinstance(piece, list) else [Content(piece)] if piece else []
        return b"".join(self._numbered(told) for event in events for told in self._items.take(event))

    def _numbered(self, event: dict[str, Any]) -> bytes:
        self._number += 1
        return named_event({**event, "sequence_number": self._number - 1})


_BEGINNINGS = ("created", "in_progress")


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _flat(value: Any, inner: str) -> Any:
    """As the Responses API has it what chats have in an object of its own."""
    if not isinstance(value, dict) or inner not in value:
        return value
    return {"type": value["type"], **value[inner]}
