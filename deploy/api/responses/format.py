"""Writing answers as responses: the whole object, and the numbered events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import orjson
from pydantic import ConfigDict
from typing_extensions import override

from deploy.api.generation.choice import Choice, Piece, draft_counts
from deploy.api.generation.generate import Format, named_event
from deploy.api.http.draws import Draws
from deploy.api.http.errors import invalid
from deploy.api.http.openapi import Answer
from deploy.api.job.job import Job
from deploy.api.responses.bodies import ResponsesBody
from deploy.parsing.events import Arguments, CallBegin, CallBroken, CallEnd, Content, Event, Reasoning
from deploy.text.response_tools import AskedTools, InputStream, Origin, input_of


class ResponseAnswer(Answer):
    """POST /v1/responses; what else it has OpenAI describes."""

    model_config = ConfigDict(extra="allow")

    id: str
    object: Literal["response"]
    status: Literal["in_progress", "completed", "incomplete"]
    output: list[dict[str, Any]]
    """Items of type reasoning, message, function_call and custom_tool_call."""
    usage: dict[str, Any] | None


class DeletedResponse(Answer):
    """DELETE /v1/responses/{response_id}."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class ResponseEvent(Answer):
    """Event of its stream, after `data: `; OpenAI describes its other fields."""

    model_config = ConfigDict(extra="allow")

    type: str
    sequence_number: int
    own_ending: ClassVar[bool] = True
    own_failure: ClassVar[bool] = True


class ResponsesFormat(Format):
    """/v1/responses, of one answer."""

    def __init__(
        self,
        job: Job,
        body: ResponsesBody,
        tools: AskedTools,
        name: str,
        stored: bool,
        on_end: Callable[[dict[str, Any]], None],
    ) -> None:
        """`tools`: those of the body, taken apart. `name`: the response's id. `stored`: whether it can be gone on from.
        `on_end` gets the response once it is complete. 400 for what of `body` could not be written."""
        self._job, self._on_end = job, on_end
        self._items = OutputWriter(tools.origins, job.draws)
        self._number = 0
        """Sequence number of the next event."""
        sampling = job.sequences[0].sampling
        effort = body.reasoning.get("effort") if isinstance(body.reasoning, dict) else None
        self._head: dict[str, Any] = {
            "id": name,
            "object": "response",
            "created_at": int(job.draws.created),
            "model": job.model,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": effort, "summary": None},
            "store": stored,
            "temperature": sampling.temperature,
            "text": {"format": _flat(body.text, "json_schema") if body.text else {"type": "text"}},
            "tool_choice": body.tool_choice,
            "tools": [_OF_FUNCTIONS | tool if tool["type"] == "function" else tool for tool in body.tools],
            "top_p": sampling.top_p,
            "truncation": "disabled",
        }
        try:
            orjson.dumps(self._head)
        except TypeError:
            raise invalid("tools and text come back with the answer, and one of them is nested too deeply") from None

    @override
    def opening(self, choice: Choice) -> bytes | None:
        """The response before it has output."""
        begun = {**self._head, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        return b"".join(self._numbered({"type": f"response.{kind}", "response": begun}) for kind in _BEGINNINGS)

    @override
    def template(self, index: int) -> tuple[bytes, bytes]:
        raise NotImplementedError("the text of responses is told apart")

    @override
    def writer(self, index: int) -> Callable[[Piece], bytes]:
        return self._written

    @override
    def chunk(self, choice: Choice, text: Piece) -> bytes:
        written = self._written(text)
        if choice.finish is None:
            return written
        status = _status(choice)
        last = b"".join(map(self._numbered, self._items.close(status)))
        return written + last + self._numbered({"type": f"response.{status}", "response": self._ended(choice)})

    @override
    def closing(self, choices: Sequence[Choice]) -> bytes:
        """Add nothing: the events before are all."""
        return b""

    @override
    def answer(self, choices: Sequence[Choice], texts: Sequence[Piece]) -> bytes:
        [choice], [text] = choices, texts
        self._written(text)
        self._items.close(_status(choice))
        return orjson.dumps(self._ended(choice))

    def _ended(self, choice: Choice) -> dict[str, Any]:
        output, status = self._items.output, _status(choice)
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
        response = {**self._head, "status": status, "incomplete_details": details, "output": output, "usage": usage}
        self._on_end(response)
        return response

    def _written(self, piece: Piece) -> bytes:
        events = piece if isinstance(piece, list) else [Content(piece)] if piece else []
        return b"".join(self._numbered(told) for event in events for told in self._items.take(event))

    def _numbered(self, event: dict[str, Any]) -> bytes:
        self._number += 1
        return named_event({**event, "sequence_number": self._number - 1})


_OF_FUNCTIONS: Final[dict[str, Any]] = {"parameters": None, "strict": None}
_BEGINNINGS = ("created", "in_progress")


def _status(choice: Choice) -> str:
    return "incomplete" if choice.finish == "length" else "completed"


def _flat(value: Any, inner: str) -> Any:
    """Flatten an object of the chat API, as the Responses API has it: the fields of its `inner` object beside its
    type."""
    if not isinstance(value, dict) or inner not in value:
        return value
    return {"type": value["type"], **value[inner]}


Events = list[dict[str, Any]]
"""Events by type and fields, without their sequence numbers."""
_PARTS: Final = {"message": "output_text", "reasoning": "reasoning_text"}
_PREFIX: Final = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class OutputWriter:
    """Collects the output of one response, items of reasoning, text and calls, and tells of it in events. A call that
    breaks off is told of as incomplete, and is none of the output in the end."""

    def __init__(self, origins: Mapping[str, Origin], draws: Draws) -> None:
        """`origins`: the tools that functions stand for, by the functions' names. `draws`: of the request."""
        self._origins, self._draws = origins, draws
        self.output: list[dict[str, Any]] = []
        """The items so far."""
        self._item: dict[str, Any] | None = None
        """The open item, which further output goes to; None between items."""
        self._texts: list[str] = []
        """Texts of the open item."""
        self._input, self._told = InputStream(), list[str]()
        """Input of a custom tool's call, and the pieces of it that were sent."""
        self._index = -1

    def take(self, event: Event) -> Events:
        """Add what a parser found; returns the events that tell of it."""
        if isinstance(event, Content):
            return self._add_text("message", event.text)
        if isinstance(event, Reasoning):
            return self._add_text("reasoning", event.text)
        if isinstance(event, CallBegin):
            origin = self._origins.get(event.name, Origin(event.name))
            call = {"call_id": event.id, "name": origin.name}
            if origin.namespace is not None:
                call["namespace"] = origin.namespace
            kind, given = ("custom_tool_call", "input") if origin.custom else ("function_call", "arguments")
            return self.close() + self._begin(kind, {**call, given: ""})
        if isinstance(event, Arguments):
            self._texts.append(event.text)
            assert self._item is not None
            if self._item["type"] == "custom_tool_call":
                self._told.append(given := self._input.push(event.text))
                return [self._event("response.custom_tool_call_input.delta", delta=given)] if given else []
            return [self._event("response.function_call_arguments.delta", delta=event.text)]
        if isinstance(event, CallEnd):
            return self.close()
        assert isinstance(event, CallBroken)
        events = self.close("incomplete")
        self.output.pop()
        return events

    def close(self, status: str = "completed") -> Events:
        """End the item that goes on, if one does."""
        if (item := self._item) is None:
            return []
        text = "".join(self._texts)
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._event("response.function_call_arguments.done", arguments=text, name=item["name"])]
        elif item["type"] == "custom_tool_call":
            given, told = input_of(text), "".join(self._told)
            if not given.startswith(told):  # the arguments are cut, or say it twice
                given = told
            item["input"], rest = given, given[len(told) :]
            events = [self._event("response.custom_tool_call_input.delta", delta=rest)] if rest else []
            events.append(self._event("response.custom_tool_call_input.done", input=given))
        else:
            part = _part(item["type"], text)
            item["content"] = [part]
            more: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            done = self._event(f"response.{part['type']}.done", content_index=0, text=text, **more)
            events = [done, self._event("response.content_part.done", content_index=0, part=part)]
        events.append(self._event("response.output_item.done", item=dict(item)))
        self._item = None
        return events

    def _add_text(self, kind: str, text: str) -> Events:
        events: Events = []
        if self._item is None or self._item["type"] != kind:
            own: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            events = self.close() + self._begin(kind, {**own, "content": []})
            events.append(self._event("response.content_part.added", content_index=0, part=_part(kind, "")))
        self._texts.append(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        delta = self._event(f"response.{_PARTS[kind]}.delta", content_index=0, delta=text, **more)
        return [*events, delta]

    def _begin(self, kind: str, fields: dict[str, Any]) -> Events:
        self._index += 1
        name = f"{_PREFIX[kind]}_{self._draws.hex(f'item {self._index}')}"
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        self._texts, self._input, self._told = [], InputStream(), []
        self.output.append(self._item)
        added = {"type": "response.output_item.added", "output_index": self._index, "item": dict(self._item)}
        return [added]

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        where = {"output_index": self._index}
        if kind != "response.output_item.done":
            where["item_id"] = self._item["id"]
        return {"type": kind, **where, **fields}


def _part(kind: str, text: str) -> dict[str, Any]:
    part: dict[str, Any] = {"type": _PARTS[kind], "text": text}
    return part | {"annotations": [], "logprobs": []} if kind == "message" else part
