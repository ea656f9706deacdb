"""Name of the model that an endpoint serves, as the endpoint reports it."""

from __future__ import annotations

import asyncio
import json

from deploy.loadtest.sse_client import ConnectionLost, SseClient, Target
from deploy.mistakes import CommandFailure, UsageMistake

PATH = "/v1/models"
LIMIT_S = 30.0
"""Seconds to wait for that, whatever a request may take."""


async def served_model(url: str, api_key: str | None, timeout_s: float) -> str:
    """The name of the only model that is served at `url`. UsageMistake that names them where there are several,
    CommandFailure where there is none or nobody says so within `timeout_s`."""
    asked, why = f"{url.rstrip('/').removesuffix('/v1')}{PATH}", "which was asked what it serves"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    client = SseClient(Target(url))
    try:
        async with asyncio.timeout(min(timeout_s, LIMIT_S)):
            status, answer = await client.send(PATH, b"", headers, lambda data, now: None)
    except (OSError, ConnectionLost) as error:  # a TimeoutError is an OSError, without a text
        raise CommandFailure(
            f"no request finished: cannot connect to {asked}, {why} ({str(error) or 'no answer in time'}); start the "
            "server, or say where it is with --url"
        ) from None
    finally:
        client.close()
    if status in (401, 403):
        raise UsageMistake(f"{asked}, {why}, answers HTTP {status}: give its key with --api-key")
    names = _names(answer) if status == 200 else None
    if names is None:
        raise CommandFailure(f"{asked}, {why}, does not say (HTTP {status}): give --model")
    if not names:
        raise CommandFailure(f"{asked} says that no model is served")
    if len(names) > 1:
        raise UsageMistake(f"{url} serves several models: give --model, one of {', '.join(names)}")
    return names[0]


def _names(answer: bytes) -> list[str] | None:
    """Return the names in a list of models; None if the answer is no such list."""
    try:
        return [str(model["id"]) for model in json.loads(answer)["data"]]
    except (ValueError, KeyError, TypeError):
        return None
