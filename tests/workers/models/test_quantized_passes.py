"""Results of a model whose checkpoint is quantized, against transformers' model of a plain checkpoint of the same
numbers: on every path that a pass may take, and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle, oracle_logits
from paged import ALONE, CPU
from quantized_pairs import CHECKPOINTS, PROMPTS, WIDE, checkpoints, logits
from rank_processes import run_ranks
from torch import Tensor

from workers.families import load_model
from workers.models.execution_paths import ExecutionPaths
from workers.models.general import DecodeOps, GeneralOps
from workers.models.small_batch import SmallBatchOps
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, MXFP8

TOLERANCE = 1e-4
"""Tolerance of logits, relative to their typical size: sums in fp32 in another order."""


def near(got: Tensor, want: Tensor) -> bool:
    return float((got - want).abs().max()) <= TOLERANCE * float(want.square().mean().sqrt())


PATHS = ["few", "decode rows", "any", "invariant"]
QUICK = ("fp8", "fp8 without query latent", "int4")
"""Checkpoints that `make test` tries on every path; with the others it tries the first path that they take."""
GENERAL = ("fp8 of A.X K2", "mxfp8 of Hy4")
"""Checkpoints of models that do not take the small-batch path."""


@pytest.mark.parametrize(
    ("path", "name"),
    [
        pytest.param(path, name, marks=() if name in QUICK or path == PATHS[name in GENERAL] else pytest.mark.long)
        for path in PATHS
        for name in CHECKPOINTS
        if path != "few" or name not in GENERAL
    ],
)
def test_logits_on_every_path(name: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantized, twin = checkpoints(tmp_path, name, **(WIDE if path == "invariant" else {}))
    model = load_model(
        quantized, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512, invariant=path == "invariant"
    )
    form = {"int4": INT4_GROUPS, "mxfp8 of Hy4": MXFP8}.get(name, FP8_BLOCKS)
    assert model.layers[1].feed_forward.mixture.gate_up_XFE.format is form
    taken: list[type] = []
    kinds = {"few": SmallBatchOps, "decode rows": DecodeOps, "any": GeneralOps, "invariant": type(model.paths.any)}
    plain = ExecutionPaths.of

    def chosen(self: ExecutionPaths, *about: Any) -> Any:
        found = plain(self, *about) if path != "any" else self.any
        taken.append(type(found))
        return found

    monkeypatch.setattr(ExecutionPaths, "takes_small_batch", lambda *_: path == "few")
    monkeypatch.setattr(ExecutionPaths, "of", chosen)
    got = logits(model)
    assert kinds[path] in taken
    oracle = load_oracle(twin)
    for ours, prompt in zip(got, PROMPTS, strict=False):
        assert near(ours, oracle_logits(oracle, prompt)[: len(ours)])


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        found = {}
        for name in CHECKPOINTS:
            place = folder / name / "quantized"
            model = load_model(place, group=group, dtype=torch.float32, device=CPU, max_positions=512)
            found[name] = logits(model)
            if name == "int4":
                few = pytest.MonkeyPatch()
                few.setattr(ExecutionPaths, "takes_small_batch", lambda *_: True)
                found["int4, few"] = logits(model)
                few.undo()
        torch.save(found, folder / f"rank{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    "size",  # two ranks serve quantized weights in tests/workers/parallel/test_rank_features.py
    [pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.long)],
)
def test_ranks_agree_with_the_plain_checkpoint(size: int, tmp_path: Path) -> None:
    """Shares of ranks begin in the middle of blocks, or outside of any. Drafts included."""
    want = {}
    for name in CHECKPOINTS:
        _, twin = checkpoints(tmp_path / name, name)
        want[name] = logits(load_model(twin, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512))
    want["int4, few"] = want["int4"]
    run_ranks(rank_main, size, size, tmp_path)
    for rank in range(size):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        assert found.keys() == want.keys()
        for name, parts in want.items():
            assert all(near(ours, theirs) for ours, theirs in zip(found[name], parts, strict=True)), name


def test_a_twin_is_not_quantized(tmp_path: Path) -> None:
    """The comparison would otherwise compare nothing."""
    quantized, twin = checkpoints(tmp_path, "fp8")
    assert "quantization_config" in json.loads((quantized / "config.json").read_text())
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
