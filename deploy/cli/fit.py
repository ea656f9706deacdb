"""`latentserve fit`: whether a model fits some GPUs, and what it leaves for the cache; without a GPU or its weights."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from deploy.cli import options
from deploy.cli.console import FAILURE, check_interrupt, reported, result_stream
from deploy.mistakes import UsageMistake

if TYPE_CHECKING:
    from workers.config import EngineConfig
    from workers.fit.memory_plan import MemoryPlan
    from workers.fit.smallest_change import Change

GPUS: Final = {"h100": int(79.1 * 2**30), "h200": int(139.8 * 2**30)}
"""Bytes that CUDA says they have."""

EPILOG = options.examples(
    "latentserve fit --model ./DeepSeek-V2.5 --tensor-parallel 8 --gpu h100",
    "latentserve fit --model ./DeepSeek-V2-Lite --gpu 40GiB --context 32768",
)


@options.takes(
    options.engine(
        *("max_rows", "token_budget", "host_cache_bytes", "disk_cache_bytes", "disk_cache_dir"),
        without=("activations", "device"),
    )
)
def fit(
    given: options.Given,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="h100|h200|80GiB", help="What each rank has, or its memory.")
    ] = "h200",
    context: Annotated[
        int | None,
        typer.Option("--context", min=2, help="Tokens of a request.", show_default="what the model was made for"),
    ] = None,
    standby: Annotated[
        bool, typer.Option("--standby", help="A second engine stands by (health.standby: hot).", show_default=False)
    ] = False,
    json_output: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Say what a model takes of each GPU's memory, and what is left for the cache.

    Needs neither a GPU nor the weights: the folder's config.json, and where its safetensors are there, their headers.
    Exit code 0 means that it fits, 1 that it does not; then the smallest change with which it does is named.
    """
    from deploy.cli.local import engine_config

    with reported():
        total = _memory(gpu)
        config = engine_config(**given, max_context=context, served=False)
        check_interrupt()
        if standby and config.host_cache_bytes:
            raise UsageMistake("--standby does not go with --host-cache-bytes yet: leave one of them out")
        config, chosen = _shared_out(config, total, standby)
        plans, change = _plans(config, total, standby)
        plan = plans[_asked(config)]
        with result_stream() as stdout:
            if json_output:
                import json

                json.dump(_json(config, plans, change), stdout)
                stdout.write("\n")
            else:
                stdout.write("\n".join(_lines(config, gpu, plans, change, chosen)) + "\n")
        if not plan.fits:
            raise typer.Exit(FAILURE)


def _memory(gpu: str) -> int:
    if gpu.lower() in GPUS:
        return GPUS[gpu.lower()]
    if (found := re.fullmatch(r"(\d+(?:\.\d+)?) ?GiB", gpu, re.IGNORECASE)) and float(found[1]) > 0:
        return int(float(found[1]) * 2**30)
    raise UsageMistake(f"--gpu {gpu}: give {', '.join(GPUS)}, or a size such as 80GiB")


def _asked(config: EngineConfig) -> str:
    """Return the key of the plan, of two, that the settings ask for."""
    return "fp8" if config.kv_cache_dtype == "fp8" else "plain"


def _shared_out(config: EngineConfig, total: int, standby: bool) -> tuple[EngineConfig, str]:
    """Settings with the number of `cache_shards` that a start chooses, where they leave it open, and why it does."""
    from workers.fit.shard_choice import choose_shards

    if config.cache_shards != "auto":
        return config, ""
    try:
        choice = choose_shards(config, total, standby=standby)
    except ValueError as error:
        raise UsageMistake(str(error)) from None
    return config.shared_out(choice.shards), choice.words


def _plans(config: EngineConfig, total: int, standby: bool) -> tuple[dict[str, MemoryPlan], Change | None]:
    """Plan with the cache in the model's dtype and, where it can be, in FP8. Also return what to change where the plan
    that is asked for does not fit."""
    from workers.families.registry import has_fp8_cache, load_config
    from workers.fit.memory_plan import memory_plan
    from workers.fit.smallest_change import smallest_change

    try:
        plan = memory_plan(config, total, standby=standby)
        asked = _asked(config)
        dtypes = {"plain": "auto", "fp8": "fp8"} if has_fp8_cache(load_config(config.folder)) else {"plain": "auto"}
        plans = {
            name: plan
            if name == asked
            else memory_plan(config.model_copy(update={"kv_cache_dtype": dtype}), total, standby=standby)
            for name, dtype in dtypes.items()
        }
        return plans, None if plan.fits else smallest_change(config, plan, GPUS)
    except ValueError as error:  # of config.json, the files, or sizes that no kernel takes
        raise UsageMistake(str(error)) from None


def _lines(
    config: EngineConfig, gpu: str, plans: dict[str, MemoryPlan], change: Change | None, chosen: str
) -> list[str]:
    from workers.fit.cache_budget import in_words

    def gib(size: int) -> str:
        return f"{size / 2**30:9.2f} GiB"

    def cache(name: str) -> str:
        other = plans[name]
        form = "FP8" if name == "fp8" else _dtype(config)
        how = "" if name == _asked(config) else f" (--kv-cache-dtype {'fp8' if name == 'fp8' else 'auto'})"
        size = gib(other.own_pages * other.page_bytes)
        return f"{size}  {in_words(form + how, other.pages, other.rows, other.asked_context)}"

    ranks, plan = config.mesh().world.size, plans[_asked(config)]
    stored = "as their files store them" if plan.from_files else "as config.json says: no files are there"
    lines = [
        f"each of {ranks} GPU{'s' * (ranks > 1)} ({gpu}) {gib(plan.total).strip()}, of which "
        f"{config.memory_fraction:.0%} may be used",
        f"weights   {gib(plan.weights)}  {stored}",
        f"graphs    {gib(plan.graphs)}  estimated; a start measures it",
        f"other     {gib(plan.rest)}  sampling, page tables, rope",
        *([f"rows      {gib(plan.rings)}  newest tokens of {config.max_rows} requests"] if plan.rings else []),
        *(
            [f"snapshots {gib(plan.snapshots)}  of newest tokens, where {config.prefix_snapshots} prompts share pages"]
            if plan.snapshots
            else []
        ),
        *([f"standby   {gib(plan.standby)}  a second engine, without weights and cache"] if plan.standby else []),
        f"cache     {cache('plain')}",
        *([f"or        {cache('fp8')}"] if "fp8" in plans else []),
    ]
    lines += [chosen] if chosen else []
    if config.mesh().cache.size > 1:
        lines.append(f"pages and tokens are of {config.cache_shards} GPUs, which share out one cache (--cache-shards)")
    if config.host_cache_bytes:
        held = f"{plan.host_pages:,} pages, {plan.host_tokens:,} tokens"
        lines.append(f"host      {gib(config.host_cache_bytes)}  of each node, behind the cache: {held}")
    if config.disk_cache_bytes:
        held = f"{plan.disk_pages:,} pages, {plan.disk_tokens:,} tokens"
        lines.append(f"disk      {gib(config.disk_cache_bytes)}  of each node, behind that: {held}")
    if plan.fits:
        most = " (--max-rows)" if plan.rows == config.max_rows else ""
        requests = f"{plan.rows:,} request{'s' * (plan.rows > 1)}"
        return [*lines, f"fits: {requests} of {plan.asked_context:,} tokens at once{most}"]
    if plan.context >= 2:
        why = f"the longest request that fits has {plan.context:,} tokens, not {plan.asked_context:,}"
    else:
        why = f"{gib(max(0, 2 * plan.page_bytes - plan.room)).strip()} are missing before the cache holds anything"
    with_change = f"fits with {change.words}" if change else "no change of ranks or GPUs known here makes it fit"
    return [*lines, f"does not fit: {why}", with_change]


def _dtype(config: EngineConfig) -> str:
    return "bfloat16" if config.dtype == "auto" else config.dtype


def _cache(plan: MemoryPlan, dtype: str) -> dict[str, Any]:
    held = {"cache_bytes": plan.own_pages * plan.page_bytes, "pages": plan.pages, "tokens": plan.tokens}
    return {"dtype": dtype, **held, "rows": plan.rows, "fits": plan.fits}


def _json(config: EngineConfig, plans: dict[str, MemoryPlan], change: Change | None) -> dict[str, Any]:
    plan = plans[_asked(config)]
    return {
        "model": config.model,
        "tensor_parallel": config.tensor_parallel,
        "cache_shards": config.cache_shards,
        "gpu_bytes": plan.total,
        "weight_bytes": plan.weights,
        "weights_from_files": plan.from_files,
        "graph_bytes_estimated": plan.graphs,
        "other_bytes": plan.rest,
        "row_bytes": plan.rings,
        "snapshot_bytes": plan.snapshots,
        "standby_bytes": plan.standby,
        "kv_cache_dtype": config.kv_cache_dtype,
        "cache_bytes": plan.own_pages * plan.page_bytes,
        "pages": plan.pages,
        "tokens": plan.tokens,
        "host_tokens": plan.host_tokens,
        "disk_tokens": plan.disk_tokens,
        "context": plan.asked_context,
        "rows": plan.rows,
        "caches": {name: _cache(other, "fp8" if name == "fp8" else _dtype(config)) for name, other in plans.items()},
        "fits": plan.fits,
        "change": change.words if change else None,
    }
