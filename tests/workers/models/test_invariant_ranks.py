"""Bits of invariant mode on two, four and eight ranks over gloo are those of one rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from paged import CPU, Paged
from rank_processes import run_ranks
from tiny_models import VOCAB, random_tokens, write_tiny
from torch import Tensor

from workers.config import DEMO_MODEL
from workers.families import load_model
from workers.models import invariant
from workers.models.attention import absorbed_chunks
from workers.models.invariant import DeterministicOps
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

PROMPTS = [random_tokens(count, count, VOCAB) for count in (90, 41, 9)]
KINDS = ["v3-yarn", "v2-no-q-lora", "v3-tied", "axk1", "axk2", "hyv4", "mistral4"]


def outputs(folder: Path, group: Group, dtype: torch.dtype) -> dict[str, Tensor]:
    """Logits of chunks, of a mixed step and of its draft layer."""
    model = load_model(folder, group=group, dtype=dtype, device=CPU, max_positions=512, invariant=True)
    paged = Paged(model, PROMPTS)
    result = {}
    for index, (decode, prefill) in enumerate([([], [(0, 33), (1, 37)]), ([1], [(2, 8), (0, 40)])]):
        step = paged.plan(decode, 3, prefill)
        hidden = paged.forward(step)
        result |= {f"logits {index} {row}": model.logits(x) for row, x in hidden.items()}
        if model.drafter:
            drafted = paged.draft(step, hidden)
            result |= {f"drafts {index} {row}": model.drafter.logits(x) for row, x in drafted.items()}
    return result


def cases(folder: Path) -> dict[str, tuple[Path, torch.dtype]]:
    tiny = {kind: (write_tiny(folder / kind, kind, seed=2), torch.float32) for kind in KINDS}
    return {**tiny, "demo": (DEMO_MODEL, torch.float32), "demo in bf16": (DEMO_MODEL, torch.bfloat16)}


def rank_main(rank: int, size: int, folder: Path, wanted: dict[str, tuple[Path, torch.dtype]]) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        torch.save({name: outputs(path, group, dtype) for name, (path, dtype) in wanted.items()}, folder / f"{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    "size",  # models of every feature are compared on two ranks in tests/workers/parallel/test_rank_features.py
    [pytest.param(size, marks=pytest.mark.soak if size == 2 else pytest.mark.long) for size in (2, 4, 8)],
)
def test_ranks_give_the_bits_of_one(size: int, tmp_path: Path) -> None:
    wanted = {name: case for name, case in cases(tmp_path).items() if size < 8 or name.startswith("demo")}
    alone = {name: outputs(path, Group(), dtype) for name, (path, dtype) in wanted.items()}
    run_ranks(rank_main, size, size, tmp_path, wanted)
    for rank in range(size):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, want in alone.items():
            assert found[name].keys() == want.keys()
            for what, logits in want.items():
                assert logits.isfinite().all()
                assert torch.equal(found[name][what], logits), f"{name}: {what} of rank {rank}"


def test_parts_that_take_turns_change_no_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts attend, and many tokens go through experts, some at a time."""
    folder = write_tiny(tmp_path, "v3-yarn", seed=2)
    want = outputs(folder, Group(), torch.float32)
    monkeypatch.setattr(absorbed_chunks, "PIECES", 2)
    monkeypatch.setattr(invariant, "PART_BYTES", 1)
    for name, logits in outputs(folder, Group(), torch.float32).items():
        assert torch.equal(logits, want[name])


@pytest.mark.parametrize("size", [3, 6, 16])
def test_other_numbers_of_ranks_have_no_tree(size: int) -> None:
    with pytest.raises(ValueError, match=f"tensor_parallel = {size} is none of them"):
        DeterministicOps(Group(Mesh.of(0, size)))
