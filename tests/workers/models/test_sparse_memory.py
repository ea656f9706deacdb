"""Memory that sparse attention reserves before a replica serves is enough for whatever step comes: no GPU and no memory
is needed to count it."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from published_configs import V32

from kernels.sparse import SparseWorkspace, workspace
from kernels.sparse_shards import Candidates
from workers.config import EngineConfig
from workers.fit.memory_plan import memory_plan
from workers.memory.scratch import Scratch
from workers.models.attention import sparse_rows, sparse_workspaces, widened
from workers.models.attention.backend import Heads
from workers.models.attention.latent import MlaInputs
from workers.models.attention.sparse import SparseAttention
from workers.models.attention.sparse_rows import SparseRows
from workers.models.attention.sparse_workspaces import Workspaces
from workers.models.batch import Batch, DecodeBatch, OwnSelection, PrefillBatch, Selection
from workers.models.config import Indexing
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.protocol.plan import BatchLayout

CPU, META = torch.device("cpu"), torch.device("meta")
SLOTS = 9


def attention_of(
    heads: int, top_k: int, fp8_cache: bool, shards: int = 1, *, invariant: bool = False
) -> SparseAttention:
    """Make as much of the attention as deals out memory. `shards`: ranks that share out the cache."""
    nothing = torch.empty(0, dtype=torch.bfloat16)
    attention = object.__new__(SparseAttention)
    sizes = {"count": heads, "nope": 128, "rope": 64, "value": 128, "latent": 512, "scale": 1.0}
    attention.heads = Heads(**sizes, up_HFL=nothing, norm_L=nothing, invariant=invariant, fp8_cache=fp8_cache)
    attention.indexing = Indexing(64, 128, top_k, interleaved=True, shared=(False,))
    attention.indexer, attention.shards = None, shards
    return attention


def taken(
    attention: SparseAttention, layout: BatchLayout, decode: int, pages: int, prefill: PrefillBatch | None
) -> tuple[int, list[SparseRows]]:
    """Bytes that a pass takes; without prefill rows, whose number `layout` says, the largest geometry."""
    tokens, heads = layout.tokens, attention.heads
    token_T = torch.empty(tokens, dtype=torch.int32, device=META)
    selected_TS = torch.empty(tokens, attention.indexing.top_k, device=META)
    selection, group = Selection(token_T, token_T, selected_TS, token_T[:1]), None
    if attention.shards > 1:
        group = Group(Mesh.of(0, attention.shards, cache=attention.shards))
        selection = replace(selection, own=OwnSelection(None, None, token_T, token_T, selected_TS))
    length_R = torch.empty(decode, dtype=torch.int32, device=META)
    rows = DecodeBatch(length_R, length_R.new_empty(decode, pages)) if decode else None
    batch = Batch(layout, token_T, token_T, rows, prefill, selection=selection, group=group)
    q_THD = torch.empty(tokens, heads.count, 192, dtype=torch.bfloat16, device=META)
    out_THV = torch.empty(tokens, heads.count, 128, dtype=torch.bfloat16, device=META)
    projected = MlaInputs(q_THD[:, 0], q_THD, q_THD[:, 0])
    geometry = attention.geometry(batch)
    if prefill is None:
        (geometry,) = attention.largest_geometries(tokens, SLOTS, pages, CPU)
    scratch = Scratch(META)
    found = attention.backends(projected, out_THV, batch, geometry, token_T, scratch)
    return scratch.peak, [own for own in found if isinstance(own, SparseRows)]


def reserved(attention: SparseAttention, budget: int, width: int, pages: int) -> int:
    """Count the reserved memory as `workers.graphs.mixed_warm_up.reserve_attention` does."""
    rows = min(SLOTS - 1, (budget - 1) // width)
    return taken(attention, BatchLayout(width, rows, (budget - rows * width,), (True,)), rows, pages, None)[0]


@pytest.fixture(autouse=True, params=[False, True], ids=["", "hopper"])
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_workspaces, "works_in_memory", lambda heads, device: True)
    monkeypatch.setattr(sparse_workspaces, "is_hopper", lambda device: request.param)
    # Memory is the GPU's where it is taken, and no device's where it is counted.
    monkeypatch.setattr(workspace, "is_hopper", lambda device: request.param and device == META)


drawn_rows = st.lists(st.tuples(st.integers(0, 1 << 18), st.integers(1, 9000)), min_size=1, max_size=SLOTS)


@settings(max_examples=60, deadline=None)
@given(
    heads=st.sampled_from([8, 16, 32, 48, 64, 128]),
    fp8_cache=st.booleans(),
    top_k=st.sampled_from([64, 512, 2048]),
    shards=st.sampled_from([1, 2, 8]),
    invariant=st.booleans(),
    budget=st.sampled_from([5, 63, 64, 100, 600, 1023, 2048, 8192]),
    pages=st.sampled_from([1, 5, 40, 128, 512, 2048, 2560, 3000]),
    width=st.integers(1, 5),
    decode=st.integers(0, SLOTS - 1),
    rows=drawn_rows,
)
# Of shorter contexts more tokens select at once; scores, or the last turn of a chunk, take more.
@example(
    heads=8,
    fp8_cache=False,
    top_k=64,
    shards=1,
    invariant=False,
    budget=8192,
    pages=2560,
    width=1,
    decode=0,
    rows=[(155457, 8191)],
)
@example(
    heads=8,
    fp8_cache=False,
    top_k=2048,
    shards=1,
    invariant=False,
    budget=8192,
    pages=3000,
    width=1,
    decode=0,
    rows=[(122880, 8191)],
)
# Many stretches.
@example(
    heads=128,
    fp8_cache=True,
    top_k=64,
    shards=1,
    invariant=False,
    budget=8192,
    pages=512,
    width=1,
    decode=0,
    rows=[(70, 90), (9, 9)] * 4,
)
def test_no_step_takes_more_than_is_reserved(
    heads: int,
    fp8_cache: bool,
    top_k: int,
    shards: int,
    invariant: bool,
    budget: int,
    pages: int,
    width: int,
    decode: int,
    rows: list[tuple[int, int]],
) -> None:
    attention = attention_of(heads, top_k, fp8_cache, shards, invariant=invariant)
    decode = min(decode, (budget - 1) // width)
    left, chunks = budget - decode * width, []
    for start, count in rows[: SLOTS - decode]:
        fed = min(count, left, pages * 64)
        if fed:
            chunks.append((min(start, pages * 64 - fed), fed))
            left -= fed
    starts, counts = zip(*chunks, strict=True)
    prefill = PrefillBatch(starts, counts, torch.zeros(len(chunks), pages, dtype=torch.int32))
    layout = BatchLayout(width, decode, counts, (True,) * len(counts))
    needed, _ = taken(attention, layout, decode, pages, prefill)
    assert needed <= reserved(attention, budget, width, pages)


def test_room_to_widen_is_reserved_where_it_may_be_wanted() -> None:
    """Room depends on the heads that may widen, and on the tokens."""

    def pages_of(heads: int, budget: int, pages: int, fp8_cache: bool = True) -> int:
        found = attention_of(heads, 64, fp8_cache).largest_geometries(budget, SLOTS, pages, CPU)[0]
        assert isinstance(found, sparse_rows.SparseGeometry)
        return 0 if found.widening is None else found.widening.pages

    assert pages_of(64, 64, 100) == SLOTS * 100
    assert pages_of(64, 64, 1000) == widened.WIDENED // 64
    assert [pages_of(64, 63, 100), pages_of(32, 64, 100), pages_of(64, 64, 100, fp8_cache=False)] == [0, 0, 0]


@pytest.mark.parametrize("heads", [64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 66, 67, 1000])
def test_widened_entries_are_attended_to_in_the_memory_of_fp8_entries(
    heads: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel of the same path attends to them, where there is one that widens them anew."""
    monkeypatch.setattr(workspace, "is_hopper", lambda device: True)
    assert workspace.widens_selected(heads, 512, torch.bfloat16, CPU)
    assert not workspace.widens_selected(32, 512, torch.bfloat16, CPU)
    asked: list[list[Any]] = [[], []]
    tilings = []
    for fp8, sizes in zip((False, True), asked, strict=True):

        def empty(*shape: int, dtype: torch.dtype, sizes: list[Any] = sizes) -> torch.Tensor:
            sizes.append((shape, dtype))
            return torch.empty(shape, dtype=dtype, device=META)

        shape = tokens, heads, 512, 2048, torch.bfloat16
        tilings.append(SparseWorkspace.allocate(*shape, empty, fp8=fp8, hopper=True).tiling)
    assert tilings[0] == tilings[1]
    assert tilings[0].path == "wide"
    assert asked[0] == asked[1]


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("tokens", [1, 7, 132, 512])
def test_what_is_counted_is_what_is_taken(tokens: int, shards: int) -> None:
    heads, taken = attention_of(64, 2048, True).heads, []
    for turns in (({tokens}, set()), (set(), {tokens})):
        scratch = Scratch(META)
        Workspaces.of(heads, turns[0], 6400, turns[1], 2048, CPU, scratch.empty, shards=shards)
        taken.append(scratch.peak)
    scratch = Scratch(META)
    Candidates.allocate(tokens, shards, 2048, scratch.empty)
    assert shards == 1 or scratch.peak == sparse_workspaces.bytes_for_candidates(tokens, 2048, shards)
    counted = sparse_workspaces.bytes_for_selection(heads, {tokens}, 6400, 2048, CPU, shards)
    assert taken == [sum(counted), sparse_workspaces.bytes_for_attention(heads, {tokens}, 2048, CPU)]


def test_turns_of_attention_share_their_memory() -> None:
    """Each begins where all begin, and has what it asks for."""
    heads = attention_of(128, 2048, True).heads
    pieces: list[torch.Tensor] = []

    def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        pieces.append(torch.empty(shape, dtype=dtype))
        return pieces[-1]

    found = Workspaces.of(heads, set(), 64, {1, 3, 40}, 2048, CPU, empty).attend
    (shared,) = pieces
    for size, own in found.items():
        assert isinstance(own, SparseWorkspace)
        tensors = own.partial_GTHL, own.partial_lse_GTH, own.place_BTS, own.length_T, own.pieces_T, own.metadata
        spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors if x.numel())
        assert own.place_BTS.shape[1] == size
        assert spans[0][0] == shared.data_ptr()
        assert spans[-1][1] <= shared.data_ptr() + shared.nbytes
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


@pytest.mark.parametrize("width", [1, 3])
def test_page_lists_of_shards_are_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """However rows are divided into those that decode and those with chunks. A planted fault: lists of rows with chunks
    come from torch's allocator, and nobody counts them."""
    planned: list[Batch] = []
    plan = SparseAttention.plan

    def noted(own: SparseAttention, batch: Batch, scratch: Scratch) -> Batch:
        planned.append(batch)
        return plan(own, batch, scratch)

    monkeypatch.setattr(SparseAttention, "plan", noted)
    values = {**V32, "num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(values))
    context, slots, budget = 160_000, 40, 40 * width + 90
    sizes: dict[str, Any] = {"max_rows": slots, "token_budget": budget, "max_context": context, "width": width}
    made = EngineConfig(model=str(tmp_path), tensor_parallel=8, cache_shards=8, **sizes)
    memory_plan(made, 140 << 30)
    attention, reserving = attention_of(16, 2048, False, 8), planned[0]
    assert reserving.decode is not None
    pages = reserving.decode.page_RP.shape[1]

    def peak(batch: Batch) -> int:
        scratch = Scratch(META)
        plan(attention, batch, scratch)
        return scratch.peak

    most = peak(reserving)
    for decode in range(slots):
        for chunks in {1, (slots - decode + 1) // 2, slots - decode}:
            room = budget - decode * width
            count = (room - chunks + 1, *(1 for _ in range(chunks - 1)))
            start = tuple(pages * 64 - each for each in count)
            length_R = torch.zeros(decode, dtype=torch.int32, device=META)
            batch = replace(
                reserving,
                layout=BatchLayout(width, decode, count, (True,) * chunks),
                decode=DecodeBatch(length_R, length_R.new_zeros(decode, pages)) if decode else None,
                prefill=PrefillBatch(start, count, length_R.new_zeros(chunks, pages)),
            )
            taken_here = peak(batch)
            assert 16 * pages * (decode + chunks) < taken_here <= most
