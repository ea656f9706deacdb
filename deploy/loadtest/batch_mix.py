"""Composition of an endpoint's steps under load, as its `GET /live` reports it. Other kinds of endpoints have no such
report, and then nothing is known."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from deploy.loadtest.sse_client import ConnectionLost, SseClient, Target

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

PATH: Final = "/live?selftest=false"
PERIOD_S: Final = 1.0
"""Seconds for which an endpoint gives the same answer."""
LIMIT_S: Final = 10.0
"""Seconds to wait for one."""
KINDS: Final = ("decode", "prefill", "mixed")


class _Steps(msgspec.Struct):
    per_second: float = 0.0


class _Figures(msgspec.Struct):
    steps: dict[str, _Steps] = msgspec.field(default_factory=dict)
    window_s: float = 0.0


class _Replica(msgspec.Struct):
    figures: _Figures | None = None


class _Live(msgspec.Struct):
    replicas: list[_Replica]


class MixPoint(msgspec.Struct, frozen=True):
    """Steps a second of all replicas, by kind, at some moment."""

    at: float
    """Seconds after the load began."""
    decode: float
    """Share of steps with decode rows alone."""
    prefill: float
    """Share of steps with prompts alone."""
    mixed: float
    """Share of steps with both."""


@asynccontextmanager
async def watched(url: str, api_key: str | None, points: list[MixPoint]) -> AsyncIterator[None]:
    """Ask the endpoint once in `PERIOD_S` within this context, and add its answers to `points`."""
    asking = asyncio.create_task(_ask(url, api_key, points))
    try:
        yield
    finally:
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def _ask(url: str, api_key: str | None, points: list[MixPoint]) -> None:
    """Ask the endpoint until the first answer that is no report."""
    client = SseClient(Target(url.rstrip("/").removesuffix("/v1")))
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    begin = time.perf_counter()
    try:
        while True:
            async with asyncio.timeout(LIMIT_S):
                status, answer = await client.send(PATH, b"", headers, lambda data, now: None)
            if status != 200:
                return
            points += read(answer, time.perf_counter() - begin)
            await asyncio.sleep(PERIOD_S)
    except (OSError, ConnectionLost, msgspec.DecodeError):
        return
    finally:
        client.close()


def read(answer: bytes, at: float) -> Iterator[MixPoint]:
    """The point that an answer has, where its replicas have been looked at before. DecodeError if it is none."""
    live = msgspec.json.decode(answer, type=_Live)
    known = [replica.figures for replica in live.replicas if replica.figures is not None and replica.figures.window_s]
    if known:
        rates = [sum(figures.steps.get(kind, _Steps()).per_second for figures in known) for kind in KINDS]
        yield MixPoint(at, *rates)
