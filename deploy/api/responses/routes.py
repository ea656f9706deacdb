"""The endpoint of OpenAI's Responses API, and the conversations that are kept for it: bodies become chats, answers are
written in their own shape."""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.generation.generate import Generator
from deploy.api.http.body import Intake
from deploy.api.http.errors import ApiError, invalid
from deploy.api.http.openapi import Endpoints
from deploy.api.job.job import chat_job
from deploy.api.job.model import PLAIN, ServedModel
from deploy.api.responses.bodies import ResponsesBody, chat_of, messages_of, named_here, parse_response
from deploy.api.responses.format import ResponseAnswer, ResponseEvent, ResponsesFormat
from deploy.config.api import ApiConfig
from deploy.text.response_tools import asked_tools
from deploy.text.turns import Messages

IGNORED_TOOLS = b"x-latentserve-ignored-tools"
"""The header that names tools of which the model is not told, and formats that it is not held to."""
MOST_HEADER = 1024
"""Characters of it."""


@dataclass(frozen=True)
class _Kept:
    raw: bytes
    """The messages as JSON."""
    until: float


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

    def keep(self, name: str, messages: Messages) -> None:
        """Keep a conversation with its last answer; the oldest ones make room for it."""
        kept = _Kept(orjson.dumps(messages), self._clock() + self._seconds)
        if not self.on or len(kept.raw) > self._most_bytes:
            return
        self._kept[name] = kept
        self._bytes += len(kept.raw)
        self._forget_expired()
        while len(self._kept) > self._most or self._bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def conversation(self, name: str) -> bytes:
        """The messages up to the end of a response, as JSON; 400 where none are kept, 404 for one that is not known."""
        if not self.on:
            raise invalid(
                "previous_response_id: this server keeps no responses; give the whole conversation as input, or have "
                "whoever runs it set api.stored_responses",
                "previous_response_id",
                "unsupported_parameter",
            )
        self._forget_expired()
        if name not in self._kept:
            raise ApiError(
                404,
                f"previous_response_id: the response {name[:64]!r} is not known, or no more, to this replica, which "
                f"keeps the last {self._most} for {self._seconds:g} s; give the whole conversation as input",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return self._kept[name].raw

    def _forget_expired(self) -> None:
        now = self._clock()
        while self._kept and next(iter(self._kept.values())).until <= now:
            self._forget(next(iter(self._kept)))

    def _forget(self, name: str) -> None:
        self._bytes -= len(self._kept.pop(name).raw)


def _conversation(before: bytes, body: ResponsesBody) -> Messages:
    messages: Messages = orjson.loads(before)
    return messages + messages_of(body.input)


def add_responses(endpoints: Endpoints, intake: Intake, model: ServedModel, generator: Generator) -> None:
    """/v1/responses."""
    store = ResponseStore(model.config)

    async def responses(request: HttpRequest) -> Response:
        """Answer a conversation in the shape of OpenAI's Responses API."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_response, incoming.raw)
            model.check_name(body.model)
            before = b"[]" if body.previous_response_id is None else store.conversation(body.previous_response_id)
            async with intake.with_more(incoming, len(before)) as whole:
                messages = await whole.work(_conversation, before, body)
                try:
                    chat = await whole.work(chat_of, body, messages)
                    job = await chat_job(chat, whole, model, generator.admission)
                except ApiError as error:
                    raise named_here(error) from None
        name, stored = f"resp_{uuid.uuid4().hex}", store.on and body.store

        def ended(output: list[dict[str, Any]]) -> None:
            if stored:
                store.keep(name, messages + messages_of(output))

        job = replace(job, reading=job.reading or PLAIN)
        form = ResponsesFormat(job, body, name, stored, ended)
        if left_out := asked_tools(body.tools).left_out:
            names = ", ".join(dict.fromkeys(left_out))[:MOST_HEADER]
            request.scope["latentserve.headers"].append((IGNORED_TOOLS, names.encode()))
        return generator.answer("responses", job, form, arrival)

    endpoints.add("/v1/responses", "POST", responses, (ResponsesBody,), ResponseAnswer, ResponseEvent)
