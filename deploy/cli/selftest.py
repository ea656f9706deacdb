"""`latentserve selftest`: prove every step of an engine on this machine, and say what was found."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from deploy.cli import options
from deploy.cli.console import FAILURE, check_interrupt, reported, result_stream
from deploy.cli.serve import SETTINGS, serve_config, takes
from deploy.mistakes import CommandFailure, UsageMistake

if TYPE_CHECKING:
    from rich.console import Console

    from workers.config import EngineConfig
    from workers.protocol.report import SelfTestReport

EPILOG = options.examples(
    "latentserve selftest --model demo",
    "latentserve selftest --model ./DeepSeek-V2.5 --tensor-parallel 8 --json",
    "latentserve selftest --config serve.yaml",
)


_SETTINGS = {f"engine.{setting.name}" for setting in options.engine("max_rows", "token_budget")}


@takes(setting for setting in SETTINGS if setting.name in _SETTINGS)
def selftest(
    given: options.Given,
    config: options.SettingsFile = None,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Prove every step of an engine: build what `serve` would build with the same settings, without Ray, and test it.

    Exit code 0 means that every bucket passed, 1 that one failed or the engine did not start.
    """
    import asyncio

    from workers.environment import visible_gpus
    from workers.fit.settings import Unfit, check_fit

    with reported():
        settings = serve_config(config, given)
        engine = settings.engine.model_copy(update={"selftest": True, "selftest_buckets": "all"})
        try:
            check_fit(engine, gpus=visible_gpus())
        except Unfit as error:
            raise UsageMistake(str(error)) from None
        check_interrupt()
        asyncio.run(_selftest(engine, json_output, quiet))


async def _selftest(config: EngineConfig, json_output: bool, quiet: bool) -> None:
    import json

    from deploy.cli.local import engine_of

    reports: list[SelfTestReport] = []
    with result_stream() as stdout:
        try:
            async with engine_of(config, quiet, reports.append):
                pass
        except CommandFailure:
            if not reports or reports[0].passed:
                raise  # for another reason
        [report] = reports
        if json_output:
            json.dump({"model": config.model, **report.to_json()}, stdout)
            stdout.write("\n")
        else:
            from rich.console import Console

            show(report, config.model, Console(file=stdout, highlight=False))
    if not report.passed:
        raise typer.Exit(FAILURE)


def show(report: SelfTestReport, model: str, console: Console) -> None:
    """The report for people: a row per bucket, a line per problem."""
    from rich import box
    from rich.table import Table

    ranks = f"{report.ranks} rank{'s' if report.ranks > 1 else ''}"
    table = Table(title=f"self-test of {model}, {ranks}, {report.device}", title_justify="left", box=box.SIMPLE)
    table.add_column("step", no_wrap=True, min_width=6)
    for name in ("rows x width", "drafts", "live rows", "accepted", "logits error", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for bucket in report.buckets:
        table.add_row(
            bucket.kind,
            bucket.bucket,
            *("-" if value is None else str(value) for value in (bucket.drafts, bucket.rows, bucket.accepted)),
            "-" if bucket.logits_error is None else f"{bucket.logits_error:.1e}",
            f"{bucket.seconds:.3f}",
            "passed" if bucket.passed else "[bold red]FAILED[/]",
        )
    console.print(table)
    for bucket in report.failed:
        for problem in bucket.problems:
            console.print(f"{bucket}: {problem}", markup=False, soft_wrap=True)
    if report.graphs:
        size = report.graph_bytes / 2**20
        console.print(f"{report.graphs} graphs: {size:,.0f} MiB, captured in {report.capture_seconds:.1f} s")
    console.print(report.summary(), markup=False, soft_wrap=True)
