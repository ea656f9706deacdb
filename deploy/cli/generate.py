"""`latentserve generate`: one completion by an engine on this machine, without Ray and without a server."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from deploy.cli import options
from deploy.cli.console import UsageMistake, int_list, reported, result_stream

if TYPE_CHECKING:
    from deploy.text.tokenizer import Tokenizer
    from workers.config import EngineConfig
    from workers.plan import SamplingParams

EPILOG = options.examples(
    'latentserve generate --prompt "def read_lines(path):"',
    "latentserve generate --model ./DeepSeek-V2-Lite --prompt-ids 3,14,15 --json",
    'echo "import os" | latentserve generate --prompt - --temperature 0.7',
)


def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="3,14,15", help="Token ids to continue; needs no tokenizer.")
    ] = None,
    model: options.Model = "demo",
    width: options.Width = 3,
    tensor_parallel: options.TensorParallel = 1,
    invariant: options.Invariant = False,
    dtype: options.DType = "auto",
    device: options.Device = "auto",
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 0.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    ignore_eos: options.IgnoreEos = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Complete one prompt with an engine on this machine, without Ray.

    The text is printed as it is generated (token ids where the model folder has no tokenizer). stdout carries the
    result and nothing else; progress goes to stderr.
    """
    import asyncio
    import secrets

    from deploy.cli.local import engine_config, tokenizer_of
    from workers.plan import SamplingParams

    with reported():
        if (prompt is None) == (prompt_ids is None):
            raise UsageMistake("give either --prompt or --prompt-ids")
        config = engine_config(
            model=model,
            width=width,
            invariant=invariant,
            tensor_parallel=tensor_parallel,
            dtype=dtype,
            device=device,
            max_rows=1,
        )
        tokenizer = tokenizer_of(config)
        if prompt_ids is not None:
            ids = int_list(prompt_ids, "--prompt-ids")
        elif tokenizer is None:
            raise UsageMistake(f"{config.folder} has no tokenizer; give --prompt-ids instead of --prompt")
        else:
            ids = tuple(tokenizer.encode(sys.stdin.read() if prompt == "-" else prompt or ""))
            if not ids:
                raise UsageMistake("--prompt is empty")
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=secrets.randbits(63) if seed is None else seed & (2**64 - 1),
        )
        asyncio.run(_generate(config, tokenizer, ids, sampling, ignore_eos, json_output, quiet))


async def _generate(
    config: EngineConfig,
    tokenizer: Tokenizer | None,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    ignore_eos: bool,
    json_output: bool,
    quiet: bool,
) -> None:
    import json
    import time

    import msgspec

    from deploy.cli.generation import run_generation
    from deploy.cli.local import engine_of
    from workers.messages import Request

    pieces: list[str] = []
    stream = tokenizer.stream() if tokenizer is not None else None
    with result_stream() as stdout:

        def show(text: str) -> None:
            pieces.append(text)
            if not json_output:
                stdout.write(text)
                stdout.flush()

        def on_tokens(tokens: tuple[int, ...]) -> None:
            if stream is not None:
                show("".join(stream.push(token) for token in tokens))
            else:
                show(("," if pieces else "") + ",".join(map(str, tokens)))

        begin = time.perf_counter()
        async with engine_of(config, quiet) as engine:
            load = time.perf_counter() - begin
            info = engine.info
            _check(ids, sampling.max_tokens, info.vocab_size, info.max_context)
            if not ignore_eos:
                sampling = msgspec.structs.replace(sampling, stop_ids=info.eos_ids)
            result = await run_generation(engine, Request("generate", ids, sampling), on_tokens)
        result.load = load
        if stream is not None:
            show(stream.finish())
        if json_output:
            text = "".join(pieces) if stream is not None else None
            json.dump(result.report(config.model, sampling.seed, text), stdout)
        stdout.write("\n")
    if not quiet:
        print(result.summary(), file=sys.stderr)


def _check(ids: tuple[int, ...], max_tokens: int, vocab_size: int, max_context: int) -> None:
    if max(ids) >= vocab_size:
        raise UsageMistake(f"token id {max(ids)} is outside the model's vocabulary of {vocab_size}")
    if len(ids) + max_tokens > max_context:
        raise UsageMistake(
            f"{len(ids)} prompt tokens and --max-tokens {max_tokens} exceed the context of {max_context} tokens"
        )
