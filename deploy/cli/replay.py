"""`latentserve replay`: run recorded step plans again, and say what differs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import options
from deploy.cli.console import FAILURE, check_interrupt, reported, result_stream
from deploy.mistakes import CommandFailure, UsageMistake
from workers.config import ENGINE

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.recording.file import Header, Recording
    from workers.recording.replay import Replay

EPILOG = options.examples(
    "latentserve replay plans.bin",
    "latentserve replay plans.bin --model ./DeepSeek-V2-Lite --device cuda",
)


def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What --record-plans has written.")],
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="PATH|demo",
            help="The same model, where it lies in another folder here.",
            show_default="the recorded one",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            help="auto: cuda where there is one.",
            show_default="the recorded one",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    any_version: Annotated[
        bool, typer.Option("--any-version", help="Try a file that another version has recorded.")
    ] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Run recorded step plans again, in order and on one rank, and compare what comes of them with the record.

    Ends at the first difference. Exit code 0 means that there is none, 1 that there is one or that a step failed.
    """
    with reported():
        recording = _recording(file, any_version)
        config = _config(recording.header, model, device)
        _say_what_it_is(recording, quiet)
        check_interrupt()
        with result_stream() as stdout:
            steps, difference = _replayed(config, recording)
            if json_output:
                import json

                report = {"model": config.model, "steps": steps, "recorded": len(recording.steps)}
                stdout.write(json.dumps({**report, "difference": difference}) + "\n")
            else:
                same = "all as recorded" if recording.header.prompts else "none failed; tokens were not recorded"
                stdout.write(f"{difference or f'{steps} steps: {same}'}\n")
    if difference:
        raise typer.Exit(FAILURE)


def _recording(file: Path, any_version: bool) -> Recording:
    from kernels import __version__
    from workers.recording.file import RecordingError, read_recording

    try:
        recording = read_recording(file)
    except RecordingError as error:
        raise UsageMistake(str(error)) from None
    except OSError as error:
        raise UsageMistake(f"cannot read {file}: {error.strerror}") from None
    version = recording.header.version
    if version != __version__ and not any_version:
        raise UsageMistake(
            f"{file} was recorded by latentserve {version}, and this is {__version__}: replay it there, or try it here "
            "with --any-version"
        )
    return recording


def _config(header: Header, model: str | None, device: str | None) -> EngineConfig:
    from pydantic import ValidationError

    from deploy.mistakes import explain
    from workers.recording.file import config_hash
    from workers.recording.replay import replay_config

    try:
        config = replay_config(header, model, device)
        found = config_hash(config.folder)
    except ValidationError as error:
        raise UsageMistake(f"the recorded settings: {explain(error, str)}") from None
    except (FileNotFoundError, ValueError) as error:
        raise UsageMistake(f"{error}; --model says where the recorded model is") from None
    if found != header.config_hash:
        raise UsageMistake(
            f"{config.folder} is another model than the recorded one, {header.engine.get('model')}: its config.json "
            "differs. Give the recorded model's folder with --model"
        )
    return config


def _say_what_it_is(recording: Recording, quiet: bool) -> None:
    if quiet:
        return
    header, say = recording.header, sys.stderr.write
    if recording.cut_off:
        say(f"the file was cut off: the {len(recording.steps)} steps before that are replayed\n")
    if not header.prompts:
        say("recorded without prompts: random tokens stand for them, and only failures can differ\n")
    if (ranks := header.engine.get("tensor_parallel", 1)) > 1:
        say(f"recorded on {ranks} ranks and replayed on one, which rounds differently\n")


def _replayed(config: EngineConfig, recording: Recording) -> tuple[int, str]:
    """Steps that were run, and the first difference; empty where there is none."""
    from workers.recording.replay import Replay

    try:
        run = Replay(config, recording)
    except (ValueError, RuntimeError, MemoryError) as error:
        raise CommandFailure(str(error)) from None
    try:
        return _until_a_difference(run)
    finally:
        run.close()


def _until_a_difference(run: Replay) -> tuple[int, str]:
    done = 0
    try:
        for difference in run.run():
            done += 1
            if difference is not None:
                return done, str(difference)
    except Exception as error:
        return done, f"step {run.recording.steps[done].plan.step} failed: {type(error).__name__}: {error}"
    return done, ""
