"""Draft models: layers in a folder of their own, which were trained to draft for a model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.models.drafter import Drafter
    from workers.models.model import Model
    from workers.weights.checkpoint import Checkpoint
    from workers.weights.kept import KeptWeights
    from workers.weights.source import DryRun, WeightSource


class DraftModel(ABC):
    """What a draft model's folder says of it, without its weights. Fitting the model that it drafts for was checked
    when it was read. Equal ones, as their `repr` has it, are built of the same files in the same way."""

    folder: Path

    @abstractmethod
    def ignored(self) -> list[str]:
        """Patterns (`re.search`) of tensors that its files may have and nobody reads."""

    def stored(self, checkpoint: Checkpoint) -> Callable[[str], str]:
        """Return the function that maps the name of a tensor that `build` asks for to its name in the files."""
        return str

    def check(self, checkpoint: Checkpoint, model: Model) -> None:  # noqa: B027 - most have nothing else to check
        """`WeightsError` where numbers in the files, whose names and shapes are right, do not fit `model`."""

    @abstractmethod
    def build(self, source: WeightSource, model: Model, checkpoint: Checkpoint, *, fp8_cache: bool) -> Drafter:
        """Build the drafter of this rank; without memory where `source` has none."""


def load_draft_model(
    draft: DraftModel,
    model: Model,
    *,
    fp8_cache: bool = False,
    progress: Callable[[str], None] | None = None,
    kept: KeptWeights | None = None,
) -> Drafter:
    """Load this rank's share of a draft model for `model`, on its device and in its dtype. Collective. Raises as
    `load_model` does, which also says what `kept` is."""
    from workers.weights.checkpoint import Checkpoint
    from workers.weights.kept import KeptSource
    from workers.weights.loading_progress import LoadingProgress
    from workers.weights.memory_check import check_memory
    from workers.weights.reader import CheckpointReader

    device, dtype, invariant = model.norm_E.device, model.norm_E.dtype, model.paths.invariant
    with Checkpoint.open(draft.folder) as checkpoint:
        dry_run = _dry_run(draft, model, checkpoint)
        draft.build(dry_run, model, checkpoint, fp8_cache=fp8_cache)
        checkpoint.verify(dry_run.wanted, draft.ignored())
        draft.check(checkpoint, model)
        mesh, stored = model.group.mesh, draft.stored(checkpoint)
        shelf = None
        if kept is not None:
            shelf = kept.shelf("draft model", (draft, checkpoint.identity(), dtype, invariant))
            if (held := shelf.adopt(lambda own: dry_run.census)) is not None:
                source = KeptSource(held, mesh, dtype, device, stored, checkpoint.dtype_of, invariant)
                drafter = draft.build(source, model, checkpoint, fp8_cache=fp8_cache)
                source.finish(model.group.minimum)
                return drafter
        check_memory(dry_run.bytes + dry_run.beside, model.group, device)
        told = LoadingProgress(dry_run.bytes, progress)
        arena = None if shelf is None else shelf.arena(dry_run.census)
        with CheckpointReader(checkpoint, mesh, dtype, device, told, stored, invariant, arena=arena) as reader:
            reader.progress("draft model")
            drafter = draft.build(reader, model, checkpoint, fp8_cache=fp8_cache)
            reader.finish(model.group.minimum)
        told.end()
        if shelf is not None and arena is not None:
            shelf.hand_over(arena)
        return drafter


def counted_draft_model(draft: DraftModel, model: Model, *, fp8_cache: bool) -> tuple[Drafter, DryRun]:
    """The draft model without memory, for a `model` that has none either, and the dry run that says what it wants. The
    files must be there."""
    from workers.weights.checkpoint import Checkpoint

    with Checkpoint.open(draft.folder) as checkpoint:
        dry_run = _dry_run(draft, model, checkpoint)
        return draft.build(dry_run, model, checkpoint, fp8_cache=fp8_cache), dry_run


def _dry_run(draft: DraftModel, model: Model, checkpoint: Checkpoint) -> DryRun:
    from workers.weights.source import DryRun

    mesh, dtype, invariant = model.group.mesh, model.norm_E.dtype, model.paths.invariant
    return DryRun(mesh, dtype, draft.stored(checkpoint), checkpoint.dtype_of, invariant)
