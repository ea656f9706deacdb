"""`latentserve bench compare`: one load against two OpenAI-compatible endpoints, and the ratios of what they show."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import load_options, options
from deploy.cli.console import reported
from deploy.mistakes import UsageMistake

if TYPE_CHECKING:
    from deploy.loadtest.load import LoadSpec
    from deploy.loadtest.load_report import Limits

EPILOG = options.examples(
    "latentserve bench compare http://127.0.0.1:8000 http://127.0.0.1:9000 --concurrency 16 --requests 64",
    "latentserve bench compare http://one:8000 http://other:8000 --trace sharegpt.json --rate 4 --rounds 4 --json",
)


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
        what = load_options.sent(
            rate, concurrency, requests, input_tokens, output, trace, chat, text, vocab, temperature, stop_at_eos,
            token_ids, seed, warmup, timeout,
        )  # fmt: skip
        models = _of_each("--model", model)
        given_key = os.environ.get("OPENAI_API_KEY") or None
        keys = _of_each("--api-key", api_key or ([given_key] if given_key else None))
        for url, name in ((first, "URL1"), (second, "URL2")):
            load_options.check_address(url, name)
        specs = [
            load_options.spec(url, own, key, what) for url, own, key in zip((first, second), models, keys, strict=True)
        ]
        _run(specs, rounds, load_options.limits_of(slo_ttft, slo_gap), json_output, quiet)


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


def _run(specs: list[LoadSpec], rounds: int, limits: Limits | None, json_output: bool, quiet: bool) -> None:
    import json
    from dataclasses import replace

    from deploy.loadtest.load import LoadRun
    from deploy.loadtest.load_ratios import ratios, show_ratios
    from deploy.loadtest.load_report import LoadReport

    runs = [LoadRun([], 0.0), LoadRun([], 0.0)]
    for turn in range(rounds):
        for place in (0, 1) if turn % 2 == 0 else (1, 0):
            # Other prompts every round: a prefix cache would answer those of the round before.
            spec = replace(specs[place], seed=specs[place].seed + turn)
            runs[place] += load_options.load(spec, quiet, f"{spec.url}, {turn + 1} of {rounds}")
    reports = [LoadReport.of(run, limits) for run in runs]
    for spec, report in zip(specs, reports, strict=True):
        load_options.check_finished(report, spec.url)
    if json_output:
        one, other = (report.report(spec) for spec, report in zip(specs, reports, strict=True))
        typer.echo(json.dumps({"first": one, "second": other, "second_over_first": ratios(reports[0], reports[1])}))
    else:
        from rich.console import Console

        show_ratios(Console(), specs, reports)
