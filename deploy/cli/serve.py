"""`latentserve serve`: the whole application on Ray, from flags and a settings file."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from pydantic import ValidationError

from deploy.cli import options
from deploy.cli.console import reported
from deploy.config.application import ServeConfig, merged
from deploy.config.settings import Setting, settings_of
from deploy.mistakes import CommandFailure, UsageMistake, explain
from workers.config import BUG_REPORTS

EPILOG = options.examples(
    "latentserve serve --model demo",
    "latentserve serve --model ./DeepSeek-V2.5 --tensor-parallel 8",
    "latentserve serve --config serve.yaml --port 9000",
)

_DEFAULTS = {"engine.tensor_parallel": "1; 2 for the demo model, unless there is one GPU"}
"""Defaults, in words, of commands whose settings `serve_config` puts together."""
SETTINGS = [setting for setting in settings_of(ServeConfig) if setting.flag]
"""Settings that are on the command line."""


def takes(settings: Iterable[Setting]) -> Callable[[options.Command], options.Command]:
    """Variant of `options.takes` for a command whose settings `serve_config` puts together."""
    return options.takes(settings, over_file=True, defaults=_DEFAULTS)


@takes(sorted(SETTINGS, key=lambda setting: setting.panel == BUG_REPORTS))
def serve(given: options.Given, config: options.SettingsFile = None, quiet: options.Quiet = False) -> None:
    """Serve a model: an OpenAI-compatible endpoint on Ray Serve, on this machine or a running cluster.

    Ends in order on Ctrl-C, SIGTERM or SIGHUP.
    """
    with reported():
        if names := given.get("api.served_model_names"):
            given["name"] = names[0]
        settings = serve_config(config, given)
        from deploy.serve.app import StartFailed, start
        from workers.environment import EnvironmentProblem
        from workers.fit.settings import Unfit

        try:
            start(settings, say=_say_nothing if quiet else _say)
        except Unfit as error:
            raise UsageMistake(str(error)) from None
        except (StartFailed, EnvironmentProblem) as error:
            raise CommandFailure(str(error)) from None


def _say(line: str) -> None:
    """Print a line on stderr, unless that is a terminal that was closed: then the application still ends in order."""
    try:
        typer.echo(line, err=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def _say_nothing(line: str) -> None:
    """Drop a line of progress. Errors are still printed, by `reported`."""


def serve_config(file: Path | None, given: options.Given) -> ServeConfig:
    """Settings from a YAML file, replaced by those that the command line gives; UsageMistake for a wrong one."""
    import yaml

    from workers.environment import visible_gpus

    data: dict[str, Any] = {}
    if file is not None:
        try:
            data = yaml.safe_load(file.read_text()) or {}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageMistake(f"--config: cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
        except yaml.YAMLError as error:
            raise UsageMistake(f"--config: {file} is not YAML: {error}") from None
        if not isinstance(data, dict):
            raise UsageMistake(f"--config: {file} must hold settings by name, such as `port: 8000`")
    for section in ("engine", "api"):
        if data.get(section, {}) is None:  # its name alone
            del data[section]
        if not isinstance(data.get(section, {}), dict):
            raise UsageMistake(f"--config: {section} in {file} must hold settings by name")
    flags = {setting.name: setting.option for setting in SETTINGS}

    def label(name: str) -> str:
        """Return the user's name for a setting: a flag, or a name in the settings file."""
        return flags.get(name, name) if file is None or name in given else name

    data = merged(data, given)
    engine = data.setdefault("engine", {})
    if engine.setdefault("model", "demo") == "demo":
        alone = engine.get("device") != "cpu" and visible_gpus() == 1
        engine.setdefault("tensor_parallel", 1 if alone else 2)
    try:
        settings = ServeConfig.model_validate(data)
        _ = settings.engine.folder, settings.engine.draft_folder
    except ValidationError as error:
        raise UsageMistake(explain(error, label, ServeConfig, str(file))) from None
    except FileNotFoundError as error:
        raise UsageMistake(str(error)) from None
    return settings
