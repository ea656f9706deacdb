"""`latentserve bench http`: latency and throughput of a running OpenAI-compatible endpoint."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import options
from deploy.cli.console import CommandFailure, UsageMistake, reported

if TYPE_CHECKING:
    from deploy.cli.load import LoadRun, LoadSpec

EPILOG = options.examples(
    "latentserve bench http --url http://127.0.0.1:8000 --concurrency 64 --requests 256",
    "latentserve bench http --url http://127.0.0.1:8000 --model demo --rate 20 --requests 500 --json",
)


def http(
    url: Annotated[str, typer.Option("--url", help="Of the endpoint.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the served model.", show_default="the one that is served")
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="Requests a second, Poisson arrivals.", show_default=False)
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option("--concurrency", min=1, help="Requests in flight at all times.", show_default="1")
    ] = None,
    requests: Annotated[int, typer.Option("--requests", min=1, help="Requests to send.")] = 100,
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens of every request.")] = 256,
    output: Annotated[int, typer.Option("--output", min=1, help="Tokens to generate for every request.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Use /v1/chat/completions; prompts are words.")] = False,
    text: Annotated[bool, typer.Option("--text", help="Send words, for an endpoint that takes no token ids.")] = False,
    vocab: Annotated[int, typer.Option("--vocab", min=2, help="Token ids of prompts are drawn below this.")] = 1000,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 is greedy.")] = 0.0,
    stop_at_eos: Annotated[
        bool, typer.Option("--stop-at-eos", help="Let end-of-sequence tokens end a request (ignore_eos is not sent).")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of prompts and arrivals.")] = 0,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Requests before the clock starts.")] = 1,
    timeout: Annotated[
        float, typer.Option("--timeout", min=0.001, help="Seconds until a request is given up.")
    ] = 600.0,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.", show_default=False)
    ] = None,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a running OpenAI-compatible endpoint with streamed requests.

    Prints time to first token, time per output token and inter-token latency percentiles, throughput, and errors by
    kind. Exit code 1 when no request finished.
    """
    import asyncio

    from deploy.cli.load import LoadSpec
    from deploy.cli.served_model import served_model
    from deploy.cli.sse_client import Target

    with reported():
        if rate is not None and concurrency is not None:
            raise UsageMistake("give --rate (open loop) or --concurrency (closed loop), not both")
        if rate is not None and not rate > 0:
            raise UsageMistake(f"--rate must be positive, not {rate}")
        try:
            Target(url)
        except ValueError as error:
            raise UsageMistake(f"--url: {error}") from None
        _run(
            LoadSpec(
                url=url,
                model=model or asyncio.run(served_model(url, api_key, timeout)),
                requests=requests,
                input=input_tokens,
                output=output,
                rate=rate,
                concurrency=concurrency or 1,
                api="chat" if chat else "completions",
                text=text,
                vocab=vocab,
                temperature=temperature,
                ignore_eos=not stop_at_eos,
                seed=seed,
                timeout_s=timeout,
                api_key=api_key,
                warmup=warmup,
            ),
            json_output,
            quiet,
        )


def _run(spec: LoadSpec, json_output: bool, quiet: bool) -> None:
    import json

    from deploy.cli.load_report import LoadReport

    report = LoadReport.of(_load(spec, quiet))
    if json_output:
        typer.echo(json.dumps(report.report(spec)))
    elif report.finished:
        from rich.console import Console

        report.show(Console(), spec)
    if not report.finished:
        kinds = "; ".join(f"{count} x {kind}: {report.details.get(kind, '')}" for kind, count in report.errors.items())
        raise CommandFailure(f"no request finished: {spec.url} did not answer as it should ({kinds})")


def _load(spec: LoadSpec, quiet: bool) -> LoadRun:
    import gc

    import uvloop
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from deploy.cli.load import run_load

    console = Console(stderr=True)
    hidden = quiet or not console.is_terminal
    # A pause of the collector in the client would be taken for one of the endpoint.
    gc.disable()
    try:
        # Two refreshes a second: drawing is work in the process that takes the times.
        with Progress(
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=hidden,
            refresh_per_second=2,
        ) as progress:
            bar = progress.add_task("requests", total=spec.requests)
            return uvloop.run(run_load(spec, lambda record: progress.advance(bar)))
    finally:
        gc.enable()
        sys.stderr.flush()
