"""Whether a replica works and what the endpoint does right now: /health, /selftest, /live, which the page at `/` shows,
and /metrics."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from deploy.api.http.errors import ApiError, engine_down
from deploy.api.http.openapi import Answer, Endpoints
from deploy.api.job.model import ServedModel
from deploy.observability.front_metrics import CONTENT_TYPE, FrontMetrics
from deploy.observability.live import PERIOD_S, Replicas, ReplicaState
from workers.protocol.front import Engine, EngineFault, Refused, RequestFailed

FIGURES_PERIOD_S = 0.1
"""Seconds between two looks at the scheduler's figures, which it reports as often."""


class HealthAnswer(Answer):
    """GET /health."""

    status: Literal["ok"]


class SelfTestAnswer(BaseModel):
    """GET /selftest, as docs/api.md says."""

    model_config = ConfigDict(extra="allow")

    passed: bool
    summary: str
    buckets: list[dict[str, Any]]


class LiveModel(Answer):
    """Description of the served model."""

    names: list[str]
    """Names that requests may give; answers carry the first one."""
    max_model_len: int
    max_width: int
    """Most tokens a decode row feeds in one step: 1 + drafts."""
    chat: bool
    """Whether there is a chat template."""
    max_logprobs: int


class LiveTotal(Answer):
    """Sums over the replicas that serve."""

    serving: int
    """Replicas."""
    running: int
    waiting: int
    slots: int
    pages_total: int
    pages_free: int
    generated_tokens_per_s: float
    prompt_tokens_per_s: float


class LiveAnswer(Answer):
    """GET /live."""

    at: float
    """Unix time, seconds."""
    model: LiveModel | None
    """null once the replica that answers has failed."""
    replica: str
    """Name of the one that answers."""
    replicas: list[ReplicaState]
    total: LiveTotal
    selftest: SelfTestAnswer | None = None
    """Report of `GET /selftest` for the replica that answers; null where it is switched off or not asked for."""


class Live:
    """Answers that many who ask at a time share, for a second."""

    def __init__(self, engine: Engine, served: ServedModel, replicas: Replicas) -> None:
        self._engine, self._served, self._replicas = engine, served, replicas
        self._asking: asyncio.Task[LiveAnswer] | None = None
        self._asked = float("-inf")

    async def answer(self, selftest: bool) -> LiveAnswer:
        """The newest one, at most a second old; `selftest`: with the table of the self-test."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked >= PERIOD_S):
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        # Shielded: one caller that leaves must not end the question of the others.
        answer = await asyncio.shield(self._asking)
        report = self._engine.selftest
        if not selftest or report is None:
            return answer
        return answer.model_copy(update={"selftest": SelfTestAnswer.model_validate(report.to_json())})

    async def _ask(self) -> LiveAnswer:
        states = await self._replicas.states()
        return LiveAnswer(
            at=time.time(), model=self._model(), replica=self._replicas.own, replicas=states, total=_total(states)
        )

    def _model(self) -> LiveModel | None:
        try:
            info = self._served.info()
        except ApiError:
            return None
        tokenizer, config = self._served.tokenizer, self._served.config
        return LiveModel(
            names=list(self._served.names()),
            max_model_len=info.max_context,
            max_width=info.max_width,
            chat=tokenizer is not None and (config.chat_template is not None or tokenizer.has_chat_template),
            max_logprobs=config.max_logprobs,
        )


def _total(states: list[ReplicaState]) -> LiveTotal:
    serving = [state.figures for state in states if state.state == "serving" and state.figures is not None]
    return LiveTotal(
        serving=len(serving),
        running=sum(figures.running for figures in serving),
        waiting=sum(figures.waiting for figures in serving),
        slots=sum(figures.slots for figures in serving),
        pages_total=sum(figures.pages_total for figures in serving),
        pages_free=sum(figures.pages_free for figures in serving),
        generated_tokens_per_s=sum(figures.generated_tokens_per_s or 0.0 for figures in serving),
        prompt_tokens_per_s=sum(figures.prompt_tokens_per_s or 0.0 for figures in serving),
    )


class HealthCheck:
    """Finds out whether the engine computes; one per application."""

    def __init__(self, engine: Engine, model: ServedModel) -> None:
        self._engine, self._model, self._config = engine, model, model.config
        self._running: asyncio.Task[None] | None = None
        self._passed_s = float("-inf")

    async def check_alive(self) -> None:
        """Have a real token go through every rank; 503 with the first cause when it does not come. While it waits for
        its turn, a step of others that ends says as much: it went through every rank, too, be it a chunk of a long
        prompt or tokens.

        Callers share one health check at a time; a good one holds for `probe_ttl_s`.
        """
        self._model.info()
        if time.monotonic() - self._passed_s < self._config.probe_ttl_s:
            return
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run_health_check())
        try:
            # Shielded: one caller that leaves must not end the health check of the others.
            await asyncio.shield(self._running)
        except (EngineFault, RequestFailed) as error:
            raise engine_down(self._engine.fault or str(error)) from None
        except TimeoutError:
            cause = self._engine.fault or f"no token came through within {self._config.probe_timeout_s:g} s"
            raise engine_down(cause) from None
        self._model.info()

    async def _run_health_check(self) -> None:
        known = self._engine.stats.steps
        request = asyncio.ensure_future(self._engine.health_check())
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                while self._engine.stats.steps == known and not await self._answered(request):
                    pass
        except TimeoutError:
            if self._engine.stats.steps == known:
                raise
        finally:
            request.cancel()
        self._passed_s = time.monotonic()

    @staticmethod
    async def _answered(request: asyncio.Future[None]) -> bool:
        """Whether the health check's token has come, after a while in which it or new figures may. EngineFault."""
        if not request.done():
            await asyncio.wait({request}, timeout=FIGURES_PERIOD_S)
        if not request.done():
            return False
        try:
            request.result()
        except Refused:  # the queue is full
            await asyncio.sleep(FIGURES_PERIOD_S)
            return False
        return True


def add_status(
    endpoints: Endpoints, engine: Engine, model: ServedModel, figures: FrontMetrics, replicas: Replicas
) -> None:
    """/health, /selftest, /live and /metrics."""
    live, check = Live(engine, model, replicas), HealthCheck(engine, model)

    async def health(request: HttpRequest) -> Response:
        """200 once a real token, or a step of others, went through every rank; 503 with the first cause otherwise."""
        await check.check_alive()
        return Response(orjson.dumps({"status": "ok"}), media_type="application/json")

    async def selftest(request: HttpRequest) -> Response:
        """The report of the self-test that ran when this replica started; 404 if it was switched off."""
        model.info()
        report = engine.selftest
        if report is None:
            message = "no self-test ran when this replica started: the setting engine.selftest is false"
            raise ApiError(404, message, code="selftest_off")
        return Response(orjson.dumps(report.to_json()), media_type="application/json")

    async def now(request: HttpRequest, selftest: bool = True) -> Response:
        """The current state of all replicas, and the self-test report of the one that answers."""
        return Response((await live.answer(selftest)).model_dump_json(), media_type="application/json")

    async def metrics(request: HttpRequest) -> Response:
        """Figures of this process for Prometheus."""
        return Response(figures.render(), headers={"content-type": CONTENT_TYPE})

    endpoints.add("/health", "GET", health, answer=HealthAnswer)
    endpoints.add("/selftest", "GET", selftest, answer=SelfTestAnswer)
    endpoints.add("/live", "GET", now, answer=LiveAnswer)
    endpoints.add("/metrics", "GET", metrics)
