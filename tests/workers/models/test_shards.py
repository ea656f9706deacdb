"""Ranks that share out the pages of one cache compute what one rank computes that has all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paged import CPU, Paged
from rank_processes import run_ranks
from tiny_models import VOCAB, random_tokens, write_tiny

from kernels.shard_exchange import merge_parts
from workers.families import load_model
from workers.memory.scratch import Scratch
from workers.models.attention.expanded import ContextPiece, ExpandedChunks, PrefillGeometry
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh


def parts(count: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    return torch.randn(count, 5, 3, 8), 4 * torch.randn(count, 5, 3)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_merged_parts_are_weighted_by_their_sums_of_exponentials(count: int) -> None:
    """A planted fault: log-sum-exps to the base of 2."""
    out, lse = parts(count)
    into = torch.full((5, 3, 8), torch.nan)
    total = merge_parts(out, lse, into)
    weight = lse.double().softmax(0).unsqueeze(-1)
    torch.testing.assert_close(into.double(), (weight * out).sum(0), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(total.double(), lse.double().logsumexp(0), atol=1e-6, rtol=1e-6)


def test_empty_shards_count_for_nothing() -> None:
    """A planted fault: -inf less -inf is NaN."""
    out, lse = parts(4)
    empty = torch.rand(4, 5, 3) < 0.6
    empty[:, 0] = True
    into, alone = torch.full((5, 3, 8), torch.nan), torch.full((5, 3, 8), torch.nan)
    total = merge_parts(out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf), into)
    assert (into[0] == 0).all()
    assert (total[0] == -torch.inf).all()
    for t in range(1, 5):
        for h in range(3):
            rest = ~empty[:, t, h]
            if rest.any():
                weight = lse[rest, t, h].double().softmax(0).unsqueeze(-1)
                want = (weight * out[rest, t, h]).sum(0)
                torch.testing.assert_close(into[t, h].double(), want, atol=1e-6, rtol=1e-6)
    merge_parts(out[:1], lse[:1], alone)
    torch.testing.assert_close(alone, out[0])


@pytest.mark.parametrize("group", [Group(), Group(Mesh.of(0, 2, cache=2))], ids=["whole", "shared"])
def test_pieces_of_context_share_their_memory(group: Group) -> None:
    """What is reserved is one piece's. A planted fault: each takes what it exchanges for itself."""

    def taken(count: int) -> int:
        cu_B1 = torch.tensor([0, 128], dtype=torch.int32)
        pieces = tuple(ContextPiece(128 * index, cu_B1, 128, 128) for index in range(count))
        pages_BP = torch.arange(1, 1 + 2 * count, dtype=torch.int32).unsqueeze(0)
        geometry = PrefillGeometry(torch.tensor([0, 8], dtype=torch.int32), 8, pages_BP, pieces)
        scratch, sizes = Scratch(torch.device("meta")), ((8, 2, 24), (8, 24), (8, 2, 32), (8, 2, 16))
        ExpandedChunks.of(*map(torch.empty, sizes), geometry, 16, scratch, group.sharing)
        return scratch.peak

    assert taken(1) == taken(3) > 0


SEQUENCES = [random_tokens(count, count, VOCAB) for count in (1, 63, 64, 65, 127, 129, 300)]


def computed(folder: Path, group: Group, *, fp8: bool = False) -> dict[str, torch.Tensor]:
    """Logits, and the draft layer's, of prompts in chunks, and of decode rows of all widths and mixed steps behind
    them, over the pages' borders, with a sink for each head. The cache holds NaN wherever nothing was written."""
    model = load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=512, fp8_cache=fp8)
    heads = model.config.num_heads
    sink_H = torch.linspace(-2.0, 3.0, heads)[group.mesh.heads.share(heads, "heads")].clone()
    for layer in (*model.layers, model.drafter.layer):
        layer.attention.heads = replace(layer.attention.heads, sink_H=sink_H)
    known = [tokens + random_tokens(40, 7, VOCAB) for tokens in SEQUENCES]
    paged, found = Paged(model, known), {}
    rows = list(range(len(known)))

    def step(name: str, decode: list[int], width: int, prefill: list[tuple[int, int]]) -> None:
        planned = paged.plan(decode, width, prefill)
        hidden = paged.forward(planned)
        drafted = paged.draft(planned, hidden)
        for row in (*decode, *(row for row, _ in prefill)):
            found[f"{name} of {row}"] = model.logits(hidden[row])
            found[f"{name} of {row}, drafts"] = model.drafter.logits(drafted[row])

    step("prompts", [], 1, [(row, min(len(SEQUENCES[row]), 100)) for row in rows])
    step("second chunks beside decode rows", rows[:4], 3, [(row, len(SEQUENCES[row]) - 100) for row in rows[4:]])
    for width in (1, 2, 4, 8):
        step(f"width {width}", rows, width, [])
    return found


def rank_main(rank: int, size: int, shards: int, folder: Path, fp8: bool) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size, cache=shards), f"file://{folder}/rendezvous{shards}", CPU, timeout_s=60)
    try:
        torch.save(computed(folder / "v3", group, fp8=fp8), folder / f"shards{shards}rank{rank}.pt")
    finally:
        group.close()


def on_ranks(folder: Path, size: int, shards: int, *, fp8: bool = False) -> dict[str, torch.Tensor]:
    run_ranks(rank_main, size, size, shards, folder, fp8)
    first, *others = [torch.load(folder / f"shards{shards}rank{rank}.pt") for rank in range(size)]
    for other in others:
        assert all(torch.equal(other[name], logits) for name, logits in first.items())
    return first


@pytest.mark.parametrize(
    ("size", "counts"),
    [
        pytest.param(2, [2], marks=pytest.mark.long, id="2 ranks"),
        pytest.param(4, [2, 4], marks=pytest.mark.long, id="4 ranks"),
    ],
)
def test_draft_layer_sharded(tmp_path: Path, size: int, counts: list[int]) -> None:
    """Planted faults that this finds: a sink that each shard adds, or none; the draft pass reads and writes as if it
    had all pages; a border's token is lost; all drafts have the last one's bound; another rank's entry is taken for
    one's own in cached context."""
    alone = computed(write_tiny(tmp_path / "v3", "v3-yarn", seed=2), Group())
    for shards in counts:
        found = on_ranks(tmp_path, size, shards)
        for name, logits in alone.items():
            torch.testing.assert_close(found[name], logits, atol=2e-4, rtol=2e-4, msg=f"{shards} shards: {name}")


@pytest.mark.long
def test_fp8_context(tmp_path: Path) -> None:
    """A planted fault: cached context of FP8 entries is exchanged as if it were numbers. It is compared with whole
    caches on as many ranks: a sum over another number of ranks may bring a number to the next code."""
    write_tiny(tmp_path / "v3", "v3-yarn", seed=2)
    whole, shared = (on_ranks(tmp_path, 2, shards, fp8=True) for shards in (1, 2))
    for name, logits in whole.items():
        torch.testing.assert_close(shared[name], logits, atol=2e-4, rtol=2e-4, msg=name)
