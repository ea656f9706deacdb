"""Two and four ranks over gloo give the tokens that one rank gives."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from paged import CPU, Paged, greedy, load_fp32
from rank_processes import run_ranks
from rounded_latents import latents_rounded
from tiny_models import VOCAB, add_draft_tables, random_tokens, write_tiny

from workers.families import load_model
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

PROMPTS = [random_tokens(count, count, VOCAB) for count in (1, 40, 130)]
OWN = "v3-one-group"
"""Kind whose draft layer has an embedding and a head of its own, which only the last rank's rows show."""
KINDS = [
    *("v3-yarn", "v2-no-q-lora", "v3-tied", "glm", "glm5", "youtu", "sarvam", "axk1", "axk1-no-bias"),
    *("axk2", "axk2-groups", "hyv4", "hyv4-vl", "mistral4", "mistral4-dense", OWN),
]


QUICK = ["v3-yarn", "glm5", "youtu", "axk1", "axk2", "hyv4", "mistral4", OWN]


def written(folder: Path, kind: str) -> Path:
    write_tiny(folder, kind, seed=2)
    if kind == OWN:
        add_draft_tables(folder, first_row=VOCAB - 20)
    return folder


def generate(folder: Path, group: Group) -> dict[str, object]:
    """Greedy tokens, and logits and draft logits over a prompt."""
    model = load_fp32(folder, group)
    paged = Paged(model, [PROMPTS[1]])
    step = paged.plan([], 1, [(0, 39)])
    hidden = paged.forward(step)
    result = {"tokens": greedy(model, PROMPTS, 32), "logits": model.logits(hidden[0])}
    if model.drafter:
        result["drafts"] = model.drafter.logits(paged.draft(step, hidden)[0])
    return result


def fed(folder: Path, group: Group) -> dict[str, object]:
    """Logits, and the draft layer's, of a prompt on an FP8 cache, few tokens fed as a decode row; and of the same model
    on a plain one, whose latents are rounded."""
    found: dict[str, object] = {"tokens": []}
    for fp8, name in ((True, "cached in FP8"), (False, "rounded")):
        model = load_model(folder, group=group, dtype=torch.float32, device=CPU, max_positions=512, fp8_cache=fp8)
        paged, logits = Paged(model, [PROMPTS[2]]), []
        with nullcontext() if fp8 else latents_rounded():
            for count in (60, 5, 40, 3):
                step = paged.plan([], 1, [(0, count)]) if count > 8 else paged.plan([0], count, [])
                hidden = paged.forward(step)
                logits += [model.logits(hidden[0]), model.drafter.logits(paged.draft(step, hidden)[0])]
        found[name] = torch.cat(logits)
    return found


def rank_main(rank: int, size: int, folder: Path, kinds: list[str]) -> None:
    torch.set_num_threads(1)
    group = Group.connect(Mesh.of(rank, size), f"file://{folder}/rendezvous", CPU, timeout_s=60)
    try:
        found = {kind: generate(folder / kind, group) for kind in kinds}
        found["FP8 cache"] = fed(folder / "v3-yarn", group)
        torch.save(found, folder / f"rank{rank}.pt")
    finally:
        group.close()


@pytest.mark.parametrize(
    ("size", "kinds"),
    [
        pytest.param(2, QUICK, marks=pytest.mark.long, id="2-quick"),
        pytest.param(2, KINDS, marks=pytest.mark.soak, id="2"),
        pytest.param(4, KINDS, marks=pytest.mark.long, id="4"),
    ],
)
def test_ranks_agree_with_one(size: int, kinds: list[str], tmp_path: Path) -> None:
    alone = {kind: generate(written(tmp_path / kind, kind), Group()) for kind in kinds}
    run_ranks(rank_main, size, size, tmp_path, kinds)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(size)]
    for rank in ranks:
        fp8 = rank["FP8 cache"]
        torch.testing.assert_close(fp8["cached in FP8"], fp8["rounded"], atol=1e-4, rtol=0)
        assert torch.equal(fp8["rounded"], ranks[0]["FP8 cache"]["rounded"]), "ranks differ"
    for kind, want in alone.items():
        for rank in ranks:
            assert rank[kind]["tokens"] == want["tokens"]
            assert rank[kind].keys() == want.keys()
            for name in want.keys() - {"tokens"}:
                assert rank[kind][name].shape[-1] == VOCAB
                assert torch.equal(rank[kind][name], ranks[0][kind][name]), "ranks differ"
                torch.testing.assert_close(rank[kind][name], want[name], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("overrides", "size", "field"),
    [
        ({}, 3, "num_attention_heads = 4"),
        ({"intermediate_size": 66}, 4, "intermediate_size = 66"),
        ({"moe_intermediate_size": 18}, 4, "moe_intermediate_size = 18"),
    ],
)
def test_sizes_that_do_not_divide_are_named(overrides: dict[str, int], size: int, field: str, tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", **overrides)
    with pytest.raises(ValueError, match=f"^{field} is not divisible by the {size} ranks of the axis"):
        load_model(folder, group=Group(Mesh.of(0, size)), dtype=torch.float32, device=CPU, max_positions=64)
