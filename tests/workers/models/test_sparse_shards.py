"""Ranks that share out the pages of one cache select, in sparse attention, what one rank selects that has the whole
cache, and compute what it computes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import CPU, Paged
from rank_processes import run_ranks
from tiny_models import SPARSE_KINDS, VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.models.attention import sparse_rows
from workers.models.choices import Recorded
from workers.models.model import Model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

SEQUENCES = [random_tokens(count, count, VOCAB) for count in (1, 15, 17, 63, 65, 129, 300)]
"""Fewer tokens than are attended to, one page, several: some shards have nothing of most rows."""
CHUNKINGS = {"whole": [300], "chunks": [100, 64, 136], "small": [70, 5, 1, 90, 134]}


def computed(folder: Path, group: Group, chunking: str, *, fp8: bool = False) -> dict[str, Any]:
    """Logits, the draft layer's where there is one, and what each layer's tokens select: of prompts in chunks, of mixed
    steps, and of decode rows of all widths. The cache holds NaN wherever nothing was written."""
    model = load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=512, fp8_cache=fp8)
    layers = [*model.layers, *([] if model.drafter is None else [model.drafter.layer])]
    if layers[0].attention.heads.sink_H is None:
        heads = model.config.num_heads
        sink_H = torch.linspace(-2.0, 3.0, heads)[group.mesh.heads.share(heads, "heads")].clone()
        for layer in layers:
            layer.attention.heads = replace(layer.attention.heads, sink_H=sink_H)
    # Of fewer tokens fewer numbers lie so near to the border of two codes of FP8 that rounding moves one over.
    sequences = SEQUENCES[2:-1:2] if fp8 else SEQUENCES
    paged, found = Paged(model, [tokens + random_tokens(40, 7, VOCAB) for tokens in sequences]), {}
    rows, recorded = list(range(len(sequences))), Recorded()

    def step(name: str, decode: list[int], width: int, prefill: list[tuple[int, int]]) -> None:
        planned = paged.plan(decode, width, prefill)
        with model.paths.choosing(recorded):
            hidden = paged.forward(planned)
        drafted = {} if model.drafter is None else paged.draft(planned, hidden)
        for row in hidden:
            found[f"{name} of {row}"] = model.logits(hidden[row])
            if model.drafter is not None:
                found[f"{name} of {row}, drafts"] = model.drafter.logits(drafted[row])

    for index, count in enumerate(CHUNKINGS[chunking]):
        left = [(row, max(0, min(count, len(sequences[row]) - paged.rows[row].written))) for row in rows]
        decode = [row for row, own in left if not own][:2]
        step(f"chunk {index}", decode, 2, [(row, own) for row, own in left if own])
    for width in (1, 2, 4, 8):
        step(f"width {width}", rows, width, [])
    return {"logits": found | short_rows(model), "selected": recorded.selected}


def short_rows(model: Model) -> dict[str, Tensor]:
    """Logits of rows that are so short that they may attend densely, and do so in one of two equal steps."""
    paged, found = Paged(model, [random_tokens(16, count, VOCAB) for count in range(3)], seed=1), {}
    paged.forward(paged.plan([], 1, [(0, 3), (1, 10), (2, 1)]))
    for width in (1, 3):
        step = paged.plan([0, 1, 2], width, [])
        tokens = [t for f in step.feeds for t in paged.rows[f.row].tokens[f.start : f.start + width]]
        dense = replace(paged.batch(step, 0), dense=True)
        hidden = model.forward(torch.tensor(tokens), dense, paged.cache)
        again = torch.cat(list(paged.forward(step).values()))
        torch.testing.assert_close(hidden, again, atol=2e-5, rtol=2e-5)
        found[f"short rows of width {width}"] = model.logits(hidden)
    return found


def rank_main(rank: int, size: int, shards: int, folder: Path, chunking: str, fp8: bool, few: bool) -> None:
    torch.set_num_threads(1)
    if few:
        sparse_rows.SELECTING, sparse_rows.QUERIES = 20, 60  # type: ignore[misc]
    group = Group.connect(Mesh.of(rank, size, cache=shards), f"file://{folder}/rendezvous{shards}", CPU, timeout_s=60)
    try:
        torch.save(computed(folder / "model", group, chunking, fp8=fp8), folder / f"shards{shards}rank{rank}.pt")
    finally:
        (folder / f"rendezvous{shards}").unlink(missing_ok=True)
        group.close()


def on_ranks(
    folder: Path, size: int, shards: int, chunking: str, *, fp8: bool = False, few: bool = False
) -> dict[str, Any]:
    """What all of the ranks have computed: they agree bit for bit."""
    run_ranks(rank_main, size, size, shards, folder, chunking, fp8, few)
    first, *others = [torch.load(folder / f"shards{shards}rank{rank}.pt") for rank in range(size)]
    for other in others:
        assert all(torch.equal(other["logits"][name], logits) for name, logits in first["logits"].items())
        assert all(map(torch.equal, other["selected"], first["selected"]))
    return first


def check(found: dict[str, Any], want: dict[str, Any], what: str) -> None:
    for name, logits in want["logits"].items():
        torch.testing.assert_close(found["logits"][name], logits, atol=2e-4, rtol=2e-4, msg=f"{what}: {name}")
    assert len(found["selected"]) == len(want["selected"]) > 0
    for ours, theirs in zip(found["selected"], want["selected"], strict=True):
        assert torch.equal(sorted_positions(ours), sorted_positions(theirs)), what


def sorted_positions(selected_TS: Tensor) -> Tensor:
    return selected_TS.sort(1).values


@pytest.mark.parametrize(
    ("kind", "size", "chunking"),
    [
        pytest.param("v32", 2, "chunks", marks=pytest.mark.long),
        pytest.param("glm5", 4, "small", marks=pytest.mark.long),
        pytest.param("axk2", 2, "small", marks=pytest.mark.long),
        pytest.param("hyv4", 4, "chunks", marks=pytest.mark.long),
        *(
            pytest.param(kind, size, chunking, marks=pytest.mark.soak)
            for kind in SPARSE_KINDS
            for size in (2, 4)
            for chunking in CHUNKINGS
            if (kind, size, chunking)
            not in [("v32", 2, "chunks"), ("glm5", 4, "small"), ("axk2", 2, "small"), ("hyv4", 4, "chunks")]
        ),
    ],
)
def test_shards_change_neither_what_is_selected_nor_logits(kind: str, size: int, chunking: str, tmp_path: Path) -> None:
    """Planted faults that this finds: a tie goes to the first shard; the draft layer's entry that is not there takes a
    place on a shard that does not have it; layers that share a selection attend to what their rank has of another one;
    a shard attends to an entry of others as if it were the null page's; a sink that each shard adds."""
    folder = write_tiny(tmp_path / "model", kind, seed=2)
    alone = computed(folder, Group(), chunking)
    for shards in (2, 4)[: size.bit_length() - 1]:
        check(on_ranks(tmp_path, size, shards, chunking), alone, f"{shards} shards")


@pytest.mark.long
def test_fp8_entries_in_turns(tmp_path: Path) -> None:
    """Latents in FP8 and index keys in INT8, few tokens at once. It is compared with whole caches on as many ranks: a
    sum over another number of ranks may bring a number to the next code."""
    write_tiny(tmp_path / "model", "glm5", seed=2)
    whole, shared = (on_ranks(tmp_path, 2, shards, "chunks", fp8=True, few=True) for shards in (1, 2))
    check(shared, whole, "FP8")


@pytest.mark.long
def test_ties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An indexer of one head scores exactly 0 wherever its product is below 0, so that positions decide."""
    folder, select, tied = (
        write_tiny(tmp_path / "model", "v32", seed=2, index_n_heads=1),
        sparse_rows.select_positions,
        0,
    )

    def selecting(score_TN: Tensor, bound_T: Tensor, selected_TS: Tensor, *rest: Any, **options: Any) -> None:
        nonlocal tied
        for score_N, bound in zip(score_TN, bound_T.tolist(), strict=True):
            if bound > selected_TS.shape[1]:
                best = score_N[:bound].sort(descending=True).values
                tied += bool(best[selected_TS.shape[1] - 1] == best[selected_TS.shape[1]])
        select(score_TN, bound_T, selected_TS, *rest, **options)

    monkeypatch.setattr(sparse_rows, "select_positions", selecting)
    alone = computed(folder, Group(), "chunks")
    assert tied > 100
    check(on_ranks(tmp_path, 2, 2, "chunks"), alone, "ties")
