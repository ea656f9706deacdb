"""`latentserve weights`: weights that stay on this machine for ranks that are started again."""

from __future__ import annotations

import typer

from deploy.cli import options

EPILOG = options.examples("latentserve weights drop")


def drop() -> None:
    """Let go the weights that replicas on this machine keep for their ranks' restarts.

    Ranks that run serve on, and have their memory until they end. What they load after that is kept again.
    """
    from workers.memory.keeper import drop_all

    found = [size for kept in drop_all().values() for size in kept.values()]
    if not found:
        typer.echo("no weights of yours are kept on this machine")
        return
    typer.echo(f"let {sum(found) / 2**30:.2f} GiB go: {len(found)} times the weights of a rank or of its draft model")
