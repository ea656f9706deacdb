"""The endpoints."""

from __future__ import annotations

import time
from typing import Any

import orjson
from fastapi import APIRouter, Depends, FastAPI
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.anthropic.bodies import MessagesBody, MessagesPrompt
from deploy.api.anthropic.routes import message_handlers
from deploy.api.generation.generate import Generation, Stream, Whole
from deploy.api.http.body import ClientDisconnected, parse_object, validate
from deploy.api.http.errors import ApiError, error_of, invalid
from deploy.api.http.intake import Incoming, Intake
from deploy.api.http.openapi import BODY, GENERATING, PLAIN, Description
from deploy.api.job.bodies import Body, ChatBody, CompletionBody, DetokenizeBody, TokenizeChatBody, TokenizeTextBody
from deploy.api.job.chats import chat_job
from deploy.api.job.constraint import requested_grammar
from deploy.api.job.job import build_job, check_ids, most_tokens
from deploy.api.job.prompts import (
    Asked,
    completion_prompts,
    needs_tokenizer,
    parse_generation,
    parse_tokenize,
    render_messages,
)
from deploy.api.limits.front import OPEN_PATHS, Front
from deploy.api.openai.answers import (
    Answer,
    ChatAnswer,
    ChatEvent,
    CompletionAnswer,
    CompletionEvent,
    DetokenizeAnswer,
    HealthAnswer,
    ModelCard,
    ModelList,
    SelfTestAnswer,
    TokenizeAnswer,
)
from deploy.api.openai.format import ChatFormat, CompletionFormat
from deploy.api.other_answers import MessageAnswer, MessageEvent, MessageTokens, ResponseAnswer, ResponseEvent
from deploy.api.responses.bodies import ResponsesBody
from deploy.api.responses.routes import response_handler
from deploy.api.status import Live, LiveAnswer
from deploy.observability.front_metrics import CONTENT_TYPE
from deploy.text.tokenizer import Tokenizer, TooManyTokens
from workers.protocol.front import ModelInfo

GONE = 499
"""Status of answers that nobody will read (nginx's)."""


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _tokens(ids: list[int], info: ModelInfo, tokenizer: Tokenizer | None) -> Response:
    """The answer of /tokenize; with `tokenizer` it spells every token."""
    strings = None if tokenizer is None else [tokenizer.token_string(token) for token in ids]
    return _json({"count": len(ids), "max_model_len": info.max_context, "tokens": ids, "token_strs": strings})


def build_router(front: Front, live: Live, description: Description) -> APIRouter:
    """All routes of a replica's front, which `description` learns."""
    router = APIRouter()
    intake = Intake(front.config)

    def generation(kind: str, job_stream: bool, *args: Any) -> Generation:
        return Stream(front, kind, *args) if job_stream else Whole(front, kind, *args)

    async def asked(incoming: Incoming, kind: type[Asked]) -> tuple[Asked, ModelInfo]:
        """What a request wants generated, and the model that is to do it."""
        body = await incoming.work(parse_generation, incoming.raw, kind)
        front.check_model(body.model)
        return body, front.info()

    async def completions(request: HttpRequest) -> Response:
        """Complete prompts."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body, info = await asked(incoming, CompletionBody)
            prompts = await completion_prompts(front, body, incoming.work)
            grammar = await requested_grammar(body, front.tokenizer, info)
            job = await incoming.work(build_job, body, prompts, info, front.tokenizer, front.config, grammar)
        form = CompletionFormat(job, front.tokenizer, request.scope["latentserve.request_id"], front.fingerprint)
        return generation("completions", job.stream, job, form, arrival)

    async def chat(request: HttpRequest) -> Response:
        """Answer a chat."""
        arrival = time.perf_counter()
        async with intake.reading(request) as incoming:
            body, _ = await asked(incoming, ChatBody)
            job = await chat_job(front, body, incoming)
        form = ChatFormat(job, front.tokenizer, request.scope["latentserve.request_id"], front.fingerprint)
        return generation("chat", job.stream, job, form, arrival)

    async def models(request: HttpRequest) -> Response:
        """The models served here."""
        return _json({"object": "list", "data": [card(name) for name in front.model_names()]})

    async def model(request: HttpRequest, model_id: str) -> Response:
        """One model."""
        front.check_model(model_id)
        return _json(card(model_id))

    def card(name: str) -> dict[str, Any]:
        info = front.info()
        return ModelCard(id=name, created=info.created, root=info.name, max_model_len=info.max_context).model_dump()

    async def tokenize(request: HttpRequest) -> Response:
        """Token ids of a text or a chat."""
        async with intake.reading(request) as incoming:
            body = await incoming.work(parse_tokenize, incoming.raw)
            front.check_model(body.model)
            info = front.info()
            if isinstance(body, TokenizeChatBody):
                param, text = "messages", await incoming.work(render_messages, front, body)
            else:
                param, text = "prompt", body.prompt
            tokenizer, most = needs_tokenizer(front, "prompt"), most_tokens(info)
            try:
                ids = await tokenizer.encode_async(text, body.add_special_tokens, most)
            except TooManyTokens:
                raise invalid(f"{param}: more than {most} tokens; send it in parts", param) from None
            with_strings = tokenizer if body.return_token_strs else None
            return await incoming.work(_tokens, ids, info, with_strings)

    async def detokenize(request: HttpRequest) -> Response:
        """Text of token ids."""
        async with intake.reading(request) as incoming:
            body = await incoming.work(lambda raw: validate(DetokenizeBody, parse_object(raw)), incoming.raw)
            front.check_model(body.model)
            tokenizer = needs_tokenizer(front, "tokens")
            await incoming.work(check_ids, body.tokens, front.info().vocab_size, "tokens")
            return _json({"prompt": await tokenizer.decode_async(body.tokens, skip_special_tokens=False)})

    async def health(request: HttpRequest) -> Response:
        """200 once a real token, or a step of others, went through every rank; 503 with the first cause otherwise."""
        await front.check_alive()
        return _json({"status": "ok"})

    async def selftest(request: HttpRequest) -> Response:
        """What the self-test found when this replica started; 404 when it was switched off."""
        front.info()
        report = front.engine.selftest
        if report is None:
            message = "no self-test ran when this replica started: the setting engine.selftest is false"
            raise ApiError(404, message, code="selftest_off")
        return _json(report.to_json())

    async def now(request: HttpRequest, selftest: bool = True) -> Response:
        """What all replicas do right now, and what the self-test of the one that answers found."""
        return Response((await live.answer(selftest)).model_dump_json(), media_type="application/json")

    async def metrics(request: HttpRequest) -> Response:
        """Figures of this process for Prometheus."""
        return Response(front.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def guard(request: HttpRequest) -> None:
        front.authorize(request)

    async def entrance(request: HttpRequest) -> None:
        front.enter(request)

    def add(
        path: str,
        method: str,
        route: Any,
        bodies: tuple[type[Body], ...] = (),
        answer: type[Answer] | type[SelfTestAnswer] | None = None,
        event: type[Answer] | None = None,
    ) -> None:
        guarded = path not in OPEN_PATHS
        errors = GENERATING if event else BODY if bodies else PLAIN
        if not guarded:
            errors = tuple(status for status in errors if status != 401)
        given: dict[str, Any] = {
            "response_model": None,
            "response_class": Response,
            "dependencies": [Depends(entrance if event else guard)] if guarded else [],
        }
        if method == "GET":  # HTTP asks for both (RFC 9110, 9.1); the server sends no body
            # First, as it is what a 405 lists as allowed. The schema has the other alone.
            router.add_api_route(path, route, methods=["GET", "HEAD"], include_in_schema=False, **given)
        key = guarded and bool(front.keys)
        described = description.operation(bodies, answer, event, errors, key, error_of(path))
        responses = described.pop("responses")
        router.add_api_route(path, route, methods=[method], openapi_extra=described, responses=responses, **given)

    add("/v1/completions", "POST", completions, (CompletionBody,), CompletionAnswer, CompletionEvent)
    add("/v1/chat/completions", "POST", chat, (ChatBody,), ChatAnswer, ChatEvent)
    messages, count_tokens = message_handlers(front, intake)
    add("/v1/messages", "POST", messages, (MessagesBody,), MessageAnswer, MessageEvent)
    add("/v1/messages/count_tokens", "POST", count_tokens, (MessagesPrompt,), MessageTokens)
    add("/v1/responses", "POST", response_handler(front, intake), (ResponsesBody,), ResponseAnswer, ResponseEvent)
    add("/v1/models", "GET", models, answer=ModelList)
    add("/v1/models/{model_id:path}", "GET", model, answer=ModelCard)
    add("/tokenize", "POST", tokenize, (TokenizeTextBody, TokenizeChatBody), TokenizeAnswer)
    add("/detokenize", "POST", detokenize, (DetokenizeBody,), DetokenizeAnswer)
    add("/health", "GET", health, answer=HealthAnswer)
    add("/selftest", "GET", selftest, answer=SelfTestAnswer)
    add("/live", "GET", now, answer=LiveAnswer)
    add("/metrics", "GET", metrics)
    return router


def install_gone(app: FastAPI) -> None:
    """Clients that leave while their body is read are no error."""

    async def gone(request: HttpRequest, error: Exception) -> Response:
        request.scope.get("latentserve.log", {})["disconnected"] = True
        return Response(status_code=GONE)

    app.add_exception_handler(ClientDisconnected, gone)
