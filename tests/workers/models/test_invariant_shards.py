"""Bits of invariant mode where ranks share out one latent cache are those of one rank that has all of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from paged import CPU, Paged
from rank_processes import run_ranks
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from kernels.mla_decode import invariant
from workers.config import DEMO_MODEL
from workers.families import load_model
from workers.models.attention import absorbed_chunks
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

PROMPTS = [random_tokens(count, count, VOCAB) for count in (600, 129, 64, 9)]
CHUNKS = ((590, 100, 60, 0), (0, 29, 0, 8))
"""Tokens of every prompt that the first two steps feed."""


@dataclass(frozen=True)
class Case:
    """A model, and how it is cached."""

    folder: Path
    dtype: torch.dtype = torch.float32
    fp8: bool = False
    sinks: bool = False
    """Whether each head has a sink."""
    piece_pages: int = 1
    """Pages of a piece: one, so that few tokens have pieces of every strand, or as many as there are."""


def outputs(case: Case, group: Group) -> dict[str, Tensor]:
    """Logits of chunks, of a mixed step, of drafts over pages' borders, and those of the draft layer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(invariant, "PIECE_PAGES", case.piece_pages)
        patch.setattr(absorbed_chunks, "WIDEST", 64)  # fewer rows, which references take one by one
        return outputs_as_set(case, group)


def outputs_as_set(case: Case, group: Group) -> dict[str, Tensor]:
    """`outputs`, with the module constants as they are."""
    settings = {"dtype": case.dtype, "device": CPU, "max_positions": 1024, "invariant": True, "fp8_cache": case.fp8}
    model = load_model(case.folder, group=group, **settings)
    if case.sinks and model.drafter is not None:
        heads = model.config.num_heads
        sink_H = torch.linspace(-2.0, 3.0, heads)[group.mesh.heads.share(heads, "heads")].clone()
        for layer in (*model.layers, model.drafter.layer):
            layer.attention.heads = replace(layer.attention.heads, sink_H=sink_H)
    paged, found = Paged(model, [tokens + random_tokens(20, 7, VOCAB) for tokens in PROMPTS]), {}
    steps = [([], CHUNKS[0]), ([2], CHUNKS[1]), ([0, 1], (0, 0, 0, 0))]
    for index, (decode, counts) in enumerate(steps):
        step = paged.plan(decode, 3, [(row, count) for row, count in enumerate(counts) if count])
        hidden = paged.forward(step)
        found |= {f"logits {index} {row}": model.logits(x) for row, x in hidden.items()}
        if model.drafter:
            drafted = paged.draft(step, hidden)
            found |= {f"drafts {index} {row}": model.drafter.logits(x) for row, x in drafted.items()}
    return found


def cases(folder: Path, wanted: Iterable[str]) -> dict[str, Case]:
    v3 = write_tiny(folder / "v3", "v3-yarn", seed=2)
    found = {
        "v3": Case(v3),
        "v3 with pieces as they are": Case(v3, piece_pages=8),
        "v3 in FP8": Case(v3, fp8=True),
        "v3 with sinks": Case(v3, sinks=True),
        "v32": Case(write_tiny(folder / "v32", "v32", seed=2)),
        "v32 in FP8": Case(write_tiny(folder / "v32", "v32", seed=2), fp8=True),
        "glm5": Case(write_tiny(folder / "glm5", "glm5", seed=2)),
        "hyv4": Case(write_tiny(folder / "hyv4", "hyv4", seed=2)),
        "demo in bf16": Case(DEMO_MODEL, torch.bfloat16),
    }
    return {name: found[name] for name in wanted}


def rank_main(rank: int, size: int, shards: int, folder: Path, wanted: dict[str, Case]) -> None:
    torch.set_num_threads(1)
    mesh = Mesh.of(rank, size, cache=shards)
    group = Group.connect(mesh, f"file://{folder}/rendezvous{shards}", CPU, timeout_s=60)
    try:
        found = {name: outputs(case, group) for name, case in wanted.items()}
        torch.save(found, folder / f"{shards}_{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    ("size", "counts", "names"),
    [
        pytest.param(2, [2], ["v3 in FP8", "demo in bf16"], marks=pytest.mark.long),
        pytest.param(4, [2, 4], ["v3 with sinks"], marks=pytest.mark.long),
        pytest.param(2, [2], ["v32 in FP8"], marks=pytest.mark.long),
        pytest.param(4, [2, 4], ["v32", "glm5", "hyv4"], marks=pytest.mark.soak),
        pytest.param(4, [2, 4], ["v3", "v3 in FP8", "v3 with pieces as they are"], marks=pytest.mark.soak),
    ],
)
def test_shards_give_the_bits_of_one_rank(size: int, counts: list[int], names: list[str], tmp_path: Path) -> None:
    """Planted faults that this finds: strands rotated; the owner of a page for that of the one before, which brings it
    to another strand; a shard without entries has a log-sum-exp of 0."""
    wanted = cases(tmp_path, names)
    alone = {name: outputs(case, Group()) for name, case in wanted.items()}
    for shards in counts:
        run_ranks(rank_main, size, size, shards, tmp_path, wanted)
        for rank in range(size):
            found = torch.load(tmp_path / f"{shards}_{rank}.pt")
            for name, want in alone.items():
                assert found[name].keys() == want.keys()
                for what, logits in want.items():
                    assert logits.isfinite().all()
                    assert torch.equal(found[name][what], logits), f"{name}: {what} of rank {rank} of {shards} shards"
