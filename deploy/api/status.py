"""GET /live: what an endpoint does right now, for the page at `/` and for whoever watches it."""

from __future__ import annotations

import asyncio
import time

from deploy.api.http.errors import ApiError
from deploy.api.limits.front import Front
from deploy.api.openai.answers import Answer, SelfTestAnswer
from deploy.observability.live import PERIOD_S, Replicas, ReplicaState


class LiveModel(Answer):
    """What is served."""

    names: list[str]
    """That requests may give; the first is the one answers carry."""
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
    """What `GET /selftest` answers, of the replica that answers; null where it is switched off or not asked for."""


class Live:
    """Answers that many who ask at a time share, for a second."""

    def __init__(self, front: Front, replicas: Replicas) -> None:
        self._front, self._replicas = front, replicas
        self._asking: asyncio.Task[LiveAnswer] | None = None
        self._asked = float("-inf")

    async def answer(self, selftest: bool) -> LiveAnswer:
        """The newest one, at most a second old; `selftest`: with the table of the self-test."""
        if self._asking is None or (self._asking.done() and time.monotonic() - self._asked >= PERIOD_S):
            self._asked = time.monotonic()
            self._asking = asyncio.create_task(self._ask())
        # Shielded: one caller that leaves must not end the question of the others.
        answer = await asyncio.shield(self._asking)
        report = self._front.engine.selftest
        if not selftest or report is None:
            return answer
        return answer.model_copy(update={"selftest": SelfTestAnswer.model_validate(report.to_json())})

    async def _ask(self) -> LiveAnswer:
        states = await self._replicas.states()
        return LiveAnswer(
            at=time.time(), model=self._model(), replica=self._replicas.own, replicas=states, total=_total(states)
        )

    def _model(self) -> LiveModel | None:
        front = self._front
        try:
            info = front.info()
        except ApiError:
            return None
        tokenizer, config = front.tokenizer, front.config
        return LiveModel(
            names=list(front.model_names()),
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
