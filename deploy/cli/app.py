"""The commands of `latentserve`, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from deploy.cli.bench_compare import EPILOG as COMPARE_EPILOG
from deploy.cli.bench_compare import compare
from deploy.cli.bench_http import EPILOG as HTTP_EPILOG
from deploy.cli.bench_http import http
from deploy.cli.bench_latency import EPILOG as LATENCY_EPILOG
from deploy.cli.bench_latency import latency
from deploy.cli.fit import EPILOG as FIT_EPILOG
from deploy.cli.fit import fit
from deploy.cli.generate import EPILOG as GENERATE_EPILOG
from deploy.cli.generate import generate
from deploy.cli.replay import EPILOG as REPLAY_EPILOG
from deploy.cli.replay import replay
from deploy.cli.selftest import EPILOG as SELFTEST_EPILOG
from deploy.cli.selftest import selftest
from deploy.cli.serve import EPILOG as SERVE_EPILOG
from deploy.cli.serve import serve
from deploy.cli.weights import EPILOG as DROP_EPILOG
from deploy.cli.weights import drop

app = typer.Typer(
    name="latentserve",
    help="Serve multi-head latent attention models: an OpenAI-compatible endpoint on Ray, and tools around it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    # A traceback that reaches the user is a defect; local values do not help whoever reads the report.
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(
    help="Measure: `latency` of an engine on this machine, `http` of a running endpoint, `compare` two of them.",
    no_args_is_help=True,
)
app.add_typer(bench, name="bench")
weights = typer.Typer(help="Weights kept for restarts: `drop` lets those on this machine go.", no_args_is_help=True)
app.add_typer(weights, name="weights")


def _version(wanted: bool) -> None:
    if wanted:
        import kernels

        typer.echo(f"latentserve {kernels.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Serve multi-head latent attention models: an OpenAI-compatible endpoint on Ray, and tools around it."""


app.command(epilog=SERVE_EPILOG)(serve)
app.command(epilog=GENERATE_EPILOG)(generate)
app.command(epilog=FIT_EPILOG)(fit)
app.command(epilog=SELFTEST_EPILOG)(selftest)
app.command(epilog=REPLAY_EPILOG)(replay)
bench.command(epilog=LATENCY_EPILOG)(latency)
bench.command(epilog=HTTP_EPILOG)(http)
bench.command(epilog=COMPARE_EPILOG)(compare)
weights.command(epilog=DROP_EPILOG)(drop)
