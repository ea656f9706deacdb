"""`latentserve bench latency`: time per output token and prefill time of an engine on this machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import options
from deploy.cli.console import check_interrupt, int_list, reported, result_stream
from deploy.mistakes import CommandFailure, UsageMistake
from workers.config import AUTO_WIDTH, ENGINE

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

    from deploy.cli.latency import LatencyResult, LatencyShape
    from workers.config import EngineConfig

EPILOG = options.examples(
    "latentserve bench latency --model ./DeepSeek-V2-Lite --batch 1,16 --input 1024 --output 33,161",
    'latentserve bench latency --model demo --batch 1 --prompt "def read_lines(path):" --width 1',
)

_LEAST_CONTEXT = 16384
"""Tokens. Page tables as short as the prompts at hand would measure an engine that nobody runs."""


@options.takes(options.engine("token_budget"))
def latency(
    given: options.Given,
    batch: Annotated[
        str, typer.Option("--batch", metavar="1,16", help="Requests at once; several, with commas.")
    ] = "1",
    input_tokens: Annotated[int, typer.Option("--input", min=1, help="Prompt tokens of every request.")] = 1024,
    output: Annotated[
        str, typer.Option("--output", metavar="33,161", help="The two output lengths that are compared.")
    ] = "33,161",
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Runs of each kind; the best counts.")] = 2,
    prompt: Annotated[
        str | None,
        typer.Option(
            "--prompt", help="Use this text for every request, instead of random tokens (--input is ignored)."
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Of the random prompts.")] = 0,
    eager: Annotated[bool, typer.Option("--eager", help="Without CUDA graphs.", rich_help_panel=ENGINE)] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Measure time per output token, prefill time and speed of an engine on this machine.

    All requests of a batch are submitted at once: seeded random prompts, greedy, past end-of-sequence tokens, without
    prefix cache. Time per output token is (time at the longer output - time at the shorter one) / their difference.
    """
    import asyncio

    from deploy.cli.latency import LatencyShape
    from deploy.cli.local import engine_config, tokenizer_of

    with reported():
        batches = int_list(batch, "--batch", least=1)
        lengths = int_list(output, "--output", least=1)
        if len(lengths) != 2 or lengths[0] >= lengths[1]:
            raise UsageMistake(f"--output takes two lengths, the shorter first, such as 33,161; not {output}")
        base = engine_config(model=given.get("model"))
        fixed = None
        if prompt is not None:
            tokenizer = tokenizer_of(base)
            if tokenizer is None:
                raise UsageMistake(f"{base.folder} has no tokenizer; leave --prompt out")
            try:
                fixed = tuple(tokenizer.encode(prompt))
            except ValueError as error:
                raise UsageMistake(f"--prompt: {error}") from None
            if not fixed:
                raise UsageMistake("--prompt is empty")
            input_tokens = len(fixed)
        width = given.get("width", "auto")
        most = AUTO_WIDTH if width == "auto" else width
        given.setdefault("token_budget", max(base.token_budget, max(batches) * most + 1))
        config = engine_config(
            **given,
            max_rows=max(batches),
            max_context=_context(base.folder, input_tokens + lengths[1]),
            queue_limit=max(batches),
            graphs=not eager,
            prefix_cache=False,
            # Prompts take the same time whatever is generated beside them, so that the difference is decode steps.
            mixed_step_target_ms=0,
        )
        shape = LatencyShape(input_tokens, *lengths, repeats)
        check_interrupt()
        asyncio.run(_measure(config, batches, shape, seed, fixed, json_output, quiet))


def _context(folder: Path, needed: int) -> int | None:
    """Context to run with: `_LEAST_CONTEXT`, more where that is needed, never more than the model was made for."""
    from workers.model_folder import config_values

    made_for = config_values(folder).get("max_position_embeddings")
    if made_for is None:
        return None  # it may be stated elsewhere: the engine finds it, and takes all of it
    if needed > made_for:
        raise UsageMistake(
            f"--input and the longer --output, {needed} tokens, exceed the model's context of {made_for}"
        )
    return min(max(_LEAST_CONTEXT, needed), int(made_for))


async def _measure(
    config: EngineConfig,
    batches: tuple[int, ...],
    shape: LatencyShape,
    seed: int,
    fixed: tuple[int, ...] | None,
    json_output: bool,
    quiet: bool,
) -> None:
    import json

    from deploy.cli.latency import PromptSource, measure
    from deploy.cli.local import engine_of

    def done(result: LatencyResult) -> None:
        if not quiet:
            per_token = result.time_per_output_token * 1e3
            print(f"batch {result.batch}: {per_token:.3f} ms per output token", file=sys.stderr, flush=True)

    with result_stream() as stdout:
        async with engine_of(config, quiet) as engine:
            info = engine.info
            if shape.input + shape.long > info.max_context:
                raise UsageMistake(
                    f"--input {shape.input} and --output {shape.long} exceed the context of {info.max_context} tokens"
                )
            source = PromptSource(info.vocab_size, seed, fixed)
            try:
                results = await measure(engine, batches, shape, source, done)
            except RuntimeError as error:
                raise CommandFailure(str(error)) from None
        settings = config.model_dump(
            include={
                "model",
                "dtype",
                "kv_cache_dtype",
                "device",
                "tensor_parallel",
                "cache_shards",
                "invariant",
                "activations",
                "token_budget",
                "graphs",
            }
        )
        settings["width"] = "auto" if config.width == "auto" and info.max_width > 1 else info.max_width
        if json_output:
            json.dump({**settings, "results": [result.report() for result in results]}, stdout)
            stdout.write("\n")
        else:
            from rich.console import Console

            Console(file=stdout).print(table(results, settings))


def table(results: list[LatencyResult], settings: dict[str, object]) -> Table:
    """The results for people: a row a batch size."""
    from rich.table import Table

    first = results[0]
    title = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    shown = Table(title=f"{title}\ninput {first.input}, output {first.short} and {first.long}", title_justify="left")
    for name in ("batch", "ms / output token", "decode tok/s", "prefill ms", "prefill tok/s", "drafts accepted"):
        shown.add_column(name, justify="right")
    for result in results:
        accepted = result.acceptance
        shown.add_row(
            str(result.batch),
            f"{result.time_per_output_token * 1e3:.3f}",
            f"{result.decode_speed:,.0f}",
            f"{result.prefill_time * 1e3:.1f}",
            f"{result.prefill_speed:,.0f}",
            "-" if accepted is None else f"{accepted:.1%}",
        )
    return shown
