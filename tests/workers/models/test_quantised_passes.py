"""What a model computes whose checkpoint is quantized, against transformers' model of a plain checkpoint of the same
numbers: on every way that a pass may take, and on several ranks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import load_oracle, oracle_logits, random_tokens
from paged import ALONE, CPU, Paged
from quantised_checkpoints import FP8_NAMES, INT4_NAMES, quantise
from rank_processes import run_ranks
from safetensors.torch import save_file
from tiny_models import VOCAB, write_tiny
from torch import Tensor

from workers.families import load_model
from workers.models.few_tokens import FewTokens
from workers.models.many_tokens import DecodeTokens, ManyTokens
from workers.models.model import Model
from workers.models.ways import Ways
from workers.parallel.group import TensorParallel
from workers.weights.weight import Format

TOLERANCE = 1e-4
"""Of logits, relative to their typical size: sums in fp32 in another order."""
SIZES: dict[str, Any] = {
    "hidden_size": 160,
    "intermediate_size": 320,
    "moe_intermediate_size": 192,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 96,
    "kv_lora_rank": 64,
}
"""Which end in the middle of blocks."""
CHECKPOINTS = {
    "fp8": ("v3-yarn", "fp8", FP8_NAMES),
    "fp8 without query latent": ("v2-no-q-lora", "fp8", FP8_NAMES),
    "int4": ("kimi", "int4", INT4_NAMES),
}
PROMPTS = [random_tokens(count, count, VOCAB) for count in (90, 41, 9)]
STEPS: list[tuple[list[int], int, list[tuple[int, int]]]] = [
    ([], 1, [(0, 40), (1, 30)]),
    ([0], 2, [(1, 10), (2, 5)]),
    ([0, 2], 1, []),
    ([0], 7, []),
    ([], 1, [(0, 38)]),
    ([2], 2, []),
]
"""Row 0's prompt and the others' in chunks, alone and beside decode rows, and in steps of decode rows alone."""


def checkpoints(folder: Path, name: str) -> tuple[Path, Path]:
    """A quantized checkpoint, and a plain one of the same numbers."""
    kind, form, names = CHECKPOINTS[name]
    sizes = SIZES if "no-q-lora" not in kind else {**SIZES, "q_lora_rank": None}
    quantised = write_tiny(folder / "quantised", kind, seed=1, **sizes)
    twin = Path(shutil.copytree(quantised, folder / "twin"))
    save_file(quantise(quantised, form, names), twin / "model.safetensors")
    return quantised, twin


def logits(model: Model) -> list[Tensor]:
    """Of every token, and those of the draft layer where there is one."""
    paged = Paged(model, PROMPTS)
    got: list[list[Tensor]] = [[] for _ in PROMPTS]
    drafted = []
    for decode, width, chunks in STEPS:
        step = paged.plan(decode, width, chunks)
        hidden = paged.forward(step)
        for row, states in hidden.items():
            got[row].append(model.logits(states))
        if model.drafter is not None:
            drafted += [model.drafter.logits(states) for states in paged.draft(step, hidden).values()]
    return [torch.cat(parts) for parts in got] + drafted


def near(got: Tensor, want: Tensor) -> bool:
    return float((got - want).abs().max()) <= TOLERANCE * float(want.square().mean().sqrt())


@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.parametrize("way", ["few", "decode rows", "any", "invariant"])
def test_logits_on_every_way(name: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, twin = checkpoints(tmp_path, name)
    model = load_model(
        quantised, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512, invariant=way == "invariant"
    )
    form = Format.INT4_GROUPS if name == "int4" else Format.FP8_BLOCKS
    assert model.layers[1].feed_forward.mixture.gate_up_XFE.format is form
    taken: list[type] = []
    kinds = {"few": FewTokens, "decode rows": DecodeTokens, "any": ManyTokens, "invariant": type(model.ways.any)}
    plain = Ways.of

    def chosen(self: Ways, *about: Any) -> Any:
        found = plain(self, *about) if way != "any" else self.any
        taken.append(type(found))
        return found

    monkeypatch.setattr(Ways, "takes_few", lambda *_: way == "few")
    monkeypatch.setattr(Ways, "of", chosen)
    got = logits(model)
    assert kinds[way] in taken
    oracle = load_oracle(twin)
    for ours, prompt in zip(got, PROMPTS, strict=False):
        assert near(ours, oracle_logits(oracle, prompt)[: len(ours)])


def rank_main(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    group = TensorParallel.connect(rank, size, f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        found = {}
        for name in CHECKPOINTS:
            place = folder / name / "quantised"
            model = load_model(place, group=group, dtype=torch.float32, device=CPU, max_positions=512)
            found[name] = logits(model)
        torch.save(found, folder / f"rank{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_the_plain_checkpoint(size: int, tmp_path: Path) -> None:
    """Whose shares begin in the middle of blocks, or outside of any. Drafts included."""
    want = {}
    for name in CHECKPOINTS:
        _, twin = checkpoints(tmp_path / name, name)
        want[name] = logits(load_model(twin, group=ALONE, dtype=torch.float32, device=CPU, max_positions=512))
    run_ranks(rank_main, size, size, tmp_path)
    for rank in range(size):
        found = torch.load(tmp_path / f"rank{rank}.pt")
        for name, parts in want.items():
            assert all(near(ours, theirs) for ours, theirs in zip(found[name], parts, strict=True)), name


def test_a_twin_is_not_quantized(tmp_path: Path) -> None:
    """Else the comparison would compare nothing."""
    quantised, twin = checkpoints(tmp_path, "fp8")
    assert "quantization_config" in json.loads((quantised / "config.json").read_text())
    assert "quantization_config" not in json.loads((twin / "config.json").read_text())
