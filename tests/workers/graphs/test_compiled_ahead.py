"""Kernels of all steps are compiled ahead: else a request waits for the compiler. By Triton's rule for what it compiles
anew, on a CPU that passes for a Hopper GPU; tests/workers/test_gpu_engine.py has a real one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from deepseek_v4_layout import published_v4, tiny_v4, write_v4
from msgspec.structs import replace
from quantized_pairs import checkpoints as quantized_pair
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from w8a8_models import checkpoints

from kernels.page import PAGE_TOKENS
from kernels.runtime import ahead, repeat
from tests.tiny_models import write_tiny
from tests.workers.pretended import another_device, pretend
from workers.cache.paged import PagedCache
from workers.config import EngineConfig
from workers.families import load_model
from workers.graphs import capture, graph_runner, segments
from workers.graphs.compiled_stage import CompiledStage, _TailThatRan
from workers.models import general, w8a8
from workers.models import invariant as invariant_ops
from workers.models.attention import absorbed_chunks, sparse_rows, sparse_workspaces
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.proof import decode_steps as selftest
from workers.proof import segments as segment_proof
from workers.proof import tails as tail_proof
from workers.proof.prove import prove
from workers.protocol.plan import Admission, DecodeBuckets, PrefillRow, SamplingParams, StepPlan
from workers.rank.rank import max_context
from workers.rank.runner import Runner
from workers.scheduler import max_entries_per_row, max_pages_per_row
from workers.step import mixed
from workers.step.mixed import Stage

PUBLISHED = {
    "hidden_size": 256,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 2048,
}
"""Head sizes of the published models, for which Hopper has kernels of its own."""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny(tmp_path_factory.mktemp("published"), "v3-no-q-lora", **PUBLISHED))


class Start:
    """Start of a replica on a GPU up to the point where it serves, see `workers.rank.rank.Rank`."""

    def __init__(
        self,
        patch: pytest.MonkeyPatch,
        config: EngineConfig,
        ranks: int = 1,
        pages: int = 120,
        rank: int = 0,
        shards: int = 1,
    ) -> None:
        self._config, self._pages, self._group = config, pages, Group(Mesh.of(rank, ranks, cache=shards))
        self._context = max_context(config)
        self._model = load_model(
            config.folder,
            group=self._group,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            max_positions=max_entries_per_row(self._context, config.most_width),
            draft_layer=config.most_width > 1,
            invariant=config.invariant,
            quantize_activations=config.activations == "auto",
            fp8_cache=config.kv_cache_dtype == "fp8",
        )
        for proof in (selftest, segment_proof, tail_proof):
            patch.setattr(proof, "ATTEMPTS", 1)  # none succeeds where nothing is computed
        self.variants = pretend(patch)

    def trial(self) -> Runner:
        """A runner with a pool of two pages."""
        return self._runner(2)

    def compiled(self) -> list[tuple[str, str]]:
        """Return what is compiled ahead, on a pool of two pages."""
        trial = self.trial()
        trial.compile(threads=1)
        before = list(self.variants)
        trial.warm_up()
        return before

    def ready(self) -> Runner:
        """A runner with its own pool, captured and tested."""
        runner = self._runner(self._pages)
        runner.capture()
        prove(runner.parts, runner.graphs)
        return runner

    def after_another(self, patch: pytest.MonkeyPatch, waiting: int) -> tuple[Runner, list[tuple[str, str]]]:
        """A runner that takes the place of another one, which has measured what graphs need, and captures a first
        portion alone; and the variants that its captures would compile."""
        trial = self.trial()
        trial.compile(threads=1)
        warmed = trial.warm_up()
        patch.setattr(driver, "_active", another_device())  # where nothing is compiled
        late: list[tuple[str, str]] = []
        record = capture.record

        def checked(device: torch.device, call: Callable[[], Any]) -> Any:
            before = len(self.variants)
            found = record(device, call)
            late.extend(self.variants[before:])
            return found

        patch.setattr(capture, "record", checked)
        patch.setattr(segments, "record", checked)
        trial.compile_first(1, waiting)
        runner = self._runner(self._pages)
        runner.capture(waiting=waiting, warmed=warmed)
        return runner, late

    def _runner(self, pages: int) -> Runner:
        config, model, device = self._config, self._model, torch.device("cpu")
        of_slots = model.rings(config.most_width), config.max_rows
        cache = PagedCache.allocate(model.caches, pages, device, self._group.mesh.shards, *of_slots)
        pages_per_row = max_pages_per_row(self._context, config.most_width)
        sizes = (config.max_rows, config.most_width, pages_per_row, config.token_budget)
        return Runner(model, cache, *sizes, self._group, adaptive=config.width == "auto")


def random_plans(runner: Runner, budget: int, seed: int, steps: int = 400) -> Iterator[StepPlan]:
    """Steps as a scheduler may ask for: few tokens and many, chunks that end their prompt and that do not, behind no
    context, a few entries, whole pages, as many as a row may have."""
    rng, parts = random.Random(seed), runner.parts
    rows, width = parts.state.slots, parts.width
    modes = DecodeBuckets(rows, width, parts.adaptive).modes()
    longest = min(parts.model.max_positions, parts.state.pages_per_row * PAGE_TOKENS) - 2 * width
    for step in range(1, steps + 1):
        slots = rng.sample(range(rows), rows)
        feeds, drafts = rng.choice(modes)
        if step % 10 == 0:
            yield StepPlan(step, feeds, drafts, tuple(slots[: rng.randint(1, rows)]))
            continue
        left = rng.choice([budget, rng.randint(1, budget), rng.randint(1, 20)])
        most = min(rows - 1, (left - 1) // feeds)
        decode = tuple(slots.pop() for _ in range(rng.choice([0, most, rng.randint(0, most)])))
        left -= feeds * len(decode)
        chunks: list[PrefillRow] = []
        while (left and slots and rng.random() < 0.9) or not chunks:
            count = min(rng.choice([left, rng.randint(1, left), rng.randint(1, min(left, 18))]), longest)
            room = longest - count
            start = min(
                room, rng.choice([0, rng.randint(0, 20), PAGE_TOKENS * rng.randint(0, 5), rng.randint(0, room)])
            )
            write_from, final = start + rng.choice([0, rng.randrange(count)]), rng.random() < 0.5
            chunks.append(PrefillRow(slots.pop(), start, (0,) * count, write_from, final, -1 if final else 0))
            left -= count
        params = SamplingParams(10, rng.choice([0.0, 1.0]), presence_penalty=rng.choice([0.0, 1.0]))
        admissions = tuple(Admission(chunk.slot, params, history=(1, 2)) for chunk in chunks if not chunk.start)
        yield StepPlan(step, feeds, drafts, decode, tuple(chunks), admissions, logprobs=rng.choice([-1, 0, 3]))


def asking_for_more(plan: StepPlan) -> StepPlan:
    """The plan with rows that have a grammar, prompts that are scored, and pages to zero-fill."""
    scored = [
        replace(row, score_to=len(row.tokens) - row.final, score_top=plan.step % 4) if plan.step % 20 == 3 else row
        for row in plan.prefill
    ]
    more = {"constrained": plan.decode_slots[: plan.step % 3], "zero_fill": (1,) if plan.step % 7 == 0 else ()}
    return replace(plan, prefill=tuple(scored), **more)


def late(start: Start, budget: int, seed: int) -> list[tuple[str, str]]:
    """The variants that are not compiled ahead."""
    ahead = start.compiled()
    assert len(ahead) > 30
    runner = start.ready()
    for plan in random_plans(runner, budget, seed):
        runner.execute(asking_for_more(plan))
    assert not runner.stats.eager
    return start.variants[len(ahead) :]


def settings(model: str, width: int | str, **others: Any) -> EngineConfig:
    defaults = {"max_rows": 8, "token_budget": 96, "max_context": None}
    return EngineConfig(model=model, device="cpu", width=width, **{**defaults, **others})


DEMO_CASES = itertools.product((1, "auto"), (None, 540, 70), (False, True))
"""Widths; contexts of any length, of just two pieces, of just two pages; and whether in invariant mode."""
DEMO_LANES: dict[tuple[Any, ...], Any] = {
    (1, None, False): (),
    ("auto", 540, False): pytest.mark.long,
    (1, 540, True): pytest.mark.long,
}
"""Every variant that any case of this file launches, one outside of `make soak` launches, too."""


@pytest.mark.parametrize(
    ("width", "context", "invariant"),
    [pytest.param(*case, marks=DEMO_LANES.get(case, pytest.mark.soak)) for case in DEMO_CASES],
)
def test_the_demo_compiles_nothing_late(
    width: int | str, context: int | None, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("demo", width, max_context=context, invariant=invariant)
    assert late(Start(monkeypatch, config), 96, seed=3) == []


class Counted:
    """Launches of Triton kernels, and what Triton compiles for them on a device for which nothing is compiled yet."""

    def __init__(self, start: Start, patch: pytest.MonkeyPatch) -> None:
        self._start, self._patch, self.launches = start, patch, 0

    def variants(self, call: Callable[[], Any]) -> set[tuple[str, str]]:
        """Return the variants that a call launches. `launches` are its own."""
        plain_run, self.launches = JITFunction.run, 0

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
            self.launches += 1
            return plain_run(kernel, *args, grid=grid, warmup=warmup, **options)

        with self._patch.context() as patch:
            patch.setattr(JITFunction, "run", run)
            patch.setattr(driver, "_active", another_device())
            before = len(self._start.variants)
            call()
            return set(self._start.variants[before:])


def without_short_cuts(patch: pytest.MonkeyPatch) -> None:
    """Let the pass that compiles kernels run everything that steps do."""
    patch.setattr(ahead, "distinct", lambda pieces: pieces)
    for module in (absorbed_chunks, invariant_ops, mixed):
        patch.setattr(module, "distinct", lambda pieces: pieces)
    patch.setattr(repeat, "launches_compute", lambda: True)
    patch.setattr(capture, "CompiledStage", Stage)


FAULTS: list[tuple[Any, str, Any]] = [
    (invariant_ops, "distinct", lambda pieces: ()),
    (repeat.Repeat, "__call__", lambda self, index, call: None),
    (CompiledStage, "run_segment", lambda self, which, index: None),
    (CompiledStage, "tail", lambda self, key: _TailThatRan(self.parts, key.tokens, self.inner)),
]


@pytest.mark.parametrize(
    ("width", "invariant"),
    [(2, True), pytest.param(1, False, marks=pytest.mark.long), pytest.param("auto", False, marks=pytest.mark.long)],
)
def test_a_quick_pass_compiles_what_all_launches_need(
    width: int | str, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is launched for real is the measure; the last pieces are smaller than the others, and need other kernels."""
    start = Start(monkeypatch, settings("demo", width, invariant=invariant, max_rows=5, token_budget=57))
    trial, counted = start.trial(), Counted(start, monkeypatch)
    config = trial.parts.model.config
    assert config.routing is not None
    # The most tokens are several pieces of attention and of experts, the last of which are smaller.
    monkeypatch.setattr(absorbed_chunks, "ROWS", 40)
    monkeypatch.setattr(absorbed_chunks, "QUERIES", config.num_heads)
    bytes_of_token = config.routing.experts_per_token * invariant_ops.GROUPS * config.hidden_size * 4
    monkeypatch.setattr(invariant_ops, "PART_BYTES", 40 * bytes_of_token)
    every = counted.variants(trial.warm_up)
    assert counted.variants(partial(trial.compile, 1, proof=False)) == every
    quick = counted.launches
    first = counted.variants(partial(trial.compile_first, 1, 3))
    quick_first = counted.launches
    with monkeypatch.context() as patch:
        without_short_cuts(patch)
        assert counted.variants(partial(trial.compile, 1, proof=False)) == every
        assert counted.launches > 2 * quick
        assert counted.variants(partial(trial.compile_first, 1, 3)) == first
        assert counted.launches > 2 * quick_first
    for fault in FAULTS if invariant else ():
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert counted.variants(partial(trial.compile, 1, proof=False)) < every


@pytest.mark.parametrize(("width", "invariant"), [(1, False), pytest.param(3, True, marks=pytest.mark.long)])
def test_portions_that_are_warmed_up_one_by_one_compile_nothing_in_a_capture(
    width: int, invariant: bool, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Start(monkeypatch, settings(published, width, invariant=invariant))
    runner, late = start.after_another(monkeypatch, waiting=3)
    graphs = runner.graphs
    assert graphs is not None
    assert late == []
    prompt = StepPlan(1, width, width - 1, (), (PrefillRow(0, 0, (0,) * 70, 0, True),))
    before = len(start.variants)
    runner.execute(prompt)
    assert start.variants[before:] == []  # prompts are compiled beside the first portion
    while len(graphs.left) > 1:
        graphs.capture()
    assert late == []
    assert len(start.variants) > before
    monkeypatch.setattr(graph_runner, "warm_up_portion", lambda *args: None)
    monkeypatch.setattr(driver, "_active", another_device())
    graphs.capture()
    assert late  # a capture that nothing was run before is seen


@pytest.mark.parametrize(
    ("width", "invariant"),
    [
        pytest.param(width, invariant, marks=pytest.mark.soak if width == 1 else pytest.mark.long)
        for width in (1, 3)
        for invariant in (False, True)
    ],
)
def test_published_heads_compile_nothing_late(
    width: int, invariant: bool, published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention has kernels of its own for chunks of up to 64 tokens, of fewer than 256, and of more."""
    config = settings(published, width, token_budget=300, max_context=700, invariant=invariant)
    assert late(Start(monkeypatch, config), 300, seed=3) == []


def test_chunks_of_few_tokens_compile_nothing_late_where_one_row_is_served(
    published: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In invariant mode a chunk is cut into rows, and how many there are decides how wide programs of the merge are."""
    config = settings(published, 1, token_budget=32, max_rows=1, invariant=True)
    start = Start(monkeypatch, config)
    ahead = len(start.compiled())
    runner = start.ready()
    for count in range(1, 33):
        runner.execute(StepPlan(count, 1, 0, (), (PrefillRow(0, 0, (0,) * count, 0, True),)))
    assert start.variants[ahead:] == []


@pytest.mark.parametrize(
    ("width", "activations"),
    [
        pytest.param(1, "auto", marks=pytest.mark.long),
        pytest.param(3, "bf16", marks=pytest.mark.long),
        pytest.param(3, "auto", marks=pytest.mark.soak),
    ],
)
def test_weights_in_fp8_compile_nothing_late(
    width: int, activations: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens that are rounded, and fewer that are not, behind every number of rows."""
    quantized, _ = checkpoints(tmp_path)
    monkeypatch.setattr(general, "supports_w8a8", lambda device: True)
    monkeypatch.setattr(w8a8, "w8a8_linear", lambda *_: None)
    config = settings(str(quantized), width, max_rows=13, max_context=300, activations=activations)
    start = Start(monkeypatch, config)
    assert late(start, 96, seed=3) == []
    rounded = {"quantize_kernel", "product"} & {kernel for kernel, _ in start.variants}
    assert rounded == ({"quantize_kernel", "product"} if activations == "auto" else set())


@pytest.mark.long
def test_experts_in_int4_compile_nothing_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single token, tiles of two pairs and of eight, and of many; on the small-batch path, and on the general one."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 256, "q_lora_rank": 32, "qk_rope_head_dim": 16}
    folder, _ = quantized_pair(tmp_path, "int4", **sizes)
    start = Start(monkeypatch, settings(str(folder), 1, max_rows=20, token_budget=300, max_context=300))
    assert late(start, 300, seed=3) == []
    assert {"product", "combine_pending", "combine_norm", "rearrange"} <= {kernel for kernel, _ in start.variants}


@pytest.mark.long
def test_an_fp8_cache_compiles_nothing_late(published: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The width is one at which rows have one block of query vectors or several."""
    how = {"kv_cache_dtype": "fp8", "max_rows": 4, "token_budget": 64, "max_context": 300}
    start = Start(monkeypatch, settings(published, 3, **how))
    assert late(start, 64, seed=3) == []
    launched = {kernel for kernel, _ in start.variants}
    assert {"absorb", "rope_cache_kernel", "gather_context_kernel", "attend_narrow"} <= launched
    assert "attend_wide" not in launched


@pytest.mark.parametrize("width", [pytest.param(1, marks=pytest.mark.soak), pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("cache", "shared", "heads"),
    [("auto", [], 32), ("fp8", ["full", "shared", "shared"], 32), ("fp8", ["full", "shared", "shared"], 64)],
)
def test_sparse_attention_compiles_nothing_late(
    cache: str, shared: list[str], heads: int, width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps are on the small-batch path, of many rows, and chunks of prompts; contexts are on either side of what is
    selected. With 64 heads long chunks attend to context that was widened, and short ones to FP8 entries."""
    sizes = PUBLISHED | {"q_lora_rank": 128, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 128}
    sizes |= {"indexer_types": shared} if shared else {}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    folder = write_tiny(tmp_path, "glm5" if shared else "v32", **sizes, num_hidden_layers=3)
    monkeypatch.setattr(sparse_workspaces, "works_in_memory", lambda heads, device: True)
    monkeypatch.setattr(sparse_rows, "refuse_out_of_bounds", lambda fault_1: None)
    how = {"kv_cache_dtype": cache, "max_rows": 12, "token_budget": 96, "max_context": 300}
    start = Start(monkeypatch, settings(str(folder), width, **how))
    assert late(start, 96, seed=3) == []
    launched = {kernel for kernel, _ in start.variants}
    scores = "score_pages_hopper" if cache == "fp8" else "score_pages"
    assert {"index_rope", "write_keys", scores, "list_positions", "select_whole", "merge"} <= launched
    assert {"stream_linear", "rope_absorb", "rope_cache_kernel"} <= launched
    wide = {"attend_selected", "attend_selected_wide_fp8", "gather_context_kernel"}
    assert launched & wide == (wide if heads == 64 else {"attend_selected"} if cache == "auto" else set())
    assert ("attend_selected_fp8" in launched) == (cache == "fp8" and heads == 32)


@pytest.mark.long
def test_deepseek_v4_compiles_nothing_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the index heads of the published models. Nor does the self-test's prefill path compile anything."""
    values, model = tiny_v4(index_n_heads=64, index_head_dim=128)
    folder = write_v4(tmp_path, values, published_v4(model))
    start = Start(monkeypatch, settings(str(folder), 1, max_context=300))
    assert late(start, 96, seed=3) == []
    assert {"attend", "score_pages", "route"} <= {kernel for kernel, _ in start.variants}


def collectives(patch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Let ranks be alone from now on. Return the list that fills with what they would do together: what it is, and the
    shapes and types of what is handed on."""
    asked: list[tuple[Any, ...]] = []
    for name in ("all_reduce", "broadcast", "all_gather_into_tensor"):

        def ask(*tensors: torch.Tensor, name: str = name, **options: Any) -> None:
            asked.append((name, *((x.shape, x.dtype) for x in tensors), options))

        patch.setattr(dist, name, ask)

    # GPUs exchange over memory that each writes of the others, by kernels that take nothing.
    for name in ("gather_shards", "merge_shards"):

        def exchange(self: Group, *tensors: torch.Tensor, name: str = name, **options: Any) -> None:
            asked.append((name, *((x.shape, x.dtype) for x in tensors), options))

        patch.setattr(Group, name, exchange)

    def gather_bytes(self: Group, payload: bytes, device: torch.device) -> list[bytes]:
        asked.append(("gather_bytes",))
        return [payload] * self.mesh.world.size

    patch.setattr(Group, "gather_bytes", gather_bytes)
    return asked


def together(rank: int, width: int | str, invariant: bool, shards: int) -> list[list[tuple[Any, ...]]]:
    """Do what one of two ranks does with the other: while it compiles and warms up, while it captures and proves
    itself, and in every step that it is told. It compiles nothing late."""
    with pytest.MonkeyPatch.context() as patch:
        asked = collectives(patch)
        start = Start(patch, settings("demo", width, invariant=invariant), ranks=2, rank=rank, shards=shards)
        ahead = start.compiled()
        stages = [asked.copy()]
        asked.clear()
        runner = start.ready()
        stages.append(asked.copy())
        for plan in random_plans(runner, 96, seed=4, steps=200):
            asked.clear()
            runner.execute(asking_for_more(plan))
            stages.append(asked.copy())
        assert start.variants[len(ahead) :] == []
        return stages


@pytest.mark.parametrize(
    ("width", "invariant", "shards"),
    [
        pytest.param(2, False, 1, marks=pytest.mark.long),
        pytest.param(1, False, 1, marks=pytest.mark.soak),
        pytest.param("auto", True, 1, marks=pytest.mark.long),
        pytest.param(2, False, 2, marks=pytest.mark.long),
    ],
)
def test_all_ranks_do_the_same_together(width: int | str, invariant: bool, shards: int) -> None:
    """Though one of them alone samples, and has masks, and each has other pages: a collective that not all ask for
    waits for ever."""
    first, other = (together(rank, width, invariant, shards) for rank in (0, 1))
    assert all(len(stage) > 3 for stage in first[:2])
    assert sum(map(bool, first[2:])) > 150
    assert all(any(call[0] == "merge_shards" for call in stage) == (shards > 1) for stage in first[:2])
    assert first == other


@pytest.mark.parametrize(
    ("cache", "shared", "width"),
    [
        pytest.param("fp8", ["full", "shared", "shared"], 3, marks=pytest.mark.long),
        pytest.param("auto", [], 1, marks=pytest.mark.soak),
    ],
)
def test_sparse_attention_of_shards_compiles_nothing_late(
    cache: str, shared: list[str], width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: what the self-test alone launches, which looks for a rank's part of what it has put in the place
    of a selection, is compiled then."""
    sizes = PUBLISHED | {"q_lora_rank": 128, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 128}
    sizes |= {"indexer_types": shared} if shared else {}
    sizes |= {"num_attention_heads": 64, "num_key_value_heads": 64, "moe_intermediate_size": 64}
    folder = write_tiny(tmp_path, "glm5" if shared else "v32", **sizes, num_hidden_layers=3)
    monkeypatch.setattr(sparse_workspaces, "works_in_memory", lambda heads, device: True)
    monkeypatch.setattr(sparse_rows, "refuse_out_of_bounds", lambda fault_1: None)
    collectives(monkeypatch)
    how = {"kv_cache_dtype": cache, "max_rows": 4, "token_budget": 64, "max_context": 300}
    start = Start(monkeypatch, settings(str(folder), width, **how), ranks=2, shards=2)
    assert late(start, 64, seed=3) == []
    launched = {kernel for kernel, _ in start.variants}
    assert {"find_own_pages", "own_bounds", "offer_candidates", "order_candidates", "keep_selected"} <= launched


def test_what_is_not_warmed_up_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch, settings("demo", 3))
    with monkeypatch.context() as patch:
        patch.setattr(capture, "warm_up_mixed_steps", lambda stage, masks=None: None)
        ahead = start.compiled()
    start.ready()
    assert {"gather_context_kernel", "rope_cache_kernel"} <= {kernel for kernel, _ in start.variants[len(ahead) :]}
