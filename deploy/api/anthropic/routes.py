"""Anthropic's endpoints: their bodies become chats, their answers are written in their own shape."""

from __future__ import annotations

import time
from dataclasses import replace

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.anthropic.bodies import MessagesBody, MessagesPrompt, own_names, parse_messages, parse_prompt
from deploy.api.anthropic.format import MessageAnswer, MessageEvent, MessagesFormat, MessageTokens
from deploy.api.generation.generate import Generator
from deploy.api.http.body import Intake
from deploy.api.http.errors import invalid
from deploy.api.http.middleware import name_ignored_tools
from deploy.api.http.openapi import Endpoints
from deploy.api.job.job import chat_job
from deploy.api.job.model import PLAIN, ServedModel
from deploy.parsing.registry import REASONING_PARSERS


def add_messages(endpoints: Endpoints, intake: Intake, model: ServedModel, generator: Generator) -> None:
    """/v1/messages and /v1/messages/count_tokens."""

    async def messages(request: HttpRequest) -> Response:
        """Answer a chat in Anthropic's shape."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body, chat, left_out = await incoming.work(parse_messages, incoming.raw)
            model.check_name(body.model)
            if body.thinking is not None and body.thinking.type == "enabled" and model.reader.reasoning is None:
                raise invalid(
                    "thinking: it is not known how this model reasons; leave it out, or start the server with "
                    f"--reasoning-parser ({', '.join(REASONING_PARSERS)})",
                    "thinking",
                )
            with own_names(body):
                job = await chat_job(chat, incoming, model, generator.admission)
        job = replace(job, reading=job.reading or PLAIN)
        name_ignored_tools(request.scope, left_out)
        form = MessagesFormat(job, request.scope["latentserve.request_id"])
        return generator.answer("messages", job, form, arrival)

    async def count_tokens(request: HttpRequest) -> Response:
        """Tokens of the prompt that a chat in Anthropic's shape makes."""
        async with intake.reading(request) as incoming:
            chat = await incoming.work(parse_prompt, incoming.raw)
            model.check_name(chat.model)
            text = await incoming.work(model.render, chat)
            ids = await model.tokenize(text, chat.add_special_tokens, "messages")
        return Response(orjson.dumps({"input_tokens": len(ids)}), media_type="application/json")

    endpoints.add("/v1/messages", "POST", messages, (MessagesBody,), MessageAnswer, MessageEvent)
    endpoints.add("/v1/messages/count_tokens", "POST", count_tokens, (MessagesPrompt,), MessageTokens)
