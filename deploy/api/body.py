"""A request's body: read within bounds, parsed as strict JSON, validated against a model."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from deploy.api.errors import ApiError, invalid

Model = TypeVar("Model", bound=BaseModel)

DRAIN_S = 1.0
"""Seconds for which the rest of a body that is too large is read and thrown away, so that a client that only reads once
it has written sees the answer instead of a reset connection."""


class ClientDisconnected(Exception):
    """The client went away; there is nobody to answer."""


class BodyTooLarge(ApiError):
    """413; the connection is closed after it."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            413,
            f"the request body is larger than {limit} bytes",
            code="request_too_large",
            headers={"Connection": "close"},
        )


async def read_body(request: HttpRequest, limit: int) -> bytes:
    """The whole body; BodyTooLarge as soon as it is known to exceed `limit` bytes."""
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "compressed request bodies are not supported", code="unsupported_encoding")
    declared = request.headers.get("content-length", "")
    if re.fullmatch(r"\d+", declared) and int(declared[:20]) > limit:
        if "expect" not in request.headers:
            await drain(request.receive, limit)
        raise BodyTooLarge(limit)
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        size += len(part)
        if size > limit:
            parts.clear()
            await drain(request.receive, limit)
            raise BodyTooLarge(limit)
        parts.append(part)
        if not message.get("more_body", False):
            return b"".join(parts)


async def drain(receive: Receive, limit: int) -> None:
    """Throw away what still arrives: at most about `limit` more bytes, for at most DRAIN_S seconds."""
    left = limit
    try:
        async with asyncio.timeout(DRAIN_S):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Millions of new objects of which none is garbage make the collector look through all of them again and again: a
    body of 8 MB full of short lists took 3 s in place of 0.4, in which no stream goes on."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Strict: valid UTF-8, no NaN or Infinity, bounded nesting; 400 otherwise."""
    if not raw.strip():
        raise invalid("the request body is empty; a JSON object is expected", code="invalid_json")
    try:
        with _no_garbage_collection():
            value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise invalid(f"the request body must be a JSON object, not {kind}", code="invalid_json")
    return value


def validate(model: type[Model], value: Mapping[str, Any]) -> Model:
    """`value` as a `model`; 400 naming the first field that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True, include_input=False)[0]
        param = ".".join(str(part) for part in first["loc"]) or None
        if first["type"] == "missing":
            raise invalid(f"the field {param!r} is required", param, "missing_required_parameter") from None
        code = "invalid_type" if "type" in first["type"] else "invalid_value"
        text = first["msg"].removeprefix("Value error, ")
        text = text[:1].lower() + text[1:]
        raise invalid(f"{param}: {text}" if param else text, param, code) from None


async def read_request(request: HttpRequest, model: type[Model], limit: int) -> tuple[Model, dict[str, Any]]:
    """Body, JSON and fields in one: the validated request and the raw object it came from."""
    raw = parse_object(await read_body(request, limit))
    return validate(model, raw), raw
