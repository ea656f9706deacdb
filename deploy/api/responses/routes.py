"""The endpoint of OpenAI's Responses API, and the conversations that are kept for it: bodies become chats, answers are
written in their own shape."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypedDict

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Scope

from deploy.api.generation.generate import Generator
from deploy.api.generation.journaling import CONVERSATION
from deploy.api.http.body import Intake
from deploy.api.http.errors import ApiError, invalid
from deploy.api.http.middleware import name_ignored_tools
from deploy.api.http.openapi import Endpoints
from deploy.api.job.job import chat_job
from deploy.api.job.model import PLAIN, ServedModel
from deploy.api.responses.bodies import (
    ResponsesBody,
    chat_of,
    messages_of,
    named_here,
    parse_response,
    standing,
    tools_of,
)
from deploy.api.responses.format import DeletedResponse, ResponseAnswer, ResponseEvent, ResponsesFormat
from deploy.config.api import ApiConfig
from deploy.text.turns import Messages


class Conversation(TypedDict):
    """What requests go on from."""

    messages: Messages
    standing: list[dict[str, Any]]
    """Items of earlier inputs that hold on: tools, and how answers are to be."""


@dataclass(frozen=True)
class _Kept:
    raw: bytes
    """The conversation as JSON."""
    response: bytes
    """The response as JSON."""
    until: float

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.raw) + len(self.response)


class ResponseStore:
    """Keeps a few conversations for a while, in the memory of one replica, by the names of responses, which nobody can
    guess. Later responses go on from them."""

    def __init__(self, config: ApiConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` tells the time in seconds."""
        self._most, self._most_bytes = config.stored_responses, config.stored_response_bytes
        self._seconds, self._clock = config.stored_response_s, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._bytes = 0

    @property
    def on(self) -> bool:
        """Whether any are kept."""
        return self._most > 0

    def keep(self, name: str, conversation: Conversation, response: Mapping[str, Any]) -> None:
        """Keep a response, and the conversation with it as its end; the oldest ones make room for it."""
        kept = _Kept(orjson.dumps(conversation), orjson.dumps(response), self._clock() + self._seconds)
        if not self.on or kept.size > self._most_bytes:
            return
        self._kept[name] = kept
        self._bytes += kept.size
        self._forget_expired()
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def conversation(self, name: str) -> bytes:
        """The conversation up to the end of a response, as JSON; 400 where none are kept, 404 for a response that is
        not known."""
        if not self.on:
            raise invalid(
                "previous_response_id: this server keeps no responses; give the whole conversation as input, or have "
                "whoever runs it set api.stored_responses",
                "previous_response_id",
                "unsupported_parameter",
            )
        return self._known(name, "previous_response_id", "; give the whole conversation as input").raw

    def response(self, name: str) -> bytes:
        """A response as JSON; 404 for one that is not known."""
        return self._known(name, "response_id").response

    def delete(self, name: str) -> None:
        """Forget a response; 404 for one that is not known."""
        self._known(name, "response_id")
        self._forget(name)

    def _known(self, name: str, param: str, instead: str = "") -> _Kept:
        self._forget_expired()
        if name not in self._kept:
            keeps = f"which keeps the last {self._most} for {self._seconds:g} s" if self.on else "which keeps none"
            raise ApiError(
                404,
                f"{param}: the response {name[:64]!r} is not known, or no more, to this replica, {keeps}{instead}",
                param=param,
                code="previous_response_not_found" if instead else "response_not_found",
            )
        return self._kept[name]

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        self._bytes -= self._kept.pop(name).size


def _conversation(before: bytes, body: ResponsesBody) -> Conversation:
    """The conversation with the input of `body` as its end; `body` is as it says that the answer is to be."""
    conversation: Conversation = orjson.loads(before)
    body.configure([*conversation["standing"], *body.input])
    return {
        "messages": conversation["messages"] + messages_of(body.input),
        "standing": standing([*conversation["standing"], *body.input]),
    }


def _before(body: ResponsesBody, scope: Scope, store: ResponseStore) -> bytes:
    """The conversation that the answer goes on from, as JSON. A front that goes on with another one's answer has it in
    the scope."""
    if body.previous_response_id is None:
        return orjson.dumps(Conversation(messages=[], standing=[]))
    before = scope.get(CONVERSATION)
    if before is None:
        before = scope[CONVERSATION] = store.conversation(body.previous_response_id)
    return bytes(before)


def add_responses(endpoints: Endpoints, intake: Intake, model: ServedModel, generator: Generator) -> None:
    """/v1/responses, and the responses that are kept."""
    store = ResponseStore(model.config)

    async def responses(request: HttpRequest) -> Response:
        """Answer a conversation in the shape of OpenAI's Responses API."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_response, incoming.raw)
            model.check_name(body.model)
            before = _before(body, request.scope, store)
            async with intake.with_more(incoming, len(before)) as whole:
                conversation = await whole.work(_conversation, before, body)
                messages = conversation["messages"]
                try:
                    tools = await whole.work(tools_of, body, conversation["standing"])
                    chat = await whole.work(chat_of, body, messages, tools)
                    job = await chat_job(chat, whole, model, generator.admission)
                except ApiError as error:
                    raise named_here(error) from None
        name, stored = f"resp_{job.draws.hex('response')}", store.on and body.store

        def ended(response: dict[str, Any]) -> None:
            if stored:
                said = messages + messages_of(response["output"])
                store.keep(name, {**conversation, "messages": said}, response)

        job = replace(job, reading=job.reading or PLAIN)
        form = ResponsesFormat(job, body, tools, name, stored, ended)
        name_ignored_tools(request.scope, tools.left_out)
        return generator.answer("responses", job, form, arrival)

    async def stored_response(request: HttpRequest) -> Response:
        """A response that this replica keeps."""
        if request.query_params.get("stream", "false").lower() not in ("false", "0"):
            raise invalid(
                "stream: the events of a response that is kept are not; get it without stream",
                "stream",
                "unsupported_parameter",
            )
        return Response(store.response(request.path_params["response_id"]), media_type="application/json")

    async def delete_response(request: HttpRequest) -> Response:
        """Forget a response that this replica keeps."""
        name = request.path_params["response_id"]
        store.delete(name)
        told = {"id": name, "object": "response", "deleted": True}
        return Response(orjson.dumps(told), media_type="application/json")

    endpoints.add("/v1/responses", "POST", responses, (ResponsesBody,), ResponseAnswer, ResponseEvent)
    endpoints.add("/v1/responses/{response_id}", "GET", stored_response, answer=ResponseAnswer)
    endpoints.add("/v1/responses/{response_id}", "DELETE", delete_response, answer=DeletedResponse)
