"""OpenAI's Responses API: its bodies become chats, its answers are written in their own shape."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.generation.generate import Stream, Whole
from deploy.api.http.errors import ApiError
from deploy.api.http.intake import Intake
from deploy.api.job.chats import chat_job
from deploy.api.job.reading import PLAIN
from deploy.api.limits.front import Front
from deploy.api.responses.bodies import ResponsesBody
from deploy.api.responses.chat import chat_of, messages_of, named_here, parse_response
from deploy.api.responses.format import ResponsesFormat
from deploy.api.responses.store import ResponseStore
from deploy.text.turns import Messages


def _conversation(before: bytes, body: ResponsesBody) -> Messages:
    messages: Messages = orjson.loads(before)
    return messages + messages_of(body.input)


def response_handler(front: Front, intake: Intake) -> Callable[[HttpRequest], Awaitable[Response]]:
    """That of /v1/responses."""
    store = ResponseStore(front.config)

    async def responses(request: HttpRequest) -> Response:
        """Answer a conversation in the shape of OpenAI's Responses API."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_response, incoming.raw)
            front.check_model(body.model)
            before = b"[]" if body.previous_response_id is None else store.conversation(body.previous_response_id)
            async with intake.with_more(incoming, len(before)) as whole:
                messages = await whole.work(_conversation, before, body)
                try:
                    job = await chat_job(front, await whole.work(chat_of, body, messages), whole)
                except ApiError as error:
                    raise named_here(error) from None
        name, stored = f"resp_{uuid.uuid4().hex}", store.on and body.store

        def ended(output: list[dict[str, Any]]) -> None:
            if stored:
                store.keep(name, messages + messages_of(output))

        job = replace(job, reading=job.reading or PLAIN)
        form = ResponsesFormat(job, body, name, stored, ended)
        return (Stream if job.stream else Whole)(front, "responses", job, form, arrival)

    return responses
