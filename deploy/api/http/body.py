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

from deploy.api.http.errors import ApiError, invalid, not_valid
from deploy.api.http.memory import Account
from deploy.api.http.scan import SLICE, JsonScanner
from deploy.config.api import ApiConfig

Model = TypeVar("Model", bound=BaseModel)

DRAIN_S = 1.0
"""Seconds for which the rest of a body that is too large is read and thrown away, so that a client that only reads once
it has written sees the answer instead of a reset connection."""


UNCOUNTED = 64 * 1024
"""Bytes of a body that need no room in the memory for large ones, so that ordinary requests always come in."""


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


class NoMemory(ApiError):
    """503: the bodies of others take all the memory there is for them."""

    def __init__(self, retry_after_s: int) -> None:
        super().__init__(
            503,
            "other large requests take all the memory that this server has for request bodies; try again later",
            kind="server_error",
            code="server_overloaded",
            headers={"Retry-After": str(retry_after_s), "Connection": "close"},
        )


def check_type(request: HttpRequest) -> None:
    """415 for a body that is not said to be plain JSON. Browsers let any page send text to any server, but ask the
    server first before they send this type."""
    if request.headers.get("content-encoding", "identity").lower() not in ("", "identity"):
        raise ApiError(415, "compressed request bodies are not supported", code="unsupported_encoding")
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        found = f"not {kind[:64]!r}" if kind else "and this one has none"
        raise ApiError(
            415,
            f"a request body needs the header Content-Type: application/json, {found}",
            code="unsupported_content_type",
        )


async def read_body(request: HttpRequest, config: ApiConfig, account: Account) -> bytes:
    """The whole body, which `account` holds. BodyTooLarge as soon as it is known to exceed `max_body_bytes`; 400 as
    soon as it is known to hold more values than one may; 503 where there is no memory for it; 408 where it takes longer
    than `body_timeout_s` to arrive."""
    check_type(request)
    limit = config.max_body_bytes
    declared = request.headers.get("content-length", "")
    if re.fullmatch(r"\d+", declared) and int(declared[:20]) > limit:
        if "expect" not in request.headers:
            await drain(request.receive, limit)
        raise BodyTooLarge(limit)
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await _receive(request, config, account)
    except TimeoutError:
        raise ApiError(
            408,
            f"the request body did not arrive within {config.body_timeout_s:g} s",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None


async def _receive(request: HttpRequest, config: ApiConfig, account: Account) -> bytes:
    scanner, limit = JsonScanner(config), config.max_body_bytes
    parts: list[bytes] = []
    size = 0
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        part = message.get("body", b"")
        more = message.get("more_body", False)
        size += len(part)
        try:
            if size > limit:
                raise BodyTooLarge(limit)
            if size > UNCOUNTED and not account.grow(size):
                raise NoMemory(config.retry_after_s)
            await _scan(scanner, part)
        except ApiError as error:
            parts.clear()
            if more:
                await drain(request.receive, limit)
                error.headers["Connection"] = "close"
            raise
        parts.append(part)
        if not more:
            return b"".join(parts)


async def _scan(scanner: JsonScanner, part: bytes) -> None:
    for begin in range(0, len(part), SLICE):
        if begin:
            await asyncio.sleep(0)  # the event loop is others', too
        scanner.feed(part[begin : begin + SLICE])


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
        with _no_garbage_collection():
            return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True, include_input=False)[0]
        raise not_valid(first, first["loc"]) from None
