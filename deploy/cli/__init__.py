"""The command `latentserve`. Import-light: besides the models of settings, of which options are made, what a command
needs is imported when it runs."""

from __future__ import annotations


def main() -> None:
    """Entry point of the console script."""
    import atexit
    import gc

    from deploy.cli.app import app

    # The interpreter looks for garbage once more before it ends, which takes it a tenth of a second after transformers.
    atexit.register(gc.freeze)
    app(prog_name="latentserve")
