"""What all routes of a replica's front share: engine, tokenizer, settings, figures, and who may come in."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from hashlib import blake2b

from starlette.requests import Request as HttpRequest
from starlette.types import Scope

import kernels
from deploy.api.generation.choice import Choice
from deploy.api.http.errors import ApiError, engine_down, invalid, model_not_found, over_limit, overloaded
from deploy.api.job.reading import Reader
from deploy.api.limits.buckets import Pace, whole_seconds
from deploy.api.limits.keys import Key, KeyRing, OverLimit
from deploy.api.limits.meter import Meter
from deploy.config.api import ApiConfig
from deploy.observability.front_metrics import FrontMetrics
from deploy.text.lane import Lanes
from deploy.text.tokenizer import Tokenizer
from workers.protocol.front import Engine, EngineFault, ModelInfo, Refused, RequestFailed

FIGURES_PERIOD_S = 0.1
"""Seconds between two looks at the scheduler's figures, which it reports as often."""


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
"""All that asks for no API key."""


class Front:
    """One per application."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        config: ApiConfig,
        metrics: FrontMetrics,
        numerics: Mapping[str, object],
        keys: KeyRing | None = None,
    ) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.metrics = metrics
        self.reader = Reader(tokenizer, config)
        self.lanes = Lanes()
        """Turns for answers that are long to write."""
        self.in_flight = 0
        """Sequences handed to the engine and not ended."""
        self._numerics = dict(numerics)
        self.keys = keys if keys is not None else KeyRing(config.api_keys)
        self._asking: ContextVar[Key | None] = ContextVar("asking", default=None)
        self._pace = Pace(time.monotonic)
        self._probe: asyncio.Task[None] | None = None
        self._probed = float("-inf")

    def info(self) -> ModelInfo:
        """The model; 503 while there is none or no more."""
        if self.engine.fault is not None:
            raise engine_down(self.engine.fault)
        try:
            return self.engine.info
        except RuntimeError as error:
            raise ApiError(503, f"starting: {error}", kind="server_error", code="starting") from None

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of what decides which numbers come out: model, version and the engine's numeric settings. 503
        while there is no model."""
        parts = [kernels.__version__, self.info().name, sorted(self._numerics.items())]
        return f"fp_{blake2b(repr(parts).encode(), digest_size=5).hexdigest()}"

    def model_names(self) -> tuple[str, ...]:
        """Names a request may give."""
        return self.config.served_model_names or (self.info().name,)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name not in self.model_names():
            raise model_not_found(name)

    @property
    def key(self) -> Key | None:
        """That of the request whose task this is; None without any, and where no key has a name."""
        return self._asking.get()

    def authorize(self, request: HttpRequest) -> None:
        """401 without one of the API keys, if there are any, as OpenAI's clients or Anthropic's give it."""
        if not self.keys:
            return
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        key = self.keys.find((request.headers.get("x-api-key", ""), *([bearer] if scheme.lower() == "bearer" else [])))
        if key is None:
            raise ApiError(
                401,
                "a valid API key is required: Authorization: Bearer KEY, or x-api-key: KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if self.keys.named:
            self._asking.set(key)
            request.scope["latentserve.key"] = key.name
            request.scope.get("latentserve.log", {})["key"] = key.name

    def enter(self, request: HttpRequest) -> None:
        """Authorize a request that is to generate, and count it; 429 where its key has used up a limit."""
        self.authorize(request)
        if (key := self.key) is not None:
            with self._limits_of(key, request.scope):
                key.enter()

    @contextmanager
    def running(self, scope: Scope, prompt_tokens: int, choices: Sequence[Choice]) -> Iterator[Meter | None]:
        """Count the sequences of a request while the block runs, with its meter where it has a key; 429 where there is
        no room for them, or a limit of the key does not allow them. Nothing is awaited between the check and the count:
        a burst cannot slip through."""
        key, meter = self.key, None
        if key is not None:
            most = key.settings.max_sequences
            if most is not None and len(choices) > most:
                raise invalid(f"{len(choices)} sequences, prompts times n: this API key may have {most} at a time", "n")
            with self._limits_of(key, scope):
                self.check_room(len(choices))
                meter = key.start(prompt_tokens, choices)
        else:
            self.check_room(len(choices))
        self.in_flight += len(choices)
        try:
            yield meter
        finally:
            self.in_flight -= len(choices)
            self._pace.ended(len(choices))
            if key is not None and meter is not None:
                key.end(meter)

    @contextmanager
    def _limits_of(self, key: Key, scope: Scope) -> Iterator[None]:
        """What the block finds of the key's limits goes into the answer."""
        try:
            yield
        except OverLimit as error:
            self.metrics.key_limited(key.name, error.limit)
            wait_s = whole_seconds(error.wait_s)
            raise over_limit(
                error.reason, wait_s if error.certain else max(wait_s, self.config.retry_after_s)
            ) from None
        finally:
            scope.get("latentserve.headers", [])[:] = key.headers()

    def check_size(self, prompts: int, n: int) -> None:
        """400 for more sequences, `prompts` times `n`, than the replica ever takes."""
        most, stats = self._most(), self.engine.stats
        if prompts * n > most:
            raise invalid(
                f"{prompts} prompts times n = {n} are {prompts * n} sequences; one request may have at most {most}, "
                f"what can run ({stats.slots}) and wait ({stats.queue_limit}) here: send several requests",
                "prompt" if prompts > 1 else "n",
            )

    def check_room(self, sequences: int) -> None:
        """429 for more sequences than the replica takes now. This front is the only one that its scheduler serves.
        Where other keys have more than their share of the room the scheduler makes some."""
        key = self.key
        if self.in_flight + sequences > self._most() and not (key and self.keys.has_less(key, sequences)):
            raise overloaded(
                f"{self.in_flight} sequences run or wait, which leaves no room for {sequences} more; try again later",
                self.retry_after(self.in_flight + sequences - int(self._most())),
            )

    def retry_after(self, sequences: int) -> int:
        """Seconds, for a Retry-After header, in which so many sequences are likely to end: by the last ones' pace."""
        return max(whole_seconds(self._pace.wait(sequences)), self.config.retry_after_s)

    def _most(self) -> float:
        """Sequences that can run and wait; until the scheduler reports it, it refuses for itself."""
        stats = self.engine.stats
        return stats.slots + stats.queue_limit if stats.slots else math.inf

    async def check_alive(self) -> None:
        """Have a real token go through every rank; 503 with the first cause when it does not come. While it waits for
        its turn, a step of others that ends says as much: it went through every rank, too, be it a chunk of a long
        prompt or tokens.

        Callers share one probe at a time; a good one holds for `probe_ttl_s`.
        """
        self.info()
        if time.monotonic() - self._probed < self.config.probe_ttl_s:
            return
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._run_probe())
        try:
            # Shielded: one caller that leaves must not end the probe of the others.
            await asyncio.shield(self._probe)
        except (EngineFault, RequestFailed) as error:
            raise engine_down(self.engine.fault or str(error)) from None
        except TimeoutError:
            cause = self.engine.fault or f"no token came through within {self.config.probe_timeout_s:g} s"
            raise engine_down(cause) from None
        self.info()

    async def _run_probe(self) -> None:
        known = self.engine.stats.steps
        probe = asyncio.ensure_future(self.engine.probe())
        try:
            async with asyncio.timeout(self.config.probe_timeout_s):
                while self.engine.stats.steps == known and not await self._answered(probe):
                    pass
        except TimeoutError:
            if self.engine.stats.steps == known:
                raise
        finally:
            probe.cancel()
        self._probed = time.monotonic()

    @staticmethod
    async def _answered(probe: asyncio.Future[None]) -> bool:
        """Whether the probe's token has come, after a while in which it or new figures may. EngineFault."""
        if not probe.done():
            await asyncio.wait({probe}, timeout=FIGURES_PERIOD_S)
        if not probe.done():
            return False
        try:
            probe.result()
        except Refused:  # the queue is full
            await asyncio.sleep(FIGURES_PERIOD_S)
            return False
        return True
