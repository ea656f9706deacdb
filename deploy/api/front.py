"""What all routes of a replica's front share: engine, tokenizer, settings, figures, and who may come in."""

from __future__ import annotations

import asyncio
import hmac
import time

from starlette.requests import Request as HttpRequest

from deploy.api.config import ApiConfig
from deploy.api.errors import ApiError, engine_down, model_not_found, overloaded
from deploy.metrics import FrontMetrics
from deploy.text.tokenizer import Tokenizer
from workers.engine import Engine, EngineFault, ModelInfo


class Front:
    """One per application."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, config: ApiConfig, metrics: FrontMetrics) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.config = config
        self.metrics = metrics
        self.in_flight = 0
        """Sequences handed to the engine and not ended."""
        self._keys = [key.encode() for key in config.api_keys]
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

    def model_names(self) -> tuple[str, ...]:
        """Names a request may give."""
        return self.config.served_model_names or (self.info().name,)

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name not in self.model_names():
            raise model_not_found(name)

    def authorize(self, request: HttpRequest) -> None:
        """401 without one of the API keys, if there are any."""
        if not self._keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        # Every key is compared, in constant time each.
        given = key.strip().encode("latin-1")  # how the server decoded the header
        good = sum(hmac.compare_digest(given, known) for known in self._keys)
        if scheme.lower() != "bearer" or not good:
            raise ApiError(
                401,
                "a valid API key is required: Authorization: Bearer KEY",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    def check_room(self, sequences: int) -> None:
        """429 when the queue is full. The scheduler's figures are a fraction of a second old, so what this front itself
        sent beyond the slots counts as waiting at once."""
        limit, stats = self.config.queue_limit, self.engine.stats
        excess = self.in_flight + sequences - stats.slots if stats.slots else 0
        if excess > limit or (limit and stats.waiting >= limit):
            raise overloaded(
                f"the queue of {limit} waiting requests is full; try again later", self.config.retry_after_s
            )

    async def check_alive(self) -> None:
        """Have a real token go through every rank; 503 with the first cause when it does not come.

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
        except EngineFault as error:
            raise engine_down(self.engine.fault or str(error)) from None
        except TimeoutError:
            cause = self.engine.fault or f"no token came through within {self.config.probe_timeout_s:g} s"
            raise engine_down(cause) from None
        self.info()

    async def _run_probe(self) -> None:
        async with asyncio.timeout(self.config.probe_timeout_s):
            await self.engine.probe()
        self._probed = time.monotonic()
