"""The interface between a replica's HTTP front and whoever runs the model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from workers.protocol.messages import EngineStats, Request, RequestOutput
from workers.protocol.report import SelfTestReport
from workers.protocol.request import NO_ROOT


@dataclass(frozen=True)
class ModelInfo:
    """Facts about the loaded model that the front needs."""

    name: str
    max_context: int
    """Most tokens a request may hold, prompt and generated ones together."""
    vocab_size: int
    eos_ids: tuple[int, ...]
    max_width: int
    """Most tokens a decode row feeds in one step: 1 + drafts."""
    created: int
    """Unix time, seconds."""
    root: bytes = NO_ROOT
    """Hash of all that decides what its cached pages hold (`Ready.root`)."""
    cache_shards: int = 1
    """Ranks that share out one cache: a number where the settings say auto, too."""

    def __post_init__(self) -> None:
        if self.max_context < 2 or self.vocab_size < 1 or self.max_width < 1:
            raise ValueError(f"max_context, vocab_size and max_width must be positive: {self}")
        if not all(0 <= token < self.vocab_size for token in self.eos_ids):
            raise ValueError(f"end-of-sequence ids {self.eos_ids} outside the vocabulary of {self.vocab_size}")


class EngineFault(Exception):
    """The replica is going down; the text is the first cause."""

    def __init__(self, cause: str, lasting: bool = False) -> None:
        super().__init__(cause)
        self.lasting = lasting
        """Whether another start would end the same."""


class Refused(Exception):
    """The scheduler did not take the request."""

    def __init__(self, reason: str, overloaded: bool = False, unavailable: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.overloaded = overloaded
        """Trying again later may help; otherwise the request itself cannot be served."""
        self.unavailable = unavailable
        """The replica cannot do for now what the request needs; another one may."""


class RequestFailed(Exception):
    """The model could not compute this request; the replica goes on. The text is for whoever sent it."""

    def __init__(self, reason: str, dead_end: bool = False) -> None:
        super().__init__(reason)
        self.dead_end = dead_end
        """Whether its own grammar allowed no token."""


class Engine(Protocol):
    """Engine of one replica as its front sees it. Everything happens on one asyncio loop."""

    @property
    def info(self) -> ModelInfo:
        """The loaded model."""

    @property
    def fault(self) -> str | None:
        """First cause of the replica's end, None while it lives."""

    @property
    def stats(self) -> EngineStats:
        """The newest figures of the scheduler."""

    @property
    def selftest(self) -> SelfTestReport | None:
        """Report of the self-test that ran when the replica started; None if it did not run."""

    def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        """The outputs of one request, the last with `finish` set. Outputs that wait for the reader may be merged.

        Closing the iterator early (`aclose`, where it has one) cancels the request. Raises `EngineFault`, `Refused`,
        `RequestFailed`.
        """

    async def health_check(self) -> None:
        """Send a real token through every rank; raises `EngineFault`."""
