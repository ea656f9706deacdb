"""Options of commands: those that settings become, and others that several commands share."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import typer

from deploy.config.settings import Setting, settings_of
from workers.config import EngineConfig
from workers.protocol.request import LEAST_SEED, MOST_SEED, TABLE, Row

SAMPLING = "Sampling"

Given = dict[str, Any]
"""Settings that the command line gives, by their dotted names. See `takes`."""
Sampling = dict[str, Any]
"""Values of all sampling parameters of `workers.protocol.request.TABLE`, by their names. See `takes`."""
Command = Callable[..., None]
_BY_NAME = inspect.Parameter.KEYWORD_ONLY


def takes(
    settings: Iterable[Setting],
    *,
    over_file: bool = False,
    defaults: Mapping[str, str] | None = None,
    sampling: Mapping[str, float] | None = None,
) -> Callable[[Command], Command]:
    """Gives a command an option for each of the settings. Its argument `given` gets those that the user gave. An
    argument `sampling` gets the value of each sampling parameter, which become options, too. A command with the option
    `--model` takes the model without its name as well.

    `over_file`: they replace what a settings file says, so that switches can be switched off, too. `defaults`: what
    holds without an option, in words, where the command has a default of its own. `sampling`: the command's own
    defaults of sampling parameters.
    """
    chosen = {setting.name.replace(".", "_"): setting for setting in settings}
    names = {name: each.option for each in chosen.values() for name in (each.name, each.name.rpartition(".")[2])}
    model = next((name for name in ("model", "engine.model") if name in {each.name for each in chosen.values()}), None)
    words = defaults or {}
    sampled: list[str] = []

    def decorate(function: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(function, eval_str=True).parameters.values():
            if parameter.name == "sampling":
                for row in TABLE:
                    sampled.append(row.name)
                    parameters.append(_of_table(row, (sampling or {}).get(row.name, row.default)))
                continue
            if parameter.name != "given":
                parameters.append(parameter.replace(kind=_BY_NAME))
                continue
            if model is not None:
                parameters.append(inspect.Parameter(_FOLDER, _BY_NAME, default=None, annotation=Folder))
            for name, setting in chosen.items():
                default = words.get(setting.name, setting.default)
                option = _option(setting, setting.help(names), default, over_file)
                parameters.append(inspect.Parameter(name, _BY_NAME, default=None, annotation=option))

        @wraps(function)
        def command(**values: Any) -> None:
            given = {setting.name: values.pop(name) for name, setting in chosen.items()}
            if model is not None and (folder := values.pop(_FOLDER)) is not None:
                given[model] = _one_model(folder, given[model])
            more = {"sampling": {name: values.pop(name) for name in sampled}} if sampled else {}
            function(given={name: value for name, value in given.items() if value not in (None, [])}, **more, **values)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {}  # those of the signature hold
        return command

    return decorate


def _one_model(folder: str, option: str | None) -> str:
    """The model, which may be given without the option's name, or in both ways where they say the same."""
    if option not in (None, folder):
        raise typer.BadParameter(
            f"{folder} is given as the model, and so is --model {option}: give one of them", param_hint="MODEL"
        )
    return folder


def engine(*also: str, without: Iterable[str] = ()) -> list[Setting]:
    """Settings of commands that run an engine: those that all have, and those that are named."""
    found = [setting for setting in settings_of(EngineConfig) if setting.flag]
    assert {*also, *without} <= {setting.name for setting in found}
    return [
        setting
        for setting in found
        if setting.name in also or (setting.flag and setting.flag.everywhere and setting.name not in without)
    ]


def _of_table(row: Row, default: float) -> inspect.Parameter:
    """The argument of a command for a sampling parameter."""
    least, most = row.parameter.taken
    option = typer.Option(row.option, min=least, max=most, help=row.parameter.meaning, rich_help_panel=SAMPLING)
    return inspect.Parameter(row.name, _BY_NAME, default=row.kind(default), annotation=Annotated[row.kind, option])


def _option(setting: Setting, text: str, default: str, over_file: bool) -> Any:
    """The type of a command's argument. Bounds are checked where the settings are put together, all at once."""
    name, kind = setting.option, setting.scalar
    told: dict[str, Any] = {"help": text.replace("[", r"\["), "rich_help_panel": setting.panel}
    if kind is bool:
        default = ""
        if over_file or setting.field.default:
            positive = name.removeprefix("--")
            name, default = f"{name}/--no-{positive}", positive if setting.field.default else f"no-{positive}"
    elif kind is object:
        kind, told["parser"] = Any, _parser(setting)
    if setting.value:
        told["metavar"] = setting.value
    return Annotated[list[str] if setting.many else kind, typer.Option(name, show_default=default or False, **told)]


def _parser(setting: Setting) -> Callable[[Any], Any]:
    def read(text: Any) -> Any:
        try:
            return setting.read(text)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None

    return read


_FOLDER = "model_folder"
Folder = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="The same as --model.", show_default=False)]
SettingsFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Settings as YAML (docs/command-line.md); flags replace them."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens generated.", rich_help_panel=SAMPLING)]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        min=LEAST_SEED,
        max=MOST_SEED,
        help="Makes sampling repeatable, as the seed of a request over HTTP does; -1 or none: drawn at random.",
        rich_help_panel=SAMPLING,
    ),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Generate on past end-of-sequence tokens.", rich_help_panel=SAMPLING),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


def _quietly(context: typer.Context, quiet: bool) -> bool:
    """Keep warnings off stderr, those of libraries among them, until the command ends. Errors are still printed."""
    if quiet:
        held = warnings.catch_warnings(action="ignore")
        context.with_resource(held)
        context.call_on_close(partial(logging.disable, logging.root.manager.disable))
        logging.disable(logging.WARNING)
    return quiet


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.", callback=_quietly)]


def examples(*lines: str) -> str:
    """Text at the end of a command's help: one command per line, kept as it is."""
    return "\b\nExamples:\n" + "\n".join(f"  {line}" for line in lines)
