"""Plan of a GPU's memory, computed without one, against what a start takes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from paged import CPU
from planned_starts import STARTS
from published_configs import AXK1, GLM52, HY4, K25, LARGE3_PARAMS, SARVAM, SMALL4_PARAMS, V3, V32, YOUTU
from quantized_checkpoints import (
    FP8_CONFIG,
    FP8_MODELOPT_CONFIG,
    FP8_NAMES,
    HYV4_NAMES,
    INT4_CONFIG,
    INT4_NAMES,
    MXFP8_NESTED,
    quantize,
)
from random_model import V2_LITE_HEADS
from tiny_models import write_tiny

from kernels.page import Shards
from workers.config import EngineConfig
from workers.families import load_model
from workers.fit.cache_budget import fp8_cache, longest_request, pages_within, rows_at, wanted_pages
from workers.fit.memory_plan import MemoryPlan, memory_plan
from workers.fit.smallest_change import smallest_change
from workers.models.attention.expanded import CONTEXT_ENTRIES
from workers.models.attention.sparse_rows import SELECTING
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.scheduler import max_pages_per_row
from workers.tiers.mover import staging_bytes

GIB = 1 << 30


def plan_of(folder: Path | str, total: int = 8 * GIB, **settings: Any) -> MemoryPlan:
    return memory_plan(EngineConfig(model=str(folder), **settings), total)


@pytest.mark.parametrize(
    ("ranks", "files"),
    [
        (1, True),
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.long),
        (2, False),
    ],
)
@pytest.mark.parametrize(
    ("kind", "form", "names"),
    [
        ("v3", None, ""),
        ("v2-no-q-lora", None, ""),
        ("glm", None, ""),
        ("v3", "fp8", FP8_NAMES),
        ("v3", "int4", INT4_NAMES),
        ("kimi", "int4", INT4_NAMES),
        ("v32", "fp8", FP8_NAMES),
        ("glm5", "fp8", FP8_NAMES),
        ("axk2", "fp8", FP8_NAMES),
        ("hyv4", "mxfp8", HYV4_NAMES),
    ],
)
def test_weights_are_what_a_start_asks_for(
    kind: str, form: str | None, names: str, ranks: int, files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are counted from the files' headers, or where they are not there from config.json."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    write_tiny(tmp_path, kind, **sizes, n_routed_experts=8)
    if form:
        quantize(tmp_path, form, names)
    asked: list[int] = []
    monkeypatch.setattr("workers.families.loading.check_memory", lambda wanted, *_: asked.append(wanted))
    model = load_model(tmp_path, group=Group(Mesh.of(0, ranks)), dtype=torch.bfloat16, device=CPU, max_positions=64)
    if not files:
        (tmp_path / "model.safetensors").unlink()
    plan = plan_of(tmp_path, tensor_parallel=ranks)
    # The files have the router in fp32, which may not be rounded, and in a Hy4 the head and what an indexer makes of
    # its input, too; published ones have them in bf16.
    layers = [*model.layers[1:], *([model.drafter.layer] if model.drafter else [])]
    wide = [layer.feed_forward.mixture.router_XE for layer in layers]
    if kind == "hyv4":
        indexers = [layer.attention.indexer for layer in (model.layers[0], *layers)]
        wide += [indexer.both_XE for indexer in indexers if indexer is not None] + [model.head_YE]
    assert plan.weights == asked[0] - (0 if files else sum(weight.nbytes // 2 for weight in wide))
    assert plan.from_files == files
    assert plan.page_bytes == sum(spec.page_bytes for spec in model.caches)
    assert plan.fits


@pytest.mark.parametrize(
    ("name", "gib"),
    [
        ("DeepSeek-V3", 82.5),
        pytest.param("Kimi-K2.5", 72.9, marks=pytest.mark.long),
        pytest.param("DeepSeek-V3.2", 83.4, marks=pytest.mark.long),
        pytest.param("GLM-5.2", 91.2, marks=pytest.mark.long),
        pytest.param("Mistral Large 3", 81.1, marks=pytest.mark.long),
    ],
)
def test_published_models_take_what_the_documentation_says(name: str, gib: float, tmp_path: Path) -> None:
    """Weights are those of 8 ranks, by config.json alone; all ranks together take about what the files take."""
    kimi = {**K25, "text_config": {**K25["text_config"], "quantization_config": INT4_CONFIG}}
    in_fp8 = {"DeepSeek-V3": V3, "DeepSeek-V3.2": V32, "GLM-5.2": GLM52}
    values = {**in_fp8[name], "quantization_config": FP8_CONFIG} if name in in_fp8 else kimi
    file = "config.json"
    if name == "Mistral Large 3":
        values, file = LARGE3_PARAMS, "params.json"
    (tmp_path / file).write_text(json.dumps(values))
    plan = plan_of(tmp_path, int(139.8 * GIB), tensor_parallel=8, max_context=32768)
    assert plan.weights / GIB == pytest.approx(gib, abs=0.05)
    assert plan.fits
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    assert f"{gib} GiB" in next(
        line for line in page.splitlines() if line.startswith("|") and name in line and "GB" in line
    )


NEAR_KIN: dict[str, tuple[dict[str, Any], str, int]] = {
    "Hy4-preview-FP8": ({**HY4, "quantization_config": MXFP8_NESTED}, "config.json", 8),
    "Hy4-preview": (HY4, "config.json", 16),
    "Mistral Small 4": (SMALL4_PARAMS, "params.json", 1),
    "Sarvam-105B": (SARVAM, "config.json", 2),
    "Sarvam-105B in FP8": ({**SARVAM, "quantization_config": FP8_MODELOPT_CONFIG}, "config.json", 1),
    "A.X K1": (AXK1, "config.json", 16),
    "Youtu-LLM-2B, Youtu-LLM-2B-Base": (YOUTU, "config.json", 1),
}
"""Published models with their files, and the GPUs of 141 GB that the documentation gives them."""


@pytest.mark.long
@pytest.mark.parametrize("name", NEAR_KIN)
def test_rows_of_the_documentation_are_what_fit_says(name: str, tmp_path: Path) -> None:
    """Weights on each GPU, and the longest contexts, all of them where the row says nothing."""
    values, file, ranks = NEAR_KIN[name]
    (tmp_path / file).write_text(json.dumps(values))
    plan = memory_plan(EngineConfig(model=str(tmp_path), tensor_parallel=ranks), int(139.8 * GIB))
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    if ranks > 1 or "GiB" in row:
        assert f"{plan.weights / GIB:.1f} GiB of weights" in row
    assert row.split("|")[3].strip().startswith("one GPU" if ranks == 1 else f"{ranks} GPUs")
    said = re.search(r"contexts of up to ([\d,]+) tokens", row)
    if said is None:
        assert plan.fits
    else:
        assert 0 <= plan.context - int(said[1].replace(",", "")) < 1000 < plan.asked_context - plan.context
    if shards := re.search(r"--cache-shards (\d+)", row):
        shared = EngineConfig(model=str(tmp_path), tensor_parallel=ranks, cache_shards=int(shards[1]))
        assert memory_plan(shared, int(139.8 * GIB)).fits


@pytest.mark.parametrize(("rows", "budget", "measured"), [(64, 2048, 366), (256, 16384, 1980)])
def test_graphs_are_estimated_a_little_above_what_was_measured(
    rows: int, budget: int, measured: int, tmp_path: Path
) -> None:
    """DeepSeek-V2-Lite on an H200, in MiB: docs/internals/mixed-steps.md has the figures."""
    lite = {"hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27}
    lite |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "vocab_size": 102400}
    (tmp_path / "config.json").write_text(json.dumps({**V2_LITE_HEADS, **lite, "first_k_dense_replace": 1}))
    plan = plan_of(tmp_path, 80 * GIB, max_rows=rows, token_budget=budget, width=1)
    # Scratch memory to a fifth, and what a start sets aside for some 700 graphs beyond what they took.
    assert measured < plan.graphs / 2**20 < 1.2 * measured + 200


@pytest.mark.parametrize("name", STARTS)
def test_graphs_of_long_contexts_are_estimated_about_as_they_were_measured(name: str, tmp_path: Path) -> None:
    """Attention over 65,536 tokens takes most of it. A start has the driver's share to spare."""
    plan = memory_plan(EngineConfig(**STARTS[name].write(tmp_path, headers=True)), 140 * GIB)
    assert 0.97 < plan.graphs / STARTS[name].measured < 1.1


def test_room_for_the_largest_matrix_that_is_dequantized(tmp_path: Path) -> None:
    """The largest one is the dense layers' gate and up projection, in bf16, for passes of many tokens: those of decode
    steps and those of mixed steps have memory of their own."""
    plans = []
    for changes in ({}, {"quantization_config": FP8_CONFIG}):
        (tmp_path / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4, **changes}))
        plans.append(plan_of(tmp_path, 80 * GIB, tensor_parallel=8))
    assert plans[1].graphs - plans[0].graphs == 2 * (2 * 2 * 18432 // 8 * 7168)


def test_copies_of_the_slots_for_late_proofs_are_counted(tmp_path: Path) -> None:
    """Most of them are the counts of each token in each row, int32."""
    (tmp_path / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4}))
    proven, few, unproven, no_graphs, late_none = (
        plan_of(tmp_path, 80 * GIB, tensor_parallel=8, **settings)
        for settings in (
            {},
            {"graphs_at_start": "few"},
            {"selftest": False},
            {"graphs": False},
            {"host_cache_bytes": GIB},
        )
    )
    assert 1 < (proven.rest - unproven.rest) / (64 * 129280 * 4) < 1.1
    assert proven.room == unproven.room - (proven.rest - unproven.rest)
    assert few.rest == proven.rest  # an engine that is started again captures few at first in any case
    assert no_graphs.rest == unproven.rest
    # Behind host memory there are no late proofs, but pages on their way.
    assert late_none.rest - unproven.rest == staging_bytes(late_none.page_bytes)
    assert late_none.room == unproven.room - staging_bytes(late_none.page_bytes)


@pytest.mark.parametrize(("dtype", "ratio"), [("auto", 1152 / 656), ("float32", 2304 / 784)])
def test_pages_in_fp8_are_smaller(dtype: str, ratio: float, tmp_path: Path) -> None:
    """Entries have 512 + 64 features, those of the draft layer, too."""
    (tmp_path / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4}))
    plain, fp8 = (plan_of(tmp_path, 80 * GIB, dtype=dtype, kv_cache_dtype=name) for name in ("auto", "fp8"))
    assert plain.page_bytes / fp8.page_bytes == ratio
    assert fp8.graphs == plain.graphs


def test_shards_hold_several_times_the_tokens(tmp_path: Path) -> None:
    """By less than so many times: each has a null page, and memory for what it exchanges and for the heads of all."""
    (tmp_path / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4}))
    sizes: dict[str, Any] = {"tensor_parallel": 8, "max_rows": 1024, "max_context": 131072}
    whole, *shared = (plan_of(tmp_path, 80 * GIB, cache_shards=shards, **sizes) for shards in (1, 2, 8))
    for shards, plan in zip((2, 8), shared, strict=True):
        # Cached context of a piece: this rank's part, and those of all.
        assert plan.graphs - whole.graphs > (1 + shards) * CONTEXT_ENTRIES * 576 * 2
        assert 0.98 * shards < plan.tokens / whole.tokens < shards
        assert plan.own_pages * plan.page_bytes <= plan.room < whole.room
        assert plan.pages == shards * (plan.own_pages - 1) + 1


def test_shards_of_sparse_attention_hold_several_times_the_tokens(tmp_path: Path) -> None:
    """Index keys are shared out as latents are. Memory is taken for what all offer to be selected, for as many tokens
    as are scored at once."""
    (tmp_path / "config.json").write_text(json.dumps({**V32, "num_hidden_layers": 4}))
    sizes: dict[str, Any] = {"tensor_parallel": 8, "max_rows": 1024, "max_context": 131072}
    whole, *shared = (plan_of(tmp_path, 80 * GIB, cache_shards=shards, **sizes) for shards in (1, 2, 8))
    for shards, plan in zip((2, 8), shared, strict=True):
        assert plan.page_bytes == whole.page_bytes
        assert plan.graphs - whole.graphs > SELECTING // shards * shards * 2048 * 8
        assert 0.97 * shards < plan.tokens / whole.tokens < shards
    (tmp_path / "config.json").write_text(json.dumps({**V32, "num_hidden_layers": 4, "index_topk": 2047}))
    with pytest.raises(ValueError, match=r"index_topk = 2047, of which ranks .* exchange an even number: give"):
        plan_of(tmp_path, 80 * GIB, cache_shards=2, **sizes)


def test_index_keys_take_pages_and_attention_room(tmp_path: Path) -> None:
    """128 features in bf16 of every token, for each of 5 layers; and what attends to long contexts grows with them."""
    pages, graphs = [], []
    for config, context in (V3, 32768), (V32, 32768), (V32, 131072):
        (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 4}))
        plan = plan_of(tmp_path, 80 * GIB, tensor_parallel=8, max_context=context, max_rows=16)
        pages.append(plan.page_bytes)
        graphs.append(plan.graphs)
    assert pages == [64 * 5 * 1152, 64 * 5 * (1152 + 256), 64 * 5 * (1152 + 256)]
    # What each of 2,048 tokens attends to, and at most 2^26 scores at once.
    assert graphs[1] - graphs[0] > 2048 * 2048 * 4
    assert graphs[2] - graphs[0] < 2**26 * 4 + 2**30
    assert graphs[0] < graphs[1] <= graphs[2]
    assert plan_of(tmp_path, 80 * GIB, tensor_parallel=8, kv_cache_dtype="fp8").page_bytes == 64 * 5 * (656 + 132)


def test_a_cache_in_bf16_belongs_to_a_model_in_bf16(tmp_path: Path) -> None:
    write_tiny(tmp_path)
    assert plan_of(tmp_path, kv_cache_dtype="bf16") == plan_of(tmp_path)
    with pytest.raises(ValueError, match="the model runs in float16, and its cache can be in that or in FP8"):
        plan_of(tmp_path, kv_cache_dtype="bf16", dtype="float16")
    with pytest.raises(ValueError, match="the model runs in float32"):
        fp8_cache(EngineConfig(model=str(tmp_path), kv_cache_dtype="bf16"), torch.float32, CPU)


def test_pages_rows_and_context_belong_together() -> None:
    for pages in (2, 3, 10, 500):
        for width in (1, 3, 8):
            context = longest_request(pages, 10_000, width)
            assert context < 2 or rows_at(pages, 64, context, width) >= 1
            assert context == 10_000 or rows_at(pages, 64, context + 1, width) == 0
            most = pages_within(1 << 60, 1, 64, 10_000, width)
            assert rows_at(most, 64, 10_000, width) == 64
            assert most == 64 * max_pages_per_row(10_000, width) + 1


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_pages_belong_together_where_pieces_go_round(shards: int) -> None:
    """In invariant mode a rank without free pages cannot be passed over."""
    placed: dict[str, Any] = {"shards": shards, "in_pieces": True}
    for own_pages in (2, 9, 10, 100):
        pages = Shards(shards).pages(own_pages)
        context = longest_request(pages, 1 << 20, 3, **placed)
        fits, more = (max_pages_per_row(tokens, 3) for tokens in (context, context + 1))
        assert context < 2 or max(Shards(shards).in_turns(0, 0, fits)) < own_pages
        assert max(Shards(shards).in_turns(0, 0, more)) >= own_pages
        most = pages_within(1 << 60, 1, 64, context, 3, **placed)
        assert most - 1 >= 64 * max(Shards(shards).in_turns(0, 0, fits)) or context < 2
        wanted = wanted_pages(context, 1, 3, **placed)
        assert context < 2 or max_pages_per_row(context, 3) <= wanted < pages


def test_ranks_that_could_share_a_cache_are_told(tmp_path: Path) -> None:
    """Before a shorter context is; and where they cannot share, that is."""
    (tmp_path / "config.json").write_text(
        json.dumps({**V3, "num_hidden_layers": 4, "max_position_embeddings": 1 << 22})
    )
    config = EngineConfig(model=str(tmp_path), tensor_parallel=8, max_rows=8, kv_cache_dtype="fp8")
    plan = memory_plan(config, 22 * GIB)
    change = smallest_change(config, plan, {})
    assert change is not None
    assert (change.words, change.plan.fits, plan.fits) == ("--cache-shards 2", True, False)
    alone = smallest_change(config.model_copy(update={"dtype": "float16"}), plan, {})
    assert alone is not None
    assert alone.words == f"--context {plan.context}"


def test_the_smallest_change_fits(tmp_path: Path) -> None:
    """Changes go from a cache in FP8 and a shorter context to other GPUs, each where the ones before do not help."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "n_routed_experts": 16, "vocab_size": 8192}
    (tmp_path / "config.json").write_text(json.dumps({**V3, **sizes, "max_position_embeddings": 1 << 18}))
    config, seen = EngineConfig(model=str(tmp_path)), []
    for mib in (200, 2000, 3600, 3800, 4000, 4200, 4500, 4800, 5000, 8000, 16000):
        plan = memory_plan(config, mib << 20)
        change = None if plan.fits else smallest_change(config, plan, {"small": 1 << 30, "large": 32 * GIB})
        if plan.fits:
            assert plan.own_pages * plan.page_bytes <= 0.9 * plan.total - plan.weights - plan.graphs
            seen.append("")
        elif change is not None:
            assert change.plan.fits or change.words == f"--context {plan.context}"
            seen.append(change.words.split()[0])
    order = ["--gpu", "--tensor-parallel", "--max-rows", "--context", "--kv-cache-dtype", ""]
    assert seen == sorted(seen, key=order.index)
    assert {"--tensor-parallel", "--context", "--kv-cache-dtype", ""} <= set(seen)
    nothing = memory_plan(config, 1 << 20)
    assert smallest_change(config, nothing, {}) is None


def test_an_engine_that_stands_by_takes_all_but_weights_and_pages_again(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**V3, "num_hidden_layers": 4}))
    config = EngineConfig(model=str(tmp_path), tensor_parallel=8)
    alone, with_second = (memory_plan(config, 30 * GIB, standby=standby) for standby in (False, True))
    few = max(config.max_rows, config.token_budget // 64) + 3  # rows that the self-test tries at once, and a few
    assert alone.graphs is not None
    least = alone.graphs + alone.rest + few * alone.page_bytes
    assert least < with_second.standby - GIB < least + 100 * 2**20
    assert alone.room - with_second.room == with_second.standby
    assert (alone.weights, alone.graphs, alone.rest) == (with_second.weights, with_second.graphs, with_second.rest)
