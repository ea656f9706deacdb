"""`latentserve generate`: one completion by an engine on this machine, without Ray and without a server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from deploy.cli import options
from deploy.cli.console import check_interrupt, int_list, read_stdin, reported, result_stream
from deploy.mistakes import UsageMistake

if TYPE_CHECKING:
    from deploy.cli.generation import Generation
    from deploy.text.tokenizer import Tokenizer
    from workers.config import EngineConfig
    from workers.processes.launch import LocalReplica
    from workers.protocol.messages import Request

EPILOG = options.examples(
    'latentserve generate --prompt "def read_lines(path):"',
    "latentserve generate --model ./DeepSeek-V2-Lite --prompt-ids 3,14,15 --json",
    'echo "import os" | latentserve generate --prompt - --temperature 0.7',
)


@options.takes(options.engine("record_plans", "record_prompts"), sampling={"temperature": 0.0})
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="Text to continue; - reads it from stdin.")] = None,
    prompt_ids: Annotated[
        str | None, typer.Option("--prompt-ids", metavar="3,14,15", help="Token ids to continue; needs no tokenizer.")
    ] = None,
    *,
    given: options.Given,
    max_tokens: options.MaxTokens = 128,
    sampling: options.Sampling,
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
    import json
    import secrets

    import msgspec

    from deploy.cli.local import engine_config, tokenizer_of
    from workers.processes.launch import LocalReplica
    from workers.protocol.messages import Request
    from workers.protocol.request import NO_SEED, SamplingParams, sequence_seeds

    with reported():
        if (prompt is None) == (prompt_ids is None):
            raise UsageMistake("give either --prompt or --prompt-ids")
        config = engine_config(**given, max_rows=1)
        numbers = None if prompt_ids is None else int_list(prompt_ids, "--prompt-ids")
        drawn = secrets.randbits(63) if seed in (None, NO_SEED) else seed
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        # The tokenizer takes part of the time that ranks take to import what they need. A mistake in it, or in the
        # prompt, ends them.
        with result_stream() as stdout, LocalReplica(config) as replica:
            tokenizer = tokenizer_of(config)
            ids = numbers or _encoded(prompt or "", tokenizer, config)
            shown = _Shown(tokenizer, None if json_output else stdout)
            (own,) = sequence_seeds(drawn, tuple(ids))
            request = Request("generate", ids, msgspec.structs.replace(params, seed=own))
            check_interrupt()
            result = asyncio.run(_generate(config, replica, request, ignore_eos, quiet, shown.add))
            shown.finish()
            if json_output:
                text = None if tokenizer is None else "".join(shown.pieces)
                json.dump(result.report(config.model, drawn, text), stdout)
            stdout.write("\n")
        if not quiet:
            print(result.summary(), file=sys.stderr)


def _encoded(prompt: str, tokenizer: Tokenizer | None, config: EngineConfig) -> tuple[int, ...]:
    if tokenizer is None:
        raise UsageMistake(f"{config.folder} has no tokenizer; give --prompt-ids instead of --prompt")
    text = read_stdin() if prompt == "-" else prompt
    if not text:  # a begin-of-sequence id may be left of it, which no HTTP request completes either
        raise UsageMistake("--prompt is empty: give a text to continue, or --prompt-ids")
    try:
        ids = tuple(tokenizer.encode(text))
    except ValueError as error:
        raise UsageMistake(f"--prompt: {error}") from None
    if not ids:
        raise UsageMistake("--prompt: no token is left of it")
    return ids


class _Shown:
    """Generated text in pieces, or ids where there is no tokenizer. It is written as it comes."""

    def __init__(self, tokenizer: Tokenizer | None, stdout: TextIO | None) -> None:
        self._stream = None if tokenizer is None else tokenizer.stream()
        self._stdout = stdout
        self.pieces: list[str] = []

    def add(self, tokens: tuple[int, ...]) -> None:
        if self._stream is not None:
            self._show("".join(self._stream.push(token) for token in tokens))
        else:
            self._show(("," if self.pieces else "") + ",".join(map(str, tokens)))

    def finish(self) -> None:
        if self._stream is not None:
            self._show(self._stream.finish())

    def _show(self, text: str) -> None:
        self.pieces.append(text)
        if self._stdout is not None:
            self._stdout.write(text)
            self._stdout.flush()


async def _generate(
    config: EngineConfig,
    replica: LocalReplica,
    request: Request,
    ignore_eos: bool,
    quiet: bool,
    on_tokens: Callable[[tuple[int, ...]], None],
) -> Generation:
    import time

    from msgspec.structs import replace

    from deploy.cli.generation import run_generation
    from deploy.cli.local import engine_of

    async with engine_of(config, quiet, replica=replica) as engine:
        load = time.perf_counter() - replica.begin
        info, sampling = engine.info, request.sampling
        _check(request.prompt, sampling.max_tokens, info.vocab_size, info.max_context)
        if not ignore_eos:
            request = replace(request, sampling=replace(sampling, stop_ids=info.eos_ids))
        result = await run_generation(engine, request, on_tokens)
    result.load = load
    return result


def _check(ids: Sequence[int], max_tokens: int, vocab_size: int, max_context: int) -> None:
    if max(ids) >= vocab_size:
        raise UsageMistake(f"token id {max(ids)} is outside the model's vocabulary of {vocab_size}")
    if len(ids) + max_tokens > max_context:
        raise UsageMistake(
            f"{len(ids)} prompt tokens and --max-tokens {max_tokens} exceed the context of {max_context} tokens"
        )
