"""Admission where API keys are asked for: who a request comes from, and whether the limits of its key allow it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from starlette.requests import Request as HttpRequest
from starlette.types import Scope
from typing_extensions import override

from deploy.api.http.errors import ApiError, invalid, over_limit
from deploy.api.limits.admission import CONTINUED, Admission, Admitted, Counted, whole_seconds
from deploy.api.limits.buckets import Meter
from deploy.api.limits.keys import Key, KeyRing, OverLimit
from deploy.observability.front_metrics import FrontMetrics
from workers.protocol.front import Engine


class KeyedRequest(Admitted):
    """A request of a key with a name, whose tokens are counted for it."""

    def __init__(self, keys: KeyRing, key: Key, meter: Meter, metrics: FrontMetrics) -> None:
        self._keys, self._key, self._meter, self._metrics = keys, key, meter, metrics

    @override
    def place(self, priority: int) -> tuple[int, str, float]:
        return self._keys.place(self._key, priority)

    @override
    def started(self, prompt_tokens: int) -> None:
        self._metrics.key_started(self._key.name, prompt_tokens)

    @override
    def began(self) -> None:
        self._meter.began()

    @override
    def finished(self, reason: str, generated: int, queued: float | None) -> None:
        self._metrics.key_finished(self._key.name, reason, generated, queued)


class KeyedAdmission(Admission):
    """The room of one replica, for requests with an API key. Keys with names have limits, and share the room."""

    def __init__(self, engine: Engine, retry_after_s: int, keys: KeyRing, metrics: FrontMetrics) -> None:
        super().__init__(engine, retry_after_s)
        self._keys, self._metrics = keys, metrics
        self._asking: ContextVar[Key | None] = ContextVar("asking", default=None)
        """The key of the request whose task this is; None where no key has a name."""

    async def authorize(self, request: HttpRequest) -> None:
        """401 without one of the API keys, as OpenAI's clients or Anthropic's give it."""
        self._authorize(request)

    def _authorize(self, request: HttpRequest) -> None:
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        offered = (request.headers.get("x-api-key", ""), *([bearer] if scheme.lower() == "bearer" else []))
        key = self._keys.find(offered)
        if key is None:
            raise ApiError(
                401,
                "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self._keys.named:
            self._asking.set(key)
            request.scope["latentserve.key"] = key.name
            request.scope.get("latentserve.log", {})["key"] = key.name

    async def enter(self, request: HttpRequest) -> None:
        """Authorize a request that is to generate, and count it; 429 where its key has used up a limit."""
        self._authorize(request)
        if (key := self._asking.get()) is not None and CONTINUED.get() is None:
            with self._limits_of(key, request.scope):
                key.enter()

    @override
    @contextmanager
    def running(self, scope: Scope, prompt_tokens: int, sequences: Sequence[Counted]) -> Iterator[Admitted]:
        if (key := self._asking.get()) is None:
            with super().running(scope, prompt_tokens, sequences) as admitted:
                yield admitted
            return
        count, most, done = len(sequences), key.settings.max_sequences, CONTINUED.get()
        if done is not None:
            most = None
        if most is not None and count > most:
            raise invalid(f"{count} sequences, prompts times n: this API key may have {most} at a time", "n")
        with self._limits_of(key, scope):
            self.check_capacity(count)
            meter = key.start(prompt_tokens, sequences) if done is None else key.go_on(done, sequences)
        try:
            with self._counted(count):
                yield KeyedRequest(self._keys, key, meter, self._metrics)
        finally:
            key.end(meter)

    @override
    def _others_make_room(self, sequences: int) -> bool:
        """Let the scheduler make room where other keys hold more than their share of it. Return whether it does."""
        key = self._asking.get()
        return key is not None and self._keys.has_less(key, sequences)

    @contextmanager
    def _limits_of(self, key: Key, scope: Scope) -> Iterator[None]:
        """Write the key's limits into the headers of the answer at the end of the block, and turn `OverLimit` into an
        error response."""
        try:
            yield
        except OverLimit as error:
            self._metrics.key_limited(key.name, error.limit)
            wait_s = whole_seconds(error.wait_s)
            raise over_limit(error.reason, wait_s if error.certain else max(wait_s, self._retry_after_s)) from None
        finally:
            scope.get("latentserve.headers", [])[:] = key.headers()
