"""`latentserve bench http`: latency and throughput of a running OpenAI-compatible endpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import bench_load, options
from deploy.cli.console import reported
from deploy.mistakes import CommandFailure

if TYPE_CHECKING:
    from deploy.loadtest.load_spec import LoadSpec

EPILOG = options.examples(
    "latentserve bench http --url http://127.0.0.1:8000 --concurrency 64 --requests 256",
    "latentserve bench http --url http://127.0.0.1:8000 --model demo --rate 20 --requests 500 --json",
    "latentserve bench http --trace sharegpt.json --rate 4 --slo-ttft 500 --slo-gap 100 --html load.html",
)


@options.takes(bench_load.SETTINGS)
def http(
    url: Annotated[str, typer.Option("--url", help="Of the endpoint.")] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", help="Name of the served model.", show_default="the one that is served")
    ] = None,
    *,
    given: options.Given,
    page: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with plots there.", show_default=False),
    ] = None,
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
        bench_load.check_address(url, "--url")
        bench_load.check_page(page)
        load = bench_load.load_of(given)
        spec = bench_load.spec_of(load, url, model, api_key)
        _run(spec, page, json_output, quiet)


def _run(spec: LoadSpec, page: Path | None, json_output: bool, quiet: bool) -> None:
    import json

    from deploy.loadtest.load_report import Limits, LoadReport

    run = bench_load.run(spec, quiet, watch=page is not None)
    report = LoadReport.of(run, Limits.of(spec))
    if json_output:
        typer.echo(json.dumps(report.report(spec)))
    elif report.finished:
        from rich.console import Console

        report.show(Console(), spec)
    bench_load.check_finished(report, spec.url)
    if page is not None:
        from deploy.loadtest.load_page import load_page

        try:
            page.write_text(load_page(spec, run, report), encoding="utf-8")
        except OSError as error:
            raise CommandFailure(f"the page cannot be written: {error}") from None
