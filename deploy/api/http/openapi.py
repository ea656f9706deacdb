"""Adding and describing endpoints. FastAPI parses no bodies and writes no answers here, so its description of the API
knows neither; what it says of them is stated by hand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Literal

from fastapi import APIRouter, Depends, FastAPI
from pydantic import BaseModel, ConfigDict
from pydantic.json_schema import models_json_schema
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.http.errors import of_anthropic

_REF = "#/components/schemas/{model}"
ERRORS = {
    400: "The request asks for what cannot be, or is no JSON object.",
    401: "An API key is needed.",
    404: "There is no such model, or no such thing.",
    408: "The request took longer than it was given, or did not arrive in time.",
    413: "The body is larger than it may be.",
    415: "The body is not said to be JSON, or is compressed.",
    429: "Too many sequences wait already, or a limit of the API key is used up; Retry-After says when to come back.",
    500: "A defect of the server.",
    503: "The engine starts or is down, or large requests take all the memory; the message has the cause.",
}
"""Meaning of each error status."""
GENERATING, BODY, PLAIN = tuple(ERRORS), (400, 401, 404, 408, 413, 415, 500, 503), (400, 401, 404, 408, 500, 503)
"""The statuses of endpoints that generate, of others with a body, and of those without one."""
SECURITY = "api_key"
OPEN_PATHS = (
    "/",
    "/page/{name}",
    "/health",
    "/metrics",
    "/openapi.json",
    "/docs",
    "/docs/oauth2-redirect",
    "/redoc",
)
"""Paths that need no API key."""
Guard = Callable[[HttpRequest], Awaitable[None]]
"""Lets a request in, or raises."""


class Answer(BaseModel):
    """Base of all answers. It forbids fields that are not described."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)
    own_ending: ClassVar[bool] = False
    """For an event: whether the last one of a stream marks the end itself."""
    own_failure: ClassVar[bool] = False
    """For an event: whether one of this type ends a stream that failed."""


class ErrorDetail(Answer):
    """Details of an error."""

    message: str
    type: str
    param: str | None
    """The field that is wrong."""
    code: str | None


class ErrorAnswer(Answer):
    """Every answer with an error status, and the last event of a stream that failed."""

    error: ErrorDetail


class ErrorCode(Answer):
    """Cause of an error by the name that Anthropic's API has for it."""

    error_code: str


class MessageErrorDetail(ErrorDetail):
    """Details of an error below /v1/messages."""

    details: ErrorCode | None = None
    """The cause. It is there if it has a name."""


class MessageError(Answer):
    """Every answer with an error status below /v1/messages, and the last event of a stream that failed."""

    type: Literal["error"]
    error: MessageErrorDetail


def error_of(path: str) -> type[BaseModel]:
    """The shape of a path's errors."""
    return MessageError if of_anthropic(path) else ErrorAnswer


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _one_of(models: tuple[type[BaseModel], ...]) -> dict[str, Any]:
    return _ref(models[0]) if len(models) == 1 else {"anyOf": [_ref(model) for model in models]}


class Endpoints:
    """The endpoints of an application, and the description of what they take and give."""

    def __init__(self, authorize: Guard | None = None, enter: Guard | None = None) -> None:
        """`authorize` checks requests with an API key, `enter` those that generate. Both are None where there are no
        keys."""
        self._router = APIRouter()
        self._authorize, self._enter = authorize, enter
        self._bodies: list[type[BaseModel]] = []
        self._answers: list[type[BaseModel]] = [ErrorAnswer, MessageError]

    def add(
        self,
        path: str,
        method: str,
        handler: Any,
        bodies: tuple[type[BaseModel], ...] = (),
        answer: type[BaseModel] | None = None,
        event: type[Answer] | None = None,
    ) -> None:
        """Have `handler` answer `path`: for one of `bodies`, or nothing, it gives `answer` as JSON (None: plain text),
        and one that generates a stream of `event`, too, if it is asked to. Its docstring is part of the description."""
        guarded = path not in OPEN_PATHS
        errors = GENERATING if event else BODY if bodies else PLAIN
        if not guarded:
            errors = tuple(status for status in errors if status != 401)
        guard = self._enter if event else self._authorize
        given: dict[str, Any] = {
            "response_model": None,
            "response_class": Response,
            "dependencies": [Depends(guard)] if guarded and guard is not None else [],
        }
        if method == "GET":  # HTTP asks for both (RFC 9110, 9.1); the server sends no body
            # First, as it is what a 405 lists as allowed. The schema has the other alone.
            self._router.add_api_route(path, handler, methods=["GET", "HEAD"], include_in_schema=False, **given)
        described = self._operation(bodies, answer, event, errors, guarded and guard is not None, error_of(path))
        responses = described.pop("responses")
        self._router.add_api_route(
            path, handler, methods=[method], openapi_extra=described, responses=responses, **given
        )

    def _operation(
        self,
        bodies: tuple[type[BaseModel], ...],
        answer: type[BaseModel] | None,
        event: type[Answer] | None,
        errors: tuple[int, ...],
        guarded: bool,
        error: type[BaseModel],
    ) -> dict[str, Any]:
        self._bodies += bodies
        self._answers += [kind for kind in (answer, event) if kind is not None]
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
        if answer is not None:
            content = {"application/json": {"schema": _ref(answer)}}
        if event is not None:
            name = event.__name__
            failure = f"{name} of type error" if event.own_failure else error.__name__
            last = "" if event.own_ending else ", then `data: [DONE]`"
            what = f"Events `data: ` with a {name} each{last}; a {failure} ends a stream that failed."
            content["text/event-stream"] = {
                "schema": {"type": "string", "description": what, "x-event-schema": _ref(event)}
            }
        envelope = {"application/json": {"schema": _ref(error)}}
        responses: dict[str, Any] = {"200": {"description": "It worked.", "content": content}}
        for status in errors:
            responses[str(status)] = {"description": ERRORS[status], "content": envelope}
        described: dict[str, Any] = {"responses": responses}
        if bodies:
            described["requestBody"] = {"required": True, "content": {"application/json": {"schema": _one_of(bodies)}}}
        if guarded:
            described["security"] = [{SECURITY: []}]
        return described

    def install(self, app: FastAPI) -> None:
        """Route them, and have /openapi.json define all their bodies and answers."""
        app.include_router(self._router)
        plain = app.openapi

        def openapi() -> dict[str, Any]:
            description = plain()
            for operations in description["paths"].values():
                for described in operations.values():
                    described["responses"].pop("422", None)  # FastAPI's own answer to bad parameters: here it is 400
            _, bodies = models_json_schema([(body, "validation") for body in self._bodies], ref_template=_REF)
            _, answers = models_json_schema([(answer, "serialization") for answer in self._answers], ref_template=_REF)
            components = description.setdefault("components", {})
            components["schemas"] = bodies["$defs"] | answers["$defs"]
            components["securitySchemes"] = {SECURITY: {"type": "http", "scheme": "bearer"}}
            return description

        app.openapi = openapi  # type: ignore[method-assign]
