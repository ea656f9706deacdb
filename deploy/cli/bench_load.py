"""The common part of `bench http` and `bench compare`: the options of a load, and running it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from deploy.cli.options import Given
from deploy.config.settings import settings_of
from deploy.loadtest.load_spec import Load, LoadSpec
from deploy.mistakes import CommandFailure, UsageMistake, explain

if TYPE_CHECKING:
    from deploy.loadtest.load import LoadRun
    from deploy.loadtest.load_report import LoadReport

SETTINGS = [setting for setting in settings_of(Load) if setting.flag]
"""The options of a load."""


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


def load_of(given: Given) -> Load:
    """The load that the options say. UsageMistake for a wrong one, and for a trace that cannot be read."""
    from deploy.loadtest.sessions import TraceError, read_trace

    flags = {setting.name: setting.option for setting in SETTINGS}
    try:
        load = Load(**given)
    except ValidationError as error:
        raise UsageMistake(explain(error, lambda name: flags.get(name, name))) from None
    if load.trace is None:
        return load
    try:
        return load.model_copy(update={"sessions": tuple(read_trace(load.trace, load.requests))})
    except (OSError, TraceError) as error:
        raise UsageMistake(f"--trace: {error}") from None


def spec_of(load: Load, url: str, model: str | None, api_key: str | None) -> LoadSpec:
    """The load for an endpoint, which without a model is asked for the one that it serves."""
    import asyncio

    from deploy.loadtest.served_model import served_model

    return load.at(url, model or asyncio.run(served_model(url, api_key, load.timeout_s)), api_key)


def run(spec: LoadSpec, quiet: bool, name: str = "requests", *, watch: bool = False) -> LoadRun:
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
