"""A client of a few lines that notes when everything happened."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx


@dataclass
class Stream:
    """One streamed completion as seen from outside."""

    events: list[dict] = field(default_factory=list)
    done: bool = False
    """The closing [DONE] came."""
    broken: str = ""
    """The connection's error, if it broke."""
    replica: str = ""
    """Name of the replica that gives it, by the answer's header."""
    ended: float = 0.0

    @property
    def begun(self) -> bool:
        """Whether more than its first event came."""
        return len(self.events) > 1

    @property
    def error(self) -> str:
        """Text of the error event the stream ended with."""
        return self.events[-1]["error"]["message"] if self.events and "error" in self.events[-1] else ""

    @property
    def text(self) -> str:
        return "".join(event["choices"][0]["text"] for event in self.events if event.get("choices"))


def client(timeout_s: float = 60.0) -> httpx.AsyncClient:
    # Connections are kept for as long as the server keeps them, as load balancers do; httpx by itself does for 5 s.
    limits = httpx.Limits(max_connections=256, max_keepalive_connections=256, keepalive_expiry=None)
    # Without `verify=False` every client reads the certificates of the machine, which takes long.
    return httpx.AsyncClient(timeout=timeout_s, trust_env=False, limits=limits, verify=False)


def how_far(answered: list[Stream], asked: list[Stream]) -> str:
    """What a failure says of streams: how those `answered` ended, and where the others of those `asked` stand."""
    ended = Counter((each.replica, each.error or each.broken) for each in answered)
    open_ones = [(each.replica, len(each.events)) for each in asked if not each.ended]
    return f"answers by replica and error: {dict(ended)}; replica and events of those to come: {open_ones}"


async def stream(http: httpx.AsyncClient, url: str, result: Stream | None = None, **body: object) -> Stream:
    """`result`: filled while it runs."""
    result = Stream() if result is None else result
    body = {"model": "demo", "prompt": "def f(x):", "stream": True, "temperature": 0, **body}
    try:
        async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
            result.replica = response.headers.get("x-latentserve-replica", "")
            told = ""
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    result.done = True
                elif line.startswith("data: "):
                    result.events.append(json.loads(line[6:]))
                else:
                    told += line
            if response.status_code != 200:
                result.broken = f"status {response.status_code}: {told}"
    except httpx.HTTPError as error:
        result.broken = f"{type(error).__name__}: {error}"
    result.ended = time.monotonic()
    return result


async def begin(http: httpx.AsyncClient, url: str, count: int, **body: object) -> list[asyncio.Task[Stream]]:
    """Streams that have begun."""
    results = [Stream() for _ in range(count)]
    tasks = [asyncio.create_task(stream(http, url, result, **body)) for result in results]

    async def all_begun() -> bool:
        return all(result.begun or result.broken for result in results)

    await until(all_begun, 60.0)
    assert not any(task.done() for task in tasks), results
    return tasks


async def until(condition, timeout_s: float, period_s: float = 0.05, seen: Callable[[], str] = str):
    """The first true answer of `condition`, an async function. `seen` says what there was instead, if none comes."""
    deadline = time.monotonic() + timeout_s
    while not (answer := await condition()):
        assert time.monotonic() < deadline, f"not in time; {seen()}"
        await asyncio.sleep(period_s)
    return answer
