"""`latentserve bench http`: latency and throughput of a running OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import load_options, options
from deploy.cli.console import reported
from deploy.mistakes import CommandFailure

if TYPE_CHECKING:
    from deploy.loadtest.load import LoadSpec
    from deploy.loadtest.load_report import Limits

EPILOG = options.examples(
    "latentserve bench http --url http://127.0.0.1:8000 --concurrency 64 --requests 256",
    "latentserve bench http --url http://127.0.0.1:8000 --model demo --rate 20 --requests 500 --json",
    "latentserve bench http --trace sharegpt.json --rate 4 --slo-ttft 500 --slo-gap 100 --html load.html",
)


def http(
    url: Annotated[str, typer.Option("--url", help="Of the endpoint.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the served model.", show_default="the one that is served")
    ] = None,
    rate: load_options.Rate = None,
    concurrency: load_options.Concurrency = None,
    requests: load_options.Requests = None,
    input_tokens: load_options.Input = 256,
    output: load_options.Output = 128,
    trace: load_options.Trace = None,
    chat: load_options.Chat = False,
    text: load_options.Text = False,
    vocab: load_options.Vocab = 1000,
    temperature: load_options.Temperature = 0.0,
    stop_at_eos: load_options.StopAtEos = False,
    token_ids: load_options.TokenIds = False,
    seed: load_options.Seed = 0,
    warmup: load_options.Warmup = 1,
    timeout: load_options.Timeout = 600.0,
    slo_ttft: load_options.MostTtft = None,
    slo_gap: load_options.MostGap = None,
    page: load_options.Page = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="Sent as bearer token.", show_default=False)
    ] = None,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure a running OpenAI-compatible endpoint with streamed requests.

    Prints time to first token, time per output token and inter-token latency percentiles, throughput, goodput where
    --slo-ttft or --slo-gap say what is good, and errors by kind. Exit code 1 when no request finished.
    """
    with reported():
        load_options.check_address(url, "--url")
        load_options.check_page(page)
        what = load_options.sent(
            rate, concurrency, requests, input_tokens, output, trace, chat, text, vocab, temperature, stop_at_eos,
            token_ids, seed, warmup, timeout,
        )  # fmt: skip
        spec = load_options.spec(url, model, api_key, what)
        _run(spec, load_options.limits_of(slo_ttft, slo_gap), page, json_output, quiet)


def _run(spec: LoadSpec, limits: Limits | None, page: Path | None, json_output: bool, quiet: bool) -> None:
    import json

    from deploy.loadtest.load_report import LoadReport

    run = load_options.load(spec, quiet, watch=page is not None)
    report = LoadReport.of(run, limits)
    if json_output:
        typer.echo(json.dumps(report.report(spec)))
    elif report.finished:
        from rich.console import Console

        report.show(Console(), spec)
    load_options.check_finished(report, spec.url)
    if page is not None:
        from deploy.loadtest.load_page import load_page

        try:
            page.write_text(load_page(spec, run, report), encoding="utf-8")
        except OSError as error:
            raise CommandFailure(f"the page cannot be written: {error}") from None
