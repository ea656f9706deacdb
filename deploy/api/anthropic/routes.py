"""Anthropic's endpoints: their bodies become chats, their answers are written in their own shape."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.anthropic.chat import own_names, parse_messages, parse_prompt
from deploy.api.anthropic.format import MessagesFormat
from deploy.api.generation.generate import Stream, Whole
from deploy.api.http.errors import invalid
from deploy.api.http.intake import Intake
from deploy.api.job.chats import chat_job
from deploy.api.job.job import most_tokens
from deploy.api.job.prompts import needs_tokenizer, render_messages
from deploy.api.job.reading import PLAIN
from deploy.api.limits.front import Front
from deploy.parsing.registry import REASONING_PARSERS
from deploy.text.tokenizer import TooManyTokens

Handler = Callable[[HttpRequest], Awaitable[Response]]


def message_handlers(front: Front, intake: Intake) -> tuple[Handler, Handler]:
    """Those of /v1/messages and of /v1/messages/count_tokens."""

    async def messages(request: HttpRequest) -> Response:
        """Answer a chat in Anthropic's shape."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body, chat = await incoming.work(parse_messages, incoming.raw)
            front.check_model(body.model)
            if body.thinking is not None and body.thinking.type == "enabled" and front.reader.reasoning is None:
                raise invalid(
                    "thinking: it is not known how this model reasons; leave it out, or start the server with "
                    f"--reasoning-parser ({', '.join(REASONING_PARSERS)})",
                    "thinking",
                )
            with own_names():
                job = await chat_job(front, chat, incoming)
        job = replace(job, reading=job.reading or PLAIN)
        form = MessagesFormat(job, request.scope["latentserve.request_id"])
        return (Stream if job.stream else Whole)(front, "messages", job, form, arrival)

    async def count_tokens(request: HttpRequest) -> Response:
        """Tokens of the prompt that a chat in Anthropic's shape makes."""
        async with intake.reading(request) as incoming:
            chat = await incoming.work(parse_prompt, incoming.raw)
            front.check_model(chat.model)
            text = await incoming.work(render_messages, front, chat)
            most = most_tokens(front.info())
            try:
                ids = await needs_tokenizer(front, "messages").encode_async(text, chat.add_special_tokens, most)
            except TooManyTokens:
                raise invalid(f"messages: more than {most} tokens; send them in parts", "messages") from None
        return Response(orjson.dumps({"input_tokens": len(ids)}), media_type="application/json")

    return messages, count_tokens
