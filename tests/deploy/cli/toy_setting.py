"""`latentserve` with one more setting, which is stated in `ToyConfig` below and nowhere else.

    python -m tests.deploy.cli.toy_setting serve --toy-pages 4

Nothing starts: what a replica would be started with is printed. With `settings-page` the documentation is.
"""

from __future__ import annotations

import pickle
import sys
import types
from typing import Annotated

from pydantic import Field

import workers.config
from workers.config import EngineConfig, Flag


class ToyConfig(EngineConfig):
    """The settings of an engine, and a toy."""

    toy_pages: Annotated[int, Field(ge=2, le=9), Flag(everywhere=True)] = 3
    """Pages that a toy takes, beside `cache_pages`.

    They are not used."""


def handed_over(config: EngineConfig) -> None:
    """Prints what processes are given, which takes the way of Ray's arguments and of other processes'."""
    there = pickle.loads(pickle.dumps(config))
    print(f"handed to the engine: {there.model_dump()['toy_pages']}")


def without_engines() -> None:
    """Puts what prints its settings in the place of what starts an engine."""
    app = types.ModuleType("deploy.serve.app")
    app.StartFailed = RuntimeError
    app.start = lambda config, say: handed_over(config.engine)
    sys.modules["deploy.serve.app"] = app
    import workers.processes.launch

    def replica_of(config: EngineConfig) -> None:
        handed_over(config)
        raise SystemExit(0)

    workers.processes.launch.LocalReplica = replica_of


if __name__ == "__main__":
    workers.config.EngineConfig = ToyConfig  # what everything imports from here on
    if sys.argv[1:] == ["settings-page"]:
        from tests.settings_page import lines

        print("\n".join(lines()))
    else:
        without_engines()
        from deploy.cli import main

        main()
