"""Distances for a reader of the code: frames, files and functions between the beginning of something and the place
where it happens.

    python bench/hops.py [--model assets/demo] [--list]

Three trips are traced on a CPU, with `sys.setprofile` (`threading.setprofile` where threads run), and only calls into
`deploy`, `workers` and `kernels` count:

- product: from a rank's step loop, `Runner.launch` of a decode step, to the first matrix product: the frames that are
  open there, and the files that they are of.
- layer: one layer of that step, from where attention reads the cache to where that of the next layer does.
- chat: one streamed chat in a front, a scheduler and a rank, three threads of one process, from the arrival of the
  request to its first token.

`--list` prints every file of a trip in the order in which it is entered.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from deploy.api.app import create_app
from deploy.text.tokenizer import Tokenizer
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.processes.client import EngineClient
from workers.processes.scheduler_process import SchedulerProcess, scheduler_config
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.rank.rank import Rank
from workers.rank.worker_process import run_worker
from workers.scheduler import Scheduler

ROOT = Path(__file__).resolve().parents[1]
PRODUCTS = ("mm", "bmm", "matmul", "linear", "addmm", "einsum", "baddbmm")
"""torch's functions that multiply matrices."""
Call = tuple[str, str]
"""A file, by its path in the repository, and a function of it."""


def place(frame: FrameType) -> Call | None:
    """Return what a frame runs, if it is ours; comprehensions belong to their function."""
    name, function = frame.f_code.co_filename, frame.f_code.co_qualname
    if function.endswith(("comp>", "<genexpr>")) or not name.startswith(f"{ROOT}/"):
        return None
    file = name[len(f"{ROOT}/") :]
    return (file, function) if file.split("/")[0] in ("deploy", "workers", "kernels") else None


class Trip:
    """Calls in their order, those of all threads, and the frames that are open when the first product begins."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.product: list[Call] = []

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """A profile function."""
        if event == "call" and (call := place(frame)):
            self.calls.append(call)
        elif event == "c_call" and not self.product and getattr(argument, "__name__", "") in PRODUCTS:
            open_frames: list[FrameType] = []
            at: FrameType | None = frame
            while at is not None:
                open_frames.append(at)
                at = at.f_back
            calls = [call for each in reversed(open_frames) if (call := place(each))]
            begin = next((i for i, (_, name) in enumerate(calls) if name == "Runner.launch"), 0)
            self.product = calls[begin:]

    @contextmanager
    def here(self) -> Iterator[None]:
        """Note the calls of this thread within this context."""
        sys.setprofile(self.note)
        try:
            yield
        finally:
            sys.setprofile(None)


def decode_step(model: str) -> Trip:
    """The trip of a decode step of one row."""
    config = EngineConfig(model=model, device="cpu", width=2, max_rows=2, cache_pages=20, selftest=False)
    replica = Rank(config, Group(), torch.device("cpu"))
    scheduler = Scheduler(scheduler_config(config, replica.ready))
    assert scheduler.add(Request("one", (1, 2, 3), SamplingParams(20, temperature=0.0))) is None
    for _ in range(4):  # the prompt, and what happens once
        plan = scheduler.plan()
        assert plan is not None
        scheduler.apply(replica.runner.execute(plan))
    plan, trip = scheduler.plan(), Trip()
    assert plan is not None
    assert plan.decode_slots
    assert not plan.prefill
    with trip.here():
        launched = replica.runner.launch(plan)
    replica.runner.collect(launched)
    return trip


def one_layer(calls: list[Call]) -> list[Call]:
    """The calls from where attention of the second layer reads the cache to where that of the third does."""
    marks = [i for i, call in enumerate(calls) if call == ("kernels/mla_decode/__init__.py", "mla_decode")]
    if len(marks) < 3:
        raise SystemExit("the model needs three layers or more, with dense attention")
    return calls[marks[1] : marks[2]]


async def chat(model: str) -> tuple[Trip, Trip]:
    """The trip of a streamed chat: up to its first token, and to its end."""
    config = EngineConfig(model=model, device="cpu", width=2, max_rows=2, cache_pages=20, selftest=False)
    trip, first = Trip(), Trip()
    waiting = threading.Event()

    def noting(frame: FrameType, event: str, argument: Any) -> None:
        if waiting.is_set():
            trip.note(frame, event, argument)

    threading.setprofile(noting)
    process = SchedulerProcess(config)
    threads = [
        threading.Thread(target=process.run, name="scheduler"),
        threading.Thread(target=run_worker, args=(config, 0, process.addresses, ""), name="rank"),
    ]
    for thread in threads:
        thread.start()
    threading.setprofile(None)  # type: ignore[arg-type]
    client = EngineClient(config, process.addresses, "demo")
    await client.ready(600)
    app = create_app(client, Tokenizer.load(model))
    body = {"model": "demo", "messages": [{"role": "user", "content": "def f"}], "max_tokens": 4, "stream": True}

    async def ask(on_first: Callable[[], None]) -> None:
        """Ask without a socket: the application is called as a server would."""
        raw = json.dumps(body).encode()
        scope = {
            "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
            "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"x")],
            "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2),
        }  # fmt: skip
        sent, ended = iter([{"type": "http.request", "body": raw, "more_body": False}]), asyncio.Event()

        async def receive() -> dict[str, Any]:
            if (message := next(sent, None)) is not None:
                return message
            await ended.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            text = message.get("body", b"")
            if message["type"] == "http.response.start" and message["status"] != 200:
                raise SystemExit(f"the front answers {message['status']}")
            if b'"content":"' in text and b'"content":""' not in text:
                on_first()

        await app(scope, receive, send)
        ended.set()

    await ask(lambda: None)  # what happens once
    waiting.set()
    with trip.here():
        await ask(lambda: first.calls.extend(trip.calls) if not first.calls else None)
    waiting.clear()
    await client.close()
    for thread in threads:
        thread.join(60)
    return first, trip


def row(name: str, calls: list[Call]) -> str:
    """A line of the table."""
    return f"{name:<34}{len(calls):>8}{len(set(calls)):>11}{len({file for file, _ in calls}):>7}"


def main() -> None:
    """Trace, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "assets" / "demo"), help="a folder; default: the demo model")
    parser.add_argument("--list", action="store_true", help="print every file, in the order in which it is entered")
    options = parser.parse_args()
    torch.set_num_threads(1)
    step = decode_step(options.model)
    first, whole = asyncio.run(chat(options.model))
    trips = {
        "frames to the first product": step.product,
        "one layer of a decode step": one_layer(step.calls),
        "a decode step": step.calls,
        "a streamed chat to its first token": first.calls,
        "a streamed chat": whole.calls,
    }
    print(f"{'trip':<34}{'calls':>8}{'functions':>11}{'files':>7}")
    for name, calls in trips.items():
        print(row(name, calls))
    if options.list:
        for name, calls in trips.items():
            print(f"\n{name}:")
            if calls is step.product:
                print("\n".join(f"  {file}: {function}" for file, function in calls))
                continue
            for file in dict.fromkeys(file for file, _ in calls):
                print(f"  {file}: {', '.join(dict.fromkeys(name for own, name in calls if own == file))}")


if __name__ == "__main__":
    main()
