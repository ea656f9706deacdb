"""`latentserve serve`: the whole application on Ray, from flags and a settings file."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.cli import options
from deploy.cli.console import reported
from deploy.mistakes import CommandFailure, UsageMistake

if TYPE_CHECKING:
    from deploy.config.application import ServeConfig

EPILOG = options.examples(
    "latentserve serve --model demo",
    "latentserve serve --model ./DeepSeek-V2.5 --tensor-parallel 8",
    "latentserve serve --config serve.yaml --port 9000",
)

_PLACE = "Where it runs"
_ACCESS = "Access"

# Flags and the settings they replace; a message about a setting names its flag.
_FLAGS = {
    "engine.model": "--model",
    "engine.width": "--width",
    "engine.drafter": "--drafter",
    "engine.draft_model": "--draft-model",
    "engine.tensor_parallel": "--tensor-parallel",
    "engine.invariant": "--invariant",
    "engine.activations": "--activations",
    "engine.dtype": "--dtype",
    "engine.kv_cache_dtype": "--kv-cache-dtype",
    "engine.device": "--device",
    "engine.max_rows": "--max-rows",
    "engine.token_budget": "--token-budget",
    "engine.mixed_step_target_ms": "--mixed-step-target-ms",
    "engine.max_context": "--max-context",
    "engine.cache_pages": "--cache-pages",
    "engine.memory_fraction": "--memory-fraction",
    "engine.record_plans": "--record-plans",
    "engine.record_prompts": "--record-prompts",
    "engine.grammar_compile_timeout_s": "--grammar-compile-timeout",
    "replicas": "--replicas",
    "host": "--host",
    "port": "--port",
    "name": "--served-model-name",
    "api.served_model_names": "--served-model-name",
    "api.api_keys": "--api-key",
    "api.api_keys_file": "--api-keys-file",
    "api.otlp_endpoint": "--otlp-endpoint",
    "api.tool_parser": "--tool-parser",
    "api.reasoning_parser": "--reasoning-parser",
    "ingress": "--ingress",
    "ray_address": "--ray-address",
}


def serve(
    model: options.GivenModel = None,
    config: options.SettingsFile = None,
    tensor_parallel: options.GivenTensorParallel = None,
    width: options.GivenWidth = None,
    drafter: options.GivenDrafter = None,
    draft_model: options.GivenDraftModel = None,
    invariant: options.GivenInvariant = None,
    activations: options.GivenActivations = None,
    dtype: options.GivenDType = None,
    kv_cache_dtype: options.GivenKvCacheDType = None,
    device: options.GivenDevice = None,
    max_rows: options.GivenMaxRows = None,
    token_budget: options.GivenTokenBudget = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            help="Tokens of prompt and output together.",
            show_default="the model's",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    cache_pages: Annotated[
        int | None,
        typer.Option(
            "--cache-pages",
            help="Pages of 64 tokens of latent cache.",
            show_default="what memory allows",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    memory_fraction: Annotated[
        float | None,
        typer.Option(
            "--memory-fraction",
            help="Share of a GPU's memory to use.",
            show_default="0.9",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    mixed_step_target_ms: options.GivenMixedStepTarget = None,
    grammar_compile_timeout: options.GivenGrammarCompileTimeout = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            "--replicas", min=1, help="Engines behind the endpoint.", show_default="1", rich_help_panel=_PLACE
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on.", show_default="127.0.0.1", rich_help_panel=_PLACE),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port", min=0, max=65535, help="0 takes a free one.", show_default="8000", rich_help_panel=_PLACE
        ),
    ] = None,
    ingress: Annotated[
        str | None,
        typer.Option(
            "--ingress",
            metavar="auto|direct|proxy",
            help="direct: replicas answer themselves behind HAProxy; proxy: Serve's own.",
            show_default="auto",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            "--ray-address",
            metavar="auto|HOST:PORT",
            help="Cluster to join.",
            show_default="one of its own",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(
            "--served-model-name",
            help="Name that clients ask for; further ones are aliases.",
            show_default="the folder's",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            "--api-key", help="Let in requests with this bearer token; may be repeated.", rich_help_panel=_ACCESS
        ),
    ] = None,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(
            "--api-keys-file",
            metavar="FILE",
            help="Keys with names, limits, priorities and weights as YAML (docs/api-keys.md).",
            show_default="none",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(
            "--otlp-endpoint",
            metavar="URL",
            help="OpenTelemetry collector for spans of requests, as http://127.0.0.1:4318 (docs/tracing.md).",
            show_default="$OTEL_EXPORTER_OTLP_ENDPOINT",
            rich_help_panel=_ACCESS,
        ),
    ] = None,
    tool_parser: Annotated[
        str | None,
        typer.Option(
            "--tool-parser",
            metavar="auto|none|NAME",
            help="What reads tool calls: deepseek_v3, deepseek_v31, deepseek_v32, kimi_k2 or glm.",
            show_default="as the chat template writes them",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            "--reasoning-parser",
            metavar="auto|none|NAME",
            help="What reads reasoning: deepseek_r1, deepseek_v3, kimi_k2 or glm.",
            show_default="as the chat template writes it",
            rich_help_panel=options.ENGINE,
        ),
    ] = None,
    record_plans: options.RecordPlans = None,
    record_prompts: options.RecordPrompts = False,
) -> None:
    """Serve a model: an OpenAI-compatible endpoint on Ray Serve, on this machine or a running cluster.

    Ends in order on Ctrl-C, SIGTERM or SIGHUP.
    """
    with reported():
        settings = serve_config(
            config,
            {
                "engine.model": model,
                "engine.width": width,
                "engine.drafter": drafter,
                "engine.draft_model": draft_model,
                "engine.tensor_parallel": tensor_parallel,
                "engine.invariant": invariant,
                "engine.activations": activations,
                "engine.dtype": dtype,
                "engine.kv_cache_dtype": kv_cache_dtype,
                "engine.device": device,
                "engine.max_rows": max_rows,
                "engine.token_budget": token_budget,
                "engine.mixed_step_target_ms": mixed_step_target_ms,
                "engine.max_context": max_context,
                "engine.cache_pages": cache_pages,
                "engine.memory_fraction": memory_fraction,
                "engine.record_plans": record_plans,
                "engine.record_prompts": record_prompts or None,
                "engine.grammar_compile_timeout_s": grammar_compile_timeout,
                "replicas": replicas,
                "host": host,
                "port": port,
                "name": served_model_name[0] if served_model_name else None,
                "api.served_model_names": tuple(served_model_name) if served_model_name else None,
                "api.api_keys": tuple(api_key) if api_key else None,
                "api.api_keys_file": api_keys_file,
                "api.otlp_endpoint": otlp_endpoint,
                "api.tool_parser": tool_parser,
                "api.reasoning_parser": reasoning_parser,
                "ingress": ingress,
                "ray_address": ray_address,
            },
        )
        from deploy.serve.app import StartFailed, start
        from workers.environment import EnvironmentProblem
        from workers.fit import Unfit

        try:
            start(settings, say=_say)
        except Unfit as error:
            raise UsageMistake(str(error)) from None
        except (StartFailed, EnvironmentProblem) as error:
            raise CommandFailure(str(error)) from None


def _say(line: str) -> None:
    """On stderr, unless that is a terminal that was closed: then the application still ends in order."""
    try:
        typer.echo(line, err=True)
    except OSError as error:
        if error.errno != errno.EIO:
            raise


def serve_config(file: Path | None, flags: dict[str, Any]) -> ServeConfig:
    """Settings from a YAML file, its values replaced by flags (None: not given); UsageMistake for a wrong one."""
    import yaml
    from pydantic import ValidationError

    from deploy.config.application import ServeConfig, merged
    from deploy.mistakes import explain
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
    given = {name for name, value in flags.items() if value is not None}

    def label(name: str) -> str:
        """What the user called it: a flag, or a setting in the file."""
        return _FLAGS.get(name, name) if file is None or name in given else name

    data = merged(data, flags)
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
