"""OpenAI's endpoints, and vLLM's for the tokens of texts."""

from __future__ import annotations

import time
from typing import Annotated, Any

import orjson
from pydantic import FailFast
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.generation.generate import Generator
from deploy.api.http.body import Intake, parse_object, validate
from deploy.api.http.openapi import Endpoints
from deploy.api.job.bodies import Body, CompletionBody
from deploy.api.job.chat_bodies import ChatBody, ChatTemplateFields
from deploy.api.job.job import chat_job, check_ids, parse_generation
from deploy.api.job.model import ServedModel
from deploy.api.job.unsupported import reject_unsupported
from deploy.api.openai.answers import (
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    TokenizeAnswer,
)
from deploy.api.openai.completions import CompletionFormat, completion_job
from deploy.api.openai.format import ChatFormat
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import ModelInfo


class TokenizeTextBody(Body):
    """POST /tokenize of a text."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool = False


class TokenizeChatBody(ChatTemplateFields):
    """POST /tokenize of messages."""

    model: str | None = None
    return_token_strs: bool = False


class DetokenizeBody(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], FailFast()]


def parse_tokenize(raw: bytes) -> TokenizeTextBody | TokenizeChatBody:
    """The body of /tokenize, which comes in two kinds."""
    value = parse_object(raw)
    if "messages" in value:
        reject_unsupported(value, "chat", ChatBody.model_fields)
        return validate(TokenizeChatBody, value)
    reject_unsupported(value, "completions", CompletionBody.model_fields)
    return validate(TokenizeTextBody, value)


def _parse_detokenize(raw: bytes) -> DetokenizeBody:
    return validate(DetokenizeBody, parse_object(raw))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _tokens(ids: list[int], info: ModelInfo, tokenizer: Tokenizer | None) -> Response:
    """The answer of /tokenize; with `tokenizer` it spells every token."""
    strings = None if tokenizer is None else [tokenizer.token_string(token) for token in ids]
    return _json({"count": len(ids), "max_model_len": info.max_context, "tokens": ids, "token_strs": strings})


def add_generation(endpoints: Endpoints, intake: Intake, model: ServedModel, generator: Generator) -> None:
    """/v1/completions and /v1/chat/completions."""
    admission = generator.admission

    async def completions(request: HttpRequest) -> Response:
        """Complete prompts."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_generation, incoming.raw, CompletionBody)
            model.check_name(body.model)
            job = await completion_job(body, incoming, model, admission)
        form = CompletionFormat(job, model.tokenizer, request.scope["latentserve.request_id"], model.fingerprint)
        return generator.answer("completions", job, form, arrival)

    async def chat(request: HttpRequest) -> Response:
        """Answer a chat."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_generation, incoming.raw, ChatBody)
            model.check_name(body.model)
            job = await chat_job(body, incoming, model, admission)
        form = ChatFormat(job, model.tokenizer, request.scope["latentserve.request_id"], model.fingerprint)
        return generator.answer("chat", job, form, arrival)

    endpoints.add("/v1/completions", "POST", completions, (CompletionBody,), CompletionAnswer, CompletionEvent)
    endpoints.add("/v1/chat/completions", "POST", chat, (ChatBody,), ChatAnswer, ChatEvent)


def add_models(endpoints: Endpoints, served: ServedModel) -> None:
    """/v1/models."""

    async def models(request: HttpRequest) -> Response:
        """The models served here."""
        return _json({"object": "list", "data": [card(name) for name in served.names()]})

    async def model(request: HttpRequest, model_id: str) -> Response:
        """The card of one model."""
        served.check_name(model_id)
        return _json(card(model_id))

    def card(name: str) -> dict[str, Any]:
        info = served.info()
        return ModelCard(
            id=name,
            created=info.created,
            root=info.name,
            max_model_len=info.max_context,
            sampling_defaults=dict(served.sampling_defaults),
        ).model_dump()

    endpoints.add("/v1/models", "GET", models, answer=ModelList)
    endpoints.add("/v1/models/{model_id:path}", "GET", model, answer=ModelCard)


def add_tokenization(endpoints: Endpoints, intake: Intake, model: ServedModel) -> None:
    """/tokenize and /detokenize."""

    async def tokenize(request: HttpRequest) -> Response:
        """Token ids of a text or a chat."""
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_tokenize, incoming.raw)
            model.check_name(body.model)
            info = model.info()
            if isinstance(body, TokenizeChatBody):
                param, text = "messages", await incoming.work(model.render, body)
            else:
                param, text = "prompt", body.prompt
            ids = await model.tokenize(text, body.add_special_tokens, param)
            with_strings = model.tokenizer if body.return_token_strs else None
            return await incoming.work(_tokens, ids, info, with_strings)

    async def detokenize(request: HttpRequest) -> Response:
        """Text of token ids."""
        async with intake.reading(request) as incoming:
            body = await incoming.work(_parse_detokenize, incoming.raw)
            model.check_name(body.model)
            tokenizer = model.needs_tokenizer("tokens")
            await incoming.work(check_ids, body.tokens, model.info().vocab_size, "tokens")
            return _json({"prompt": await tokenizer.decode_async(body.tokens, skip_special_tokens=False)})

    endpoints.add("/tokenize", "POST", tokenize, (TokenizeTextBody, TokenizeChatBody), TokenizeAnswer)
    endpoints.add("/detokenize", "POST", detokenize, (DetokenizeBody,), DetokenizeAnswer)
