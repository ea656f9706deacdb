"""Every answer that is not a success, in OpenAI's envelope: {"error": {"message", "type", "param", "code"}}. Below
/v1/messages it is Anthropic's, which has `type` "error" beside `error`, and other types in it. A stream of
/v1/responses that fails ends with an event of that API."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest

from workers.protocol.front import EngineFault, Refused, RequestFailed

log = logging.getLogger("latentserve.api")


_MESSAGES: Final = "/v1/messages"
_OF_ANTHROPIC: Final = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def of_anthropic(path: str) -> bool:
    """Whether a path is of Anthropic's API."""
    return path == _MESSAGES or path.startswith(f"{_MESSAGES}/")


_RESPONSES: Final = "/v1/responses"
FAILURES: Final = ("/v1/completions", _MESSAGES, _RESPONSES)
"""A path of each kind of event that ends a stream that failed."""
GONE: Final = 499
"""Status of answers that nobody will read (nginx's)."""
LAST_NUMBER: Final = 2**31 - 1
"""Sequence number of the event that ends a stream of /v1/responses that failed: behind all others, whatever they were,
for who writes it may not know them."""


def failure_of(path: str) -> int:
    """Return the index in `FAILURES` of the event that ends failed streams of a path."""
    return 1 if of_anthropic(path) else 2 if path == _RESPONSES else 0


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
        headers: Mapping[str, str] | None = None,
        error_code: str | None = None,
    ) -> None:
        """`error_code`: the name that Anthropic's API has for the cause, by which its clients know what to do."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.kind = kind
        self.headers = dict(headers or {})
        self.error_code = error_code

    def envelope(self, path: str) -> bytes:
        """The JSON body, for a request of this path."""
        error: dict[str, Any] = {
            "message": self.message,
            "type": self.kind,
            "param": self.param,
            "code": self.code,
        }
        if not of_anthropic(path):
            return orjson.dumps({"error": error})
        error["type"] = _OF_ANTHROPIC.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        if self.error_code is not None:
            error["details"] = {"error_code": self.error_code}
        return orjson.dumps({"type": "error", "error": error})

    def response(self, path: str = "") -> Response:
        """The HTTP answer."""
        return Response(self.envelope(path), self.status, self.headers, media_type="application/json")

    def event(self, path: str) -> bytes:
        """The last event of a stream that failed."""
        if path == _RESPONSES:
            # With `error` besides, which OpenAI's clients raise as an exception.
            more = orjson.loads(self.envelope(path))
            told = {"code": self.code, "message": self.message, "param": self.param, "sequence_number": LAST_NUMBER}
            return b"event: error\ndata: " + orjson.dumps({"type": "error", **told, **more}) + b"\n\n"
        return (b"event: error\n" if of_anthropic(path) else b"") + b"data: " + self.envelope(path) + b"\n\n"


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request asks for something that cannot be."""
    return ApiError(400, message, param=param, code=code)


class TooLong(ApiError):
    """400 for a prompt, with what is to be generated, that is longer than the model's context."""

    def __init__(self, prompt: int, generated: int, most: int, param: str, at_least: bool) -> None:
        """Tokens: of the prompt, to generate, of the context; with `at_least` the prompt may have more."""
        self.prompt, self.generated, self.most = prompt, generated, most
        least = "at least " if at_least else ""
        super().__init__(
            400,
            f"this model's maximum context length is {most} tokens, but {least}{prompt + generated} were requested "
            f"({least}{prompt} in the prompt, {generated} to generate)",
            param=param,
            code="context_length_exceeded",
        )


def not_valid(found: Mapping[str, Any], place: Sequence[str | int]) -> ApiError:
    """400: `found` is one of pydantic's errors, about the field at `place` in the body or the query."""
    param = ".".join(str(part) for part in place) or None
    if found["type"] == "missing":
        return invalid(f"the field {param!r} is required", param, "missing_required_parameter")
    code = "invalid_type" if "type" in found["type"] else "invalid_value"
    text = found["msg"].removeprefix("Value error, ")
    text = text[:1].lower() + text[1:]
    return invalid(f"{param}: {text}" if param else text, param, code)


def unsupported(what: str, param: str, error_code: str | None = None) -> ApiError:
    """400: a feature of the API that this server does not have. `error_code`: see `ApiError`."""
    message = f"{what} is not supported by this server"
    return ApiError(400, message, param=param, code="unsupported_parameter", error_code=error_code)


def model_not_found(name: str) -> ApiError:
    """404 for a model that is not served here."""
    return ApiError(404, f"the model {name[:200]!r} does not exist", param="model", code="model_not_found")


def overloaded(reason: str, retry_after_s: int) -> ApiError:
    """429 with Retry-After."""
    return ApiError(
        429, reason, kind="rate_limit_error", code="server_overloaded", headers={"Retry-After": str(retry_after_s)}
    )


def over_limit(reason: str, retry_after_s: int) -> ApiError:
    """429 for an API key that has used up a limit of its own, with Retry-After."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(429, reason, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)


def unavailable(reason: str, retry_after_s: int) -> ApiError:
    """503 with Retry-After: what only this replica cannot do, and only for now."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, reason, kind="server_error", code="grammars_unavailable", headers=headers)


def engine_down(cause: str) -> ApiError:
    """503 with the first cause of the replica's end."""
    return ApiError(503, f"the engine is down: {cause}", kind="server_error", code="engine_down")


def from_engine(error: EngineFault | Refused | RequestFailed, retry_after_s: int) -> ApiError:
    """Map an engine's error to the error that is sent over HTTP."""
    if isinstance(error, RequestFailed) and error.dead_end:
        return ApiError(400, str(error), code="grammar_stuck")
    if isinstance(error, RequestFailed):
        return ApiError(500, str(error), kind="server_error", code="bad_logits")
    if isinstance(error, EngineFault):
        return engine_down(str(error))
    if error.unavailable:
        return unavailable(error.reason, retry_after_s)
    return overloaded(error.reason, retry_after_s) if error.overloaded else invalid(error.reason)


def install(app: FastAPI) -> None:
    """Answer every error of the application in the envelope."""

    async def api_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return error.response(request.url.path)

    async def bad_query(request: HttpRequest, error: Exception) -> Response:
        # FastAPI looks at parameters alone, never at bodies; the first part of the place says of which kind they are.
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        return not_valid(first, first["loc"][1:]).response(request.url.path)

    async def http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path, method = request.url.path[:200], request.method
        if error.status_code == 404:
            answer = ApiError(404, f"unknown path {path!r}", code="unknown_url")
        elif error.status_code == 405:
            answer = ApiError(405, f"{method} is not allowed for {path!r}", code="method_not_allowed")
        else:
            answer = ApiError(error.status_code, str(error.detail))
        answer.headers = dict(error.headers or {})
        return answer.response(request.url.path)

    async def defect(request: HttpRequest, error: Exception) -> Response:
        # The traceback goes to the log (the server writes it); the client learns nothing of the inside.
        headers: dict[str, str] = {}
        if request_id := request.scope.get("latentserve.request_id"):
            headers["x-request-id"] = request_id
        answer = ApiError(500, "internal error", kind="server_error", code="internal_error", headers=headers)
        return answer.response(request.url.path)

    handlers: dict[Any, Any] = {
        ApiError: api_error,
        RequestValidationError: bad_query,
        HTTPException: http_error,
        Exception: defect,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
