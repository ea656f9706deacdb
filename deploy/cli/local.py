"""An engine on this machine for one command: settings from flags, progress on stderr, failures as one line."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from deploy.config.settings import settings_of
from deploy.mistakes import CommandFailure, UsageMistake, explain
from workers.config import EngineConfig
from workers.environment import visible_gpus
from workers.fit.settings import Unfit, check_fit
from workers.processes.client import EngineClient
from workers.processes.launch import local_engine
from workers.protocol.front import Engine, EngineFault, Refused, RequestFailed
from workers.protocol.messages import EngineStats
from workers.protocol.report import SelfTestReport

if TYPE_CHECKING:
    from rich.status import Status

    from deploy.text.tokenizer import Tokenizer
    from workers.processes.launch import LocalReplica

STATS_TIMEOUT_S = 1.0


def engine_config(*, served: bool = True, **given: Any) -> EngineConfig:
    """Settings that a command line or a command gives (None: not given); of the demo model where there is no other.
    `served`: whether the model is to be served, and on this machine; else it is only counted. UsageMistake naming the
    wrong flag, the folder that is no model, or what the model cannot be served with."""
    values = {"model": "demo", **{name: value for name, value in given.items() if value is not None}}
    flags = {setting.name: setting.option for setting in settings_of(EngineConfig)}
    try:
        config = EngineConfig(**values)
        check_fit(config, gpus=visible_gpus() if served else None)
    except ValidationError as error:
        raise UsageMistake(explain(error, lambda name: flags.get(name, name))) from None
    except (FileNotFoundError, Unfit) as error:
        raise UsageMistake(str(error)) from None
    return config


def tokenizer_of(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer of the model folder; None when it has none. CommandFailure when it cannot be read."""
    from deploy.text.tokenizer import Tokenizer

    try:
        return Tokenizer.load(config.folder)
    except ValueError as error:
        raise CommandFailure(str(error)) from None


@asynccontextmanager
async def engine_of(
    config: EngineConfig,
    quiet: bool,
    on_selftest: Callable[[SelfTestReport], None] | None = None,
    replica: LocalReplica | None = None,
) -> AsyncIterator[EngineClient]:
    """A ready engine; CommandFailure with the first cause when it cannot start or fails meanwhile. `on_selftest` hears
    what the self-test found, also when that is why it cannot start. `replica`: see `local_engine`."""
    progress = _Progress(quiet)
    try:
        async with local_engine(config, progress.say, on_selftest=on_selftest, replica=replica) as engine:
            progress.stop()
            yield engine
    except (EngineFault, RequestFailed) as fault:
        raise CommandFailure(str(fault)) from None
    except Refused as refusal:
        raise UsageMistake(refusal.reason) from None
    except TimeoutError:
        raise CommandFailure(f"the engine was not ready within {config.start_timeout_s:.0f} s") from None
    finally:
        progress.stop()


async def settled_stats(engine: Engine) -> EngineStats:
    """The engine's counters, not older than the outputs read so far: both come over one ordered channel."""
    seen = engine.stats
    deadline = asyncio.get_running_loop().time() + STATS_TIMEOUT_S
    while engine.stats is seen and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    return engine.stats


class _Progress:
    """Progress display while the engine loads, on stderr: a spinner on a terminal, else lines."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._status: Status | None = None
        if not quiet and sys.stderr.isatty():
            from rich.console import Console

            self._status = Console(stderr=True).status("starting the engine")
            self._status.start()

    def say(self, text: str) -> None:
        """The newest line."""
        if self._status is not None:
            self._status.update(text.replace("[", r"\["))
        elif not self._quiet:
            print(text, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Clear the spinner; harmless when repeated."""
        if self._status is not None:
            self._status.stop()
