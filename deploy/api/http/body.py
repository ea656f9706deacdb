"""A request's body: read within bounds of size and memory, worked on in its turn, parsed as strict JSON, validated.

Reading, validating, templating and tokenizing a large body takes long and much memory. Only so many bytes of large
bodies are held at one time, and only a few of them are worked on, while small ones pass by. A body of a few megabytes
may hold millions of values, and whoever builds, validates or releases those keeps the interpreter, and with it every
stream, for seconds. So they are counted while the body arrives, in a few passes over the bytes inside the interpreter's
own functions. Text that is no JSON is counted somehow; the parser refuses it.
"""

from __future__ import annotations

import asyncio
import gc
import re
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, Final, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request as HttpRequest
from starlette.types import Receive

from deploy.api.http.draws import Draws
from deploy.api.http.errors import ApiError, invalid, not_valid
from deploy.config.api import ApiConfig
from deploy.text.lane import SMALL, Lanes, Worker, at_once
from deploy.text.mending import with_whole_escapes

Model = TypeVar("Model", bound=BaseModel)

DRAIN_S = 1.0
"""Seconds for which the rest of a body that is too large is read and thrown away, so that a client that only reads once
it has written sees the answer instead of a reset connection."""
UNCOUNTED = 64 * 1024
"""Bytes of a body that need no room in the memory for large ones, so that ordinary requests always come in."""
SLICE = 64 * 1024
"""Bytes that are looked at in one go, for at most a few milliseconds."""
BODY: Final = "latentserve.body"
"""Key of the body in a request's scope. It is kept there where the key is there already."""
BYTES_PER_VALUE = 64
"""Bytes of mixed JSON that are as much work as one value of it."""
PLAIN = 4
"""Times as many bytes are as much work where they are long strings, as texts of chats."""
_ARGUMENTS = b'"arguments"'
_STEPS = tuple((byte in b"[{") - (byte in b"]}") for byte in range(256))
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


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


async def read_body(request: HttpRequest, config: ApiConfig, account: Account) -> tuple[bytes, int]:
    """The whole body, which `account` holds, and how many values it has, or a few more. BodyTooLarge as soon as it is
    known to exceed `max_body_bytes`; 400 as soon as it is known to hold more values than one may; 503 where there is no
    memory for it; 408 where it takes longer than `body_timeout_s` to arrive."""
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


async def _receive(request: HttpRequest, config: ApiConfig, account: Account) -> tuple[bytes, int]:
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
            return b"".join(parts), scanner.values


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
    """The JSON object in `raw`. Strict: valid UTF-8, no NaN or Infinity, bounded nesting; 400 otherwise. A mark of the
    byte order before it is left out. In a conversation halves of surrogate pairs are U+FFFD: it could not go on because
    of what was said before."""
    raw = raw.removeprefix(BOM_UTF8)
    if not raw.strip():
        raise invalid("the request body is empty; a JSON object is expected", code="invalid_json")
    try:
        with _no_garbage_collection():
            value = _loaded(raw)
    except orjson.JSONDecodeError as error:
        raise invalid(f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(value, dict):
        kind = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}.get(type(value), "a number")
        raise invalid(f"the request body must be a JSON object, not {kind}", code="invalid_json")
    return value


def _loaded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        whole = with_whole_escapes(raw)
        value = None if whole == raw else orjson.loads(whole)
        if not isinstance(value, dict) or value.keys().isdisjoint(("messages", "input")):
            raise
        return value


def validate(model: type[Model], value: Mapping[str, Any]) -> Model:
    """`value` as a `model`; 400 naming the first field that is wrong."""
    try:
        with _no_garbage_collection():
            return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=True, include_input=False)[0]
        raise not_valid(first, first["loc"]) from None


class JsonScanner:
    """Counts names, strings with arrays and objects, and all values; ApiError (400) as soon as there are too many of
    one, or when arrays and objects lie too deep in each other."""

    def __init__(self, limits: ApiConfig) -> None:
        self._limits = limits
        self._in_string = False
        self._backslash = b""
        """A backslash at the end of what was fed, which escapes what comes next."""
        self.depth = 0
        self.keys = 0
        """Names in objects."""
        self.items = 0
        """Values that are strings, arrays or objects."""
        self.values = 1
        """Values of any kind, or a little more: an empty array counts as if it held one."""

    def feed(self, data: bytes) -> None:
        """Count `data`, of at most `SLICE` bytes, which goes on where the last one ended."""
        data = self._without_escapes(data)
        pieces = data.split(b'"')
        outside = b"".join(pieces[self._in_string :: 2])
        # Every second quote begins a string, which is counted there.
        strings = (len(pieces) - self._in_string) // 2
        self._in_string ^= len(pieces) % 2 == 0
        names, opened = outside.count(b":"), outside.count(b"[") + outside.count(b"{")
        self.keys += names
        self.items += strings - names + opened
        self.values += opened + outside.count(b",")
        self._check_depth(outside, opened)
        limits = self._limits
        self._check(self.keys, limits.max_json_keys, "names of fields", "max_json_keys")
        self._check(self.items, limits.max_json_items, "strings, arrays and objects", "max_json_items")
        self._check(self.values, limits.max_json_values, "values", "max_json_values")

    def _without_escapes(self, data: bytes) -> bytes:
        """`data` without escaped backslashes and quotes: every quote that is left begins or ends a string."""
        data = self._backslash + data
        self._backslash = b""
        if b"\\" not in data:
            return data
        if (len(data) - len(data.rstrip(b"\\"))) % 2:
            data, self._backslash = data[:-1], b"\\"
        # Pairs of backslashes first, from the left, as a parser reads them.
        return data.replace(b"\\\\", b"").replace(b'\\"', b"")

    def _check_depth(self, outside: bytes, opened: int) -> None:
        most, deepest = self._limits.max_json_depth, self.depth + opened
        if deepest > most:  # perhaps: they may have been closed in between
            deepest = max(
                accumulate(map(_STEPS.__getitem__, outside.translate(None, _NO_BRACKETS)), initial=self.depth)
            )
        if deepest > most:
            raise invalid(
                f"the request body is nested too deep: at most {most} arrays and objects may lie in each other "
                "(max_json_depth)",
                code="invalid_json",
            )
        self.depth += opened - outside.count(b"]") - outside.count(b"}")

    @staticmethod
    def _check(count: int, most: int, what: str, setting: str) -> None:
        if count > most:
            raise too_many(what, most, setting)


def too_many(what: str, most: int, setting: str) -> ApiError:
    """400: the body holds more than a server takes in one request."""
    return invalid(
        f"the request body holds more than {most} {what}, the most that one request may have here ({setting}): "
        "send several requests",
        code="too_many_values",
    )


def _size_of_work(length: int, values: int) -> int:
    """The size, as lanes have it, of the work on a body of `length` bytes that holds about `values` values. Values are
    what takes time: as many bytes of the shortest messages take many times as long as one long message."""
    estimated = length // PLAIN + values * BYTES_PER_VALUE
    return min(length, estimated) if estimated <= SMALL else max(length, SMALL + 1)


class Budget:
    """Bytes that may be held at one time. Several requests of one API key may together hold as many as they leave free,
    so that some are left for other keys, however much one sends."""

    def __init__(self, total: int) -> None:
        self.total, self.held = total, 0
        self.by_key: Counter[str] = Counter()

    @contextmanager
    def account(self, key: str = "") -> Iterator[Account]:
        """Open the memory account of one request of the API key of this name. What it holds is given back at the end of
        the block."""
        account = Account(self, key)
        try:
            yield account
        finally:
            self.held -= account.held
            self.by_key[key] -= account.held
            if not self.by_key[key]:
                del self.by_key[key]


class Account:
    """Part of a budget that one request holds."""

    def __init__(self, budget: Budget, key: str) -> None:
        self._budget, self._key, self.held = budget, key, 0

    def grow(self, held: int) -> bool:
        """Hold `held` bytes from now on; False, and nothing changes, where that is more than is left."""
        budget, key, more = self._budget, self._key, held - self.held
        left = budget.total - budget.held - more
        of_key = budget.by_key[key]
        if left < 0 or (key and of_key > self.held and of_key + more > left):
            return False
        budget.held += more
        budget.by_key[key] += more
        self.held = held
        return True


@dataclass(frozen=True)
class Incoming:
    """A body that has its turn."""

    raw: bytes
    work: Worker
    """Runs work that takes time in proportion to the body's size."""
    key: str = ""
    """Name of the API key that it came with."""
    draws: Draws = field(default_factory=Draws)
    """What its request draws."""


class Intake:
    """Intake of request bodies. There is one per application."""

    def __init__(self, config: ApiConfig) -> None:
        self._config = config
        self._budget = Budget(max(config.max_held_bytes, config.max_body_bytes))
        self._lanes = Lanes()

    @asynccontextmanager
    async def reading(self, request: HttpRequest) -> AsyncIterator[Incoming]:
        """Read the body of `request` and wait for its turn; the block has it until all that is large is made of it.
        What it raises: see `read_body`."""
        key = request.scope.get("latentserve.key", "")
        with self._budget.account(key) as account:
            raw, values = await read_body(request, self._config, account)
            if BODY in request.scope:
                request.scope[BODY] = raw
            # Arguments of calls are JSON within a string, whose values nobody has counted.
            size = len(raw) if _ARGUMENTS in raw else _size_of_work(len(raw), values)
            async with self._lanes.turn(size, key) as work:
                if work is not at_once and await request.is_disconnected():
                    raise ClientDisconnected
                yield Incoming(raw, work, key, request.scope["latentserve.draws"])

    @asynccontextmanager
    async def with_more(self, incoming: Incoming, size: int) -> AsyncIterator[Incoming]:
        """The turn for a body to whose work `size` bytes come that the server has already."""
        if incoming.work is not at_once:  # it is worked on aside as it is
            yield incoming
            return
        async with self._lanes.turn(len(incoming.raw) + size, incoming.key) as work:
            yield replace(incoming, work=work)
