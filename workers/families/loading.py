"""From a checkpoint folder to the model on one rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from pathlib import Path

import torch

from workers.drafters.eagle import EAGLE_JOIN
from workers.families.family import Family
from workers.families.registry import FAMILIES, load_config
from workers.models.config import ModelConfig
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import Checkpoint, WeightsError
from workers.weights.copies import differing
from workers.weights.kept import KeptSource, KeptWeights
from workers.weights.loading_progress import LoadingProgress
from workers.weights.memory_check import check_memory
from workers.weights.reader import CheckpointReader
from workers.weights.source import DryRun, WeightSource


def load_model(
    folder: str | Path,
    *,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    progress: Callable[[str], None] | None = None,
    draft_layer: bool = True,
    invariant: bool = False,
    quantize_activations: bool = False,
    fp8_cache: bool = False,
    kept: KeptWeights | None = None,
) -> Model:
    """Load this rank's share of the model in `folder`. Collective: call it on every rank of `group`.

    `max_positions`: positions that a token may have, those of steps that overshoot a request's end included. `progress`
    gets a line every few seconds, and one where a matrix cannot be kept as it is stored. Without `draft_layer`, a
    multi-token-prediction layer in the checkpoint is left on the disk, as are those that its config does not declare; a
    checkpoint may also lack the one that its config declares. Its embedding and head are loaded where they are not
    those of the model. `invariant`: a token's logits are bitwise the same in any batch and on 1, 2, 4 or 8 ranks.
    `quantize_activations`: outside of that mode many tokens may be rounded to FP8 where weights are stored so, on GPUs
    that multiply such numbers. `fp8_cache`: its caches have FP8 entries. `kept`: weights that a
    rank before this one has loaded from the same files are taken from there, and those that are loaded are handed in.

    Raises `ConfigError` (config.json), `WeightsError` (files and tensors), ValueError (sizes that ranks cannot share),
    MemoryError (before anything is loaded).
    """
    config = load_config(folder)
    family = FAMILIES[config.model_type]
    with Checkpoint.open(folder) as checkpoint:
        if checkpoint.has_any(EAGLE_JOIN) and not checkpoint.has_any(family.tensor("model.embed_tokens.")):
            raise WeightsError(f"{folder} is a draft model (it has {EAGLE_JOIN}*): give it with --draft-model")
        draft_layer = draft_layer and has_draft_layer(config, checkpoint.has_any)

        def count(own: frozenset[str]) -> DryRun:
            types = checkpoint.dtype_of
            return counted(config, group, dtype, types, draft_layer=draft_layer, invariant=invariant, own=own)[1]

        def build(source: WeightSource) -> Model:
            return family.model(
                source,
                config,
                group,
                max_positions=max_positions,
                draft_layer=draft_layer,
                invariant=invariant,
                quantize_activations=quantize_activations,
                fp8_cache=fp8_cache,
            )

        shelf = None
        if kept is not None:
            shelf = kept.shelf("model", (config, checkpoint.identity(), dtype, draft_layer, invariant))
            if (held := shelf.adopt(lambda own: count(own).census)) is not None:
                types = checkpoint.dtype_of
                source = KeptSource(held, group.mesh, dtype, device, family.tensor, types, invariant)
                model = build(source)
                source.finish(group.minimum)
                return model
        own = differing(checkpoint, _copies(family, config), group, device) if draft_layer else frozenset()
        dry_run = count(own)
        undeclared = family.undeclared(config, checkpoint.has_any)
        checkpoint.verify(dry_run.wanted, _ignored(family, config, draft_layer, undeclared))
        check_memory(dry_run.bytes + dry_run.beside, group, device)
        told = LoadingProgress(dry_run.bytes, progress)
        if undeclared and group.mesh.world.first:
            names = ", ".join(f"{prefix}*" for prefix in undeclared)
            why = family.why_undeclared
            if not family.drafts:
                why = f"which is not supported for model_type {config.model_type!r}"
            told.note(f"left out: the draft layer of the checkpoint ({names}), {why}")
        if own and group.mesh.world.first:
            told.note(
                f"the draft layer has weights of its own where others repeat the model's: {', '.join(sorted(own))}"
            )
        arena = None if shelf is None else shelf.arena(dry_run.census)
        with CheckpointReader(
            checkpoint, group.mesh, dtype, device, told, family.tensor, invariant, own, arena
        ) as reader:
            model = build(reader)
            reader.finish(group.minimum)
        told.end()
        if shelf is not None and arena is not None:
            shelf.hand_over(arena, own)
        return model


def counted(
    config: ModelConfig,
    group: Group,
    dtype: torch.dtype,
    dtype_of: Callable[[str], str | None],
    *,
    draft_layer: bool,
    invariant: bool,
    fp8_cache: bool = False,
    own: Container[str] = (),
    known: DryRun.Known | None = None,
) -> tuple[Model, DryRun]:
    """Build this rank's share of a model without memory. Also return the dry run that says what it wants of a
    checkpoint whose tensors have these dtypes and that has these matrices of its `own` (see `WeightSource`). `known`:
    see `DryRun`. ValueError for sizes that ranks cannot share."""
    _check_shares(config, group.mesh)
    family = FAMILIES[config.model_type]
    dry_run = DryRun(group.mesh, dtype, family.tensor, dtype_of, invariant, own, known)
    model = family.model(
        dry_run, config, group, max_positions=0, draft_layer=draft_layer, invariant=invariant, fp8_cache=fp8_cache
    )
    return model, dry_run


def _check_shares(config: ModelConfig, mesh: Mesh) -> None:
    mesh.heads.share(config.num_heads, "num_attention_heads")
    mesh.experts.share(config.intermediate_size, "intermediate_size")
    mesh.experts.share(config.moe_intermediate_size, "moe_intermediate_size")


def has_draft_layer(config: ModelConfig, has_any: Callable[[str], bool] | None) -> bool:
    """Whether a checkpoint has any of the layers that draft which its config.json declares. `has_any`: whether any of
    its tensors begins so; None, where the files are not there, takes the config at its word."""
    prefixes = FAMILIES[config.model_type].draft_prefixes(config)
    return config.draft_layers > 0 and (has_any is None or any(map(has_any, prefixes)))


def _ignored(family: Family, config: ModelConfig, draft_layer: bool, undeclared: list[str]) -> list[str]:
    ignored = family.ignored(config)
    if config.tied_embeddings:
        ignored.append(f"^{re.escape(family.tensor('lm_head.weight'))}(_|$)")
    if not draft_layer and config.draft_layers:
        undeclared = [*undeclared, *family.draft_prefixes(config)]
    ignored += [f"^{re.escape(prefix)}" for prefix in undeclared]
    # What repeats the model's embedding and head is not wanted.
    ignored += [f"^{re.escape(name)}(_|$)" for name in _copies(family, config)]
    return ignored


def _copies(family: Family, config: ModelConfig) -> dict[str, str]:
    """The matrices of the draft layer that published checkpoints repeat, each with the one that it repeats, by the
    checkpoint's names."""
    prefix, embedding = f"model.layers.{config.num_layers}.", "model.embed_tokens.weight"
    head = embedding if config.tied_embeddings else "lm_head.weight"
    pairs = {f"{prefix}embed_tokens.weight": embedding, f"{prefix}shared_head.head.weight": head}
    return {family.tensor(name): family.tensor(other) for name, other in pairs.items()}
