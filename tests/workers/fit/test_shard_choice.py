"""The number of ranks that share out a cache, where the settings leave it open."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from published_configs import GLM52, K2, V3, V32
from quantized_checkpoints import FP8_CONFIG, INT4_CONFIG

from workers.config import EngineConfig
from workers.fit.memory_plan import memory_plan
from workers.fit.shard_choice import choose_shards
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.rank.sharing import choose_together
from workers.weights.formats.format import Format
from workers.weights.formats.registry import stored_format
from workers.weights.source import DryRun

GIB = 1 << 30
H200 = int(139.8 * GIB)


def config(folder: Path, values: dict[str, Any], **settings: Any) -> EngineConfig:
    (folder / "config.json").write_text(json.dumps(values))
    return EngineConfig(model=str(folder), cache_shards="auto", **{"tensor_parallel": 8, **settings})


FORMS = ("auto", "fp8")


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        # 64 of 20,480 tokens are 1.3 million, and a rank alone holds 0.6; in FP8 1.07.
        pytest.param("DeepSeek-V3", (4, 2), marks=pytest.mark.long),
        pytest.param("Kimi K2", (2, 1), marks=pytest.mark.long),
        # 64 of 25,344 tokens are 1.6 million.
        pytest.param("GLM-5.2", (8, 4), marks=pytest.mark.long),
    ],
)
def test_published_models_on_8_gpus(tmp_path: Path, name: str, chosen: tuple[int, int]) -> None:
    """A planted fault: only one request has to fit, which V3 has room for on each rank. docs/tune.md has the tokens."""
    models = {"DeepSeek-V3": (V3, FP8_CONFIG), "Kimi K2": (K2, INT4_CONFIG), "GLM-5.2": (GLM52, FP8_CONFIG)}
    values, form = models[name]
    lines = (Path(__file__).parents[3] / "docs" / "tune.md").read_text().splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith(f"| {name}") and "cache in bf16" in line)
    known: DryRun.Known = {}
    for line, kind, shards in zip(lines[first : first + 2], FORMS, chosen, strict=True):
        made = config(tmp_path, {**values, "quantization_config": form}, kv_cache_dtype=kind)
        held = {count: memory_plan(made.shared_out(count), H200, known=known) for count in (1, 2, 4, 8)}
        millions = [f"{plan.tokens / 1e6:.2f}" for plan in held.values()]
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [*millions, str(shards)]
        assert held[shards].wanted_pages < held[shards].pages
        assert all(plan.pages <= plan.wanted_pages for count, plan in held.items() if count < shards)
        choice = choose_shards(made, H200)
        assert choice.shards == shards
        assert f"{held[shards].tokens:,} tokens: a request of {held[shards].asked_context:,}" in choice.words
        assert ("the smallest number with which the cache holds" in choice.words) == (shards > 1)


SMALL = {**V3, "num_hidden_layers": 4}


@pytest.mark.parametrize(
    ("settings", "total", "shards", "why"),
    [
        ({"max_context": 1024}, 80, 1, r"the cache holds [\d,]+ tokens: a request of 1,024 tokens, and 64 of 128"),
        ({"max_rows": 1024}, 28, 8, "the largest number that there may be; .* too few for a request of 163,840"),
        ({"max_rows": 1024, "tensor_parallel": 2}, 48, 2, "the largest number that there may be"),
        ({"max_rows": 1024, "tensor_parallel": 3}, 48, 1, "the largest number that there may be"),
        ({"max_rows": 1024}, 8, 1, "no room for a cache, which shards would not give"),
        # By the plan's estimate they do not fit; a start takes as many as it is told to.
        ({"max_rows": 1024, "cache_pages": 100_000}, 28, 4, r"the smallest number .* each rank alone .* 6,399,936"),
        (
            {"max_rows": 1024, "dtype": "float16"},
            28,
            1,
            r"too few for .* \(cache_shards = 2 does not go with dtype float",
        ),
    ],
)
def test_what_is_chosen_and_why(tmp_path: Path, settings: dict[str, Any], total: int, shards: int, why: str) -> None:
    values = {**SMALL, "num_attention_heads": 96} if settings.get("tensor_parallel") == 3 else SMALL
    sizes = {"intermediate_size": 18432, "moe_intermediate_size": 1536, "vocab_size": 129024}
    values = {**values, **sizes} if settings.get("tensor_parallel") == 3 else values
    made = config(tmp_path, values, **{"token_budget": 2048 + settings.get("max_rows", 0) * 4, **settings})
    choice = choose_shards(made, total * GIB)
    assert choice.shards == shards
    assert re.search(why, choice.words), choice.words


@pytest.mark.parametrize(
    ("topk", "invariant", "shards", "why"),
    [
        (2048, False, 4, "the smallest number with which the cache holds"),
        (2047, False, 1, r"\(index_topk = 2047, of which ranks .* exchange an even number"),
        (2048, True, 4, "the smallest number with which the cache holds"),
    ],
)
def test_sparse_models(tmp_path: Path, topk: int, invariant: bool, shards: int, why: str) -> None:
    values = {**V32, "num_hidden_layers": 4, "index_topk": topk}
    made = config(tmp_path, values, max_rows=256, token_budget=4096, invariant=invariant)
    choice = choose_shards(made, 28 * GIB)
    assert choice.shards == shards
    assert re.search(why, choice.words), choice.words


@pytest.mark.parametrize("kind", ["V3", "V32"])
def test_the_weights_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """They are the same for any number of shards, and take nearly all of the time of a plan. A planted fault: the parts
    that are known are not counted in the plans behind the first."""
    values = {**(V3 if kind == "V3" else V32), "num_hidden_layers": 4, "quantization_config": FP8_CONFIG}
    made, asked, known = config(tmp_path, values, max_rows=1024, token_budget=8192), list[str](), dict[str, Any]()

    def stored(name: str, dtype_of: Callable[[str], str | None]) -> Format:
        asked.append(name)
        return stored_format(name, dtype_of)

    monkeypatch.setattr("workers.weights.source.stored_format", stored)
    plans, counts = [], []
    for shards in (1, 2, 4, 8):
        asked.clear()
        plans.append(memory_plan(made.shared_out(shards), 28 * GIB, known=known))
        counts.append(len(asked))
    assert counts[0] > 1000 > 10 * max(counts[1:])
    asked.clear()
    assert choose_shards(made, 28 * GIB).shards == 8
    assert len(asked) == sum(counts)
    assert plans == [memory_plan(made.shared_out(shards), 28 * GIB) for shards in (1, 2, 4, 8)]


def test_nobody_shares_before_the_choice(tmp_path: Path) -> None:
    made = config(tmp_path, SMALL)
    assert made.mesh(3) == Mesh.of(3, 8)
    assert made.shared_out(4).mesh(3) == Mesh.of(3, 8, cache=4)
    with pytest.raises(ValueError, match="by a number that divides theirs"):
        made.shared_out(3)


@pytest.mark.parametrize(("gib", "shards"), [(256, 2), (2, 4)])
def test_on_a_cpu_it_does_not_depend_on_what_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gib: int, shards: int
) -> None:
    """Of two starts on one machine the second one chose another number, while somebody else used memory."""
    chosen = []
    for free in (gib * GIB, GIB // 8):
        memory = SimpleNamespace(total=gib * GIB, available=free)
        monkeypatch.setattr(psutil, "virtual_memory", lambda memory=memory: memory)
        made = config(tmp_path, SMALL, device="cpu", max_context=65536, max_rows=32, cpu_cache_bytes=2 * GIB)
        chosen.append(choose_together(made, Group(), torch.device("cpu")))
    assert chosen[0] == chosen[1]
    assert chosen[0].shards == shards


def test_gpus_that_cannot_write_each_others_memory(tmp_path: Path) -> None:
    """They are refused where a number is asked for, and choose 1 by themselves."""
    group, cuda = Group(Mesh.of(0, 2)), torch.device("cuda")
    with pytest.raises(ValueError, match=r"cache_shards = 2, but these ranks cannot write .* memory.*: give 1"):
        group.sharing_out(2, cuda, 1.0)
    choice = choose_together(config(tmp_path, SMALL, tensor_parallel=2), group, cuda)
    assert (choice.shards, choice.words) == (
        1,
        "cache_shards = 1 (auto): these ranks cannot write each other's memory",
    )
