"""The command `latentserve`. Import-light: what a command needs is imported when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    from deploy.cli.app import app

    app(prog_name="latentserve")
