"""`latentserve bench compare`: one load against two OpenAI-compatible endpoints, and the ratios of what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import bench_load, options
from deploy.cli.console import reported
from deploy.mistakes import UsageMistake

if TYPE_CHECKING:
    from deploy.loadtest.load_spec import LoadSpec

EPILOG = options.examples(
    "latentserve bench compare http://127.0.0.1:8000 http://127.0.0.1:9000 --concurrency 16 --requests 64",
    "latentserve bench compare http://one:8000 http://other:8000 --trace sharegpt.json --rate 4 --rounds 4 --json",
)


@options.takes(bench_load.SETTINGS)
def compare(
    first: Annotated[str, typer.Argument(metavar="URL1", help="Of one endpoint.", show_default=False)],
    second: Annotated[str, typer.Argument(metavar="URL2", help="Of the other.", show_default=False)],
    model: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            help="Name of the served model; given twice, of either.",
            show_default="the one that each serves",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Times that each endpoint gets the load.")] = 2,
    *,
    given: options.Given,
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", help="Sent as bearer token; given twice, to either.", show_default="$OPENAI_API_KEY"),
    ] = None,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Give two endpoints the same load in turn, and print what they show side by side, with the ratios.

    They take turns (first, second, second, first, ...), never at once, so that two on one machine do not disturb each
    other and what drifts disturbs both alike. Exit code 1 when no request of one of them finished.
    """
    import os

    with reported():
        load = bench_load.load_of(given)
        models = _of_each("--model", model)
        given_key = os.environ.get("OPENAI_API_KEY") or None
        keys = _of_each("--api-key", api_key or ([given_key] if given_key else None))
        for url, name in ((first, "URL1"), (second, "URL2")):
            bench_load.check_address(url, name)
        specs = [
            bench_load.spec_of(load, url, own, key) for url, own, key in zip((first, second), models, keys, strict=True)
        ]
        _run(specs, rounds, json_output, quiet)


def _of_each(option: str, given: list[str] | None) -> list[str | None]:
    """The value of an option for either endpoint."""
    match given or []:
        case []:
            return [None, None]
        case [both]:
            return [both, both]
        case [one, other]:
            return [one, other]
        case _:
            raise UsageMistake(f"{option} was given {len(given or [])} times, for two endpoints")


def _run(specs: list[LoadSpec], rounds: int, json_output: bool, quiet: bool) -> None:
    import json

    from deploy.loadtest.load import LoadRun
    from deploy.loadtest.load_ratios import ratios, show_ratios
    from deploy.loadtest.load_report import Limits, LoadReport

    runs = [LoadRun([], 0.0), LoadRun([], 0.0)]
    for turn in range(rounds):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            # Other prompts every round: a prefix cache would answer those of the round before.
            spec = specs[place].model_copy(update={"seed": specs[place].seed + turn})
            runs[place] += bench_load.run(spec, quiet, f"{spec.url}, {turn + 1} of {rounds}")
    reports = [LoadReport.of(run, Limits.of(spec)) for spec, run in zip(specs, runs, strict=True)]
    for spec, report in zip(specs, reports, strict=True):
        bench_load.check_finished(report, spec.url)
    if json_output:
        one, other = (report.report(spec) for spec, report in zip(specs, reports, strict=True))
        typer.echo(json.dumps({"first": one, "second": other, "second_over_first": ratios(reports[0], reports[1])}))
    else:
        from rich.console import Console

        show_ratios(Console(), specs, reports)
