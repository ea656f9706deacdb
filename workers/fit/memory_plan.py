"""Plan of the GPU memory that a start with some settings would take, computed without a GPU and without reading
weights.

The parts are counted by what a start itself uses: the weights by a dry run over the files' headers, the cache by the
specs of its layers. Only the graphs' share is estimated, since a start measures it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from kernels.page import PAGE_TOKENS, pages_for
from kernels.shard_exchange import Inbox
from workers.cache.paged import PagedCache
from workers.cache.snapshots import snapshot_bytes
from workers.cache.spec import page_bytes as bytes_of_page
from workers.config import EngineConfig
from workers.drafters.choice import choose_drafter
from workers.drafters.draft_model import counted_draft_model
from workers.families.draft_models import read_draft_model
from workers.families.loading import counted, has_draft_layer
from workers.families.registry import FAMILIES, load_config
from workers.fit.cache_budget import (
    fp8_cache,
    gpu_cache_budget,
    longest_request,
    pages_within,
    refuse_rings,
    rows_at,
    wanted_pages,
)
from workers.fit.graph_memory import estimate
from workers.fit.standby import DRIVER_BYTES, fewest_pages, standby_bytes
from workers.model_folder import config_values
from workers.models.selecting import pages_to_select
from workers.parallel.group import Group
from workers.scheduler import max_entries_per_row, max_pages_per_row
from workers.step.parts import SlotState, StepParts
from workers.step.sampling import SamplingState
from workers.tiers.disk_files import slots_within
from workers.tiers.mover import batch_of, record_layout, staging_bytes
from workers.weights.checkpoint import Checkpoint
from workers.weights.source import DryRun


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of rank 0, which takes most: it samples."""

    total: int
    """Bytes of the GPU."""
    weights: int
    from_files: bool
    """Whether the files said how their tensors are stored; else config.json did."""
    graphs: int
    """Estimated."""
    rest: int
    """Sampling, the slots' state, rope tables, memory of exchanges between ranks that share out the cache, and what is
    made of weights once they are loaded."""
    rings: int
    """What layers keep of each slot's newest tokens; models of latent attention keep nothing there."""
    snapshots: int
    """Copies of that beside pages that prompts share."""
    standby: int
    """What an engine takes that stands by; 0 where none does."""
    room: int
    """Bytes that are left for the cache; below 0 where the others already take too much."""
    page_bytes: int
    own_pages: int
    """Pages that each rank has, null page included."""
    pages: int
    """Of the whole cache, null page included: more than each rank has where ranks share it out."""
    context: int
    """Tokens of the longest request."""
    asked_context: int
    wanted_pages: int
    """Pages of one request of `asked_context` tokens, or of as many as may run of an eighth of it: whichever takes
    more."""
    rows: int
    """Requests of `asked_context` tokens at once."""
    host_pages: int
    """Pages in host memory behind the cache; 0 where none is asked for."""
    disk_pages: int
    """Pages on disk behind that."""

    @property
    def fits(self) -> bool:
        """Whether the replica would start and take a request of the context that was asked for."""
        return self.pages >= 2 and self.context >= self.asked_context

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds."""
        return max(0, self.pages - 1) * PAGE_TOKENS

    @property
    def host_tokens(self) -> int:
        """That host memory holds besides."""
        return self.host_pages * PAGE_TOKENS

    @property
    def disk_tokens(self) -> int:
        """That the disk holds."""
        return self.disk_pages * PAGE_TOKENS


@torch.inference_mode()
def memory_plan(
    config: EngineConfig,
    total: int,
    *,
    cache_bytes: int | None = None,
    known: DryRun.Known | None = None,
    standby: bool = False,
) -> MemoryPlan:
    """The plan of a start on GPUs of `total` bytes; `config.max_context` or the model's own context is asked for.
    `cache_bytes`: room for the cache, where that is known. `known`: feed-forward parts, most of what there is to count,
    of plans of the same model that differ in `cache_shards` alone; those that are missing are added. `standby`: a
    second engine stands by.

    Whether a draft layer's embedding and head repeat the model's, only their numbers say, which are not read here: the
    plan counts none, as DeepSeek's repeat them. A start compares them, counts those that are others, and says so.

    Raises what a start raises about config.json, the files' headers and sizes that ranks cannot share.
    """
    model_config = load_config(config.folder)
    compressed = model_config.compression is not None
    refuse_rings(config, rings=compressed)
    context = config.max_context or model_config.max_positions
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    group, meta = Group(config.mesh()), torch.device("meta")
    with _dtypes(config, model_config.model_type) as (dtype_of, has_any):
        drafts = config.wants_draft_layer and has_draft_layer(model_config, has_any)
        model, dry_run = counted(
            model_config,
            group,
            dtype,
            dtype_of,
            draft_layer=drafts,
            invariant=config.invariant,
            fp8_cache=fp8_cache(config, dtype),
            known=known,
        )
        from_files = has_any is not None
    weights, beside = dry_run.bytes, dry_run.beside
    roped = model_config.qk_rope_head_dim + (model_config.query_scaling is not None)
    if (draft := read_draft_model(config, model_config, group.mesh)) is not None:
        model.drafter, own = counted_draft_model(draft, model, fp8_cache=fp8_cache(config, dtype))
        weights += own.bytes
        beside += own.beside
        roped += model.drafter.position_numbers
    width = choose_drafter(model, config)
    sampling = SamplingState(config.max_rows, model_config.vocab_size, meta)
    sampling.allocate(config.max_rows * width)
    pages_per_row = max(max_pages_per_row(context, width), pages_for(context))
    reads_tokens = model.drafter is not None and model.drafter.reads_tokens
    state = SlotState(config.max_rows, width - 1, pages_per_row, meta, tokens=reads_tokens)
    specs = model.rings(width)
    rings = (config.max_rows + 1) * sum(ring.slot_bytes for ring in specs)
    snapshots = config.prefix_snapshots * snapshot_bytes(specs) if config.prefix_cache else 0
    graphs = 0
    if compressed:
        roped = 2 * roped  # it has two ropes
    if config.graphs:
        adaptive = config.width == "auto"
        parts = StepParts(model, PagedCache.allocate(model.caches, 2, meta), state, sampling, group, width, adaptive)
        graphs = estimate(parts, config.max_rows, config.token_budget).bytes
    rope = max_entries_per_row(context, config.most_width) * roped * torch.float32.itemsize
    shards = group.mesh.shards
    exchanged = Inbox.nbytes(shards.count) if shards.count > 1 else 0
    rest = _bytes_of(sampling) + _bytes_of(state) + rope + exchanged + beside
    if graphs and config.selftest and not config.host_cache_bytes:
        rest += state.kept_bytes + rings + sampling.kept_bytes  # copies, while graphs are proven beside streams
    record_bytes = record_layout(model.caches)[-1]
    if config.host_cache_bytes:
        # As on one node, where all ranks share what is saved.
        batch = batch_of(record_bytes, config.token_budget, group.mesh.world.size)
        rest += staging_bytes(record_bytes, batch)
    page_bytes = bytes_of_page(model.caches, shards)
    second = 0
    if standby:
        few = fewest_pages(config, shards, pages_to_select(model_config, width)) * page_bytes
        second = standby_bytes(rest + rings + snapshots + graphs, few, len(model.caches))
    taken = DRIVER_BYTES + weights + rest + rings + snapshots + second
    room = gpu_cache_budget(total - taken, total, graphs, config.memory_fraction)
    if cache_bytes is not None:
        room = cache_bytes
    placed: dict[str, Any] = {"shards": shards.count, "in_pieces": config.invariant}
    own_pages = config.cache_pages or pages_within(max(0, room), page_bytes, config.max_rows, context, width, **placed)
    if room < own_pages * page_bytes:
        own_pages = 0
    pages = shards.pages(own_pages) if own_pages else 0
    return MemoryPlan(
        total=total,
        weights=weights,
        from_files=from_files,
        graphs=graphs,
        rest=rest,
        rings=rings,
        snapshots=snapshots,
        standby=second,
        room=room,
        page_bytes=page_bytes,
        own_pages=own_pages,
        pages=pages,
        context=max(0, longest_request(pages, context, width, **placed)),
        asked_context=context,
        wanted_pages=wanted_pages(context, config.max_rows, width, **placed),
        rows=rows_at(pages, config.max_rows, context, width),
        host_pages=config.host_cache_bytes // record_bytes,
        disk_pages=slots_within(config.disk_cache_bytes, record_bytes),
    )


@contextmanager
def _dtypes(
    config: EngineConfig, model_type: str
) -> Iterator[tuple[Callable[[str], str | None], Callable[[str], bool] | None]]:
    """Yield a function that gives a tensor's stored dtype by name, and, where there are files to tell, one that tells
    whether there are tensors with a prefix."""
    if any(config.folder.glob("*.safetensors*")):
        with Checkpoint.open(config.folder) as checkpoint:
            yield checkpoint.dtype_of, checkpoint.has_any
        return
    yield FAMILIES[model_type].dtypes(config_values(config.folder)), None


def _bytes_of(thing: object) -> int:
    """Return the bytes of the tensors that an object and its parts hold."""
    if isinstance(thing, torch.Tensor):
        return thing.nbytes
    if not type(thing).__module__.startswith(("workers.", "kernels.")):
        return 0
    return sum(map(_bytes_of, vars(thing).values())) if hasattr(thing, "__dict__") else 0
