"""What `bench http` and `bench compare` have in common: the options of a load, and how it is run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.mistakes import CommandFailure, UsageMistake

if TYPE_CHECKING:
    from deploy.loadtest.load import LoadRun, LoadSpec
    from deploy.loadtest.load_report import Limits, LoadReport

Rate = Annotated[
    float | None, typer.Option("--rate", help="Requests (or sessions) a second, Poisson arrivals.", show_default=False)
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", min=1, help="Requests (or sessions) in flight at all times.", show_default="1"),
]
Requests = Annotated[
    int | None,
    typer.Option(
        "--requests", min=1, help="Requests to send; of a trace, sessions.", show_default="100; all of a trace"
    ),
]
Input = Annotated[int, typer.Option("--input", min=1, help="Prompt tokens of every request.")]
Output = Annotated[int, typer.Option("--output", min=1, help="Tokens to generate for every request.")]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Send the sessions of this file (JSON lines or ShareGPT's JSON) in place of random prompts.",
        show_default=False,
    ),
]
Chat = Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; prompts are words.")]
Text = Annotated[bool, typer.Option("--text", help="Send words, for an endpoint that takes no token ids.")]
Vocab = Annotated[int, typer.Option("--vocab", min=2, help="Token ids of prompts are drawn below this.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")]
StopAtEos = Annotated[
    bool, typer.Option("--stop-at-eos", help="Let end-of-sequence tokens end a request (ignore_eos is not sent).")
]
TokenIds = Annotated[
    bool,
    typer.Option(
        "--token-ids",
        help="Ask for the tokens' ids (return_token_ids), so that those without a text of their own are seen, too.",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Requests before the clock starts.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.001, help="Seconds until a request is given up.")]
MostTtft = Annotated[
    float | None,
    typer.Option("--slo-ttft", min=0.0, help="Goodput: most ms until a request's first token.", show_default=False),
]
MostGap = Annotated[
    float | None,
    typer.Option("--slo-gap", min=0.0, help="Goodput: most ms between events of a stream.", show_default=False),
]
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write a page with plots there.", show_default=False),
]


def _check_pace(rate: float | None, concurrency: int | None) -> None:
    if rate is not None and concurrency is not None:
        raise UsageMistake("give --rate (open loop) or --concurrency (closed loop), not both")
    if rate is not None and not rate > 0:
        raise UsageMistake(f"--rate must be positive, not {rate}")


def check_address(url: str, option: str) -> None:
    """UsageMistake for what is no address."""
    from deploy.loadtest.sse_client import Target

    try:
        Target(url)
    except ValueError as error:
        raise UsageMistake(f"{option}: {error}") from None


def check_page(page: Path | None) -> None:
    """UsageMistake where a page could not be written when the run is over."""
    try:
        possible = page is None or (not page.is_dir() and page.absolute().parent.is_dir())
    except OSError as error:
        raise UsageMistake(f"--html: {error}") from None
    if not possible:
        raise UsageMistake(f"--html: {page} is no file in a folder that exists")


def limits_of(ttft_ms: float | None, gap_ms: float | None) -> Limits | None:
    """None without any."""
    from deploy.loadtest.load_report import Limits

    return None if ttft_ms is None and gap_ms is None else Limits(ttft_ms, gap_ms)


def sent(
    rate: float | None,
    concurrency: int | None,
    requests: int | None,
    input_tokens: int,
    output: int,
    trace: Path | None,
    chat: bool,
    text: bool,
    vocab: int,
    temperature: float,
    stop_at_eos: bool,
    token_ids: bool,
    seed: int,
    warmup: int,
    timeout: float,
) -> dict[str, Any]:
    """The fields of a `LoadSpec` that the options above, in their order, decide, whatever the endpoint. UsageMistake
    for a pace that is none, and for a trace that cannot be read."""
    _check_pace(rate, concurrency)
    return {
        "input": input_tokens,
        "output": output,
        "text": text,
        "vocab": vocab,
        "temperature": temperature,
        "ignore_eos": not stop_at_eos,
        "token_ids": token_ids,
        "seed": seed,
        "warmup": warmup,
        "timeout_s": timeout,
        **_requests(requests, trace, rate, concurrency, chat),
    }


def spec(url: str, model: str | None, api_key: str | None, what: dict[str, Any]) -> LoadSpec:
    """What is sent to an endpoint: `what` is of `sent`. Without a model it is asked for the one that it serves."""
    import asyncio

    from deploy.loadtest.load import LoadSpec
    from deploy.loadtest.served_model import served_model

    named = model or asyncio.run(served_model(url, api_key, what["timeout_s"]))
    return LoadSpec(url=url, model=named, api_key=api_key, **what)


def _requests(
    requests: int | None, trace: Path | None, rate: float | None, concurrency: int | None, chat: bool
) -> dict[str, Any]:
    """The fields that a trace decides."""
    pace = {"rate": rate, "concurrency": concurrency or 1}
    if trace is None:
        return {"requests": requests or 100, "api": "chat" if chat else "completions", **pace}
    from deploy.loadtest.sessions import TraceError, read_trace

    try:
        sessions = read_trace(trace, requests)
    except OSError as error:
        raise UsageMistake(f"--trace: {error}") from None
    except TraceError as error:
        raise UsageMistake(f"--trace: {error}") from None
    return {"requests": sum(map(len, sessions)), "sessions": tuple(sessions), "api": "chat", **pace}


def load(spec: LoadSpec, quiet: bool, name: str = "requests", *, watch: bool = False) -> LoadRun:
    """Run it, with a bar on stderr. `watch`: as `run_load`."""
    import gc

    import uvloop
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from deploy.loadtest.load import run_load

    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    # A pause of the collector in the client would be taken for one of the endpoint.
    gc.disable()
    try:
        # Two refreshes a second: drawing is work in the process that takes the times.
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=hidden,
            refresh_per_second=2,
        ) as progress:
            bar = progress.add_task(name, total=spec.total)
            return uvloop.run(run_load(spec, lambda record: progress.advance(bar), watch=watch))
    finally:
        gc.enable()
        sys.stderr.flush()


def check_finished(report: LoadReport, url: str) -> None:
    """CommandFailure where no request finished."""
    if not report.finished:
        kinds = "; ".join(f"{count} x {kind}: {report.details.get(kind, '')}" for kind, count in report.errors.items())
        raise CommandFailure(f"no request finished: {url} did not answer as it should ({kinds})")
