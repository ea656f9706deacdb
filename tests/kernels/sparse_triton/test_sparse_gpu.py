"""Sparse attention on a GPU: eager, captured, and replayed for other lengths, tables and tokens."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch
from captured import capture, check_replays, same_bits
from index_recall import KINDS, recall
from sparse_case import Sparse

from kernels import sparse
from kernels.gather_context import gather_context
from kernels.mla_decode import DecodeShape, mla_decode, schedule_decode
from kernels.page import PAGE_TOKENS, pages_for

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

V32: dict[str, Any] = {
    "index_heads": 64,
    "latent": 512,
    "rope": 64,
    "selected": 2048,
    "dtype": torch.bfloat16,
    "device": "cuda",
}
LENGTHS = [0, 1, 63, 64, 65, 2047, 2048, 2049, 4097, 9000]


def steps(case: Sparse) -> None:
    case.score()
    case.select()
    case.attend()


def check(case: Sparse) -> None:
    case.check_scores()
    case.check_selected()
    case.check_attention()
    assert int(case.tensors["fault"]) == 0


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
def test_widths(width: int, fp8: bool) -> None:
    case = Sparse([(length, width) for length in LENGTHS], heads=16, fp8=fp8, width=width, **V32)
    case.write()
    case.check_keys()
    steps(case)
    check(case)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [1, 3, 8, 16, 32, 63, 64, 126, 128])
def test_heads(heads: int, fp8: bool) -> None:
    case = Sparse([(700, 1), (0, 1), (5000, 2)], heads=heads, fp8=fp8, **V32)
    steps(case)
    check(case)


@pytest.mark.parametrize("fp8", [False, True])
def test_chunks_of_prompts(fp8: bool) -> None:
    case = Sparse([(3000, 150), (70, 70), (0, 3), (2600, 1)], heads=128, fp8=fp8, **V32)
    steps(case)
    check(case)


@pytest.mark.parametrize("heads", [33, 64, 128])
def test_widened_entries_give_the_bits_of_fp8_entries(heads: int) -> None:
    """Fused widening gives the same bits as attention to a copy of the rows' pages in bfloat16."""
    if not sparse.widens_selected(heads, 512, torch.bfloat16, torch.device("cuda", 0)):
        pytest.skip("no kernel widens entries here")
    case = Sparse([(3000, 150), (70, 70), (0, 3), (2600, 1)], heads=heads, fp8=True, **V32)
    steps(case)
    check(case)
    t = case.tensors
    want = t["out"].clone(), t["lse"].clone()
    pages = [pages_for(length) for length, _ in case.rows]
    cu = torch.tensor([0, *accumulate(pages)], dtype=torch.int32, device="cuda")
    cache = torch.full((sum(pages), PAGE_TOKENS, 512 + 64), torch.nan, dtype=torch.bfloat16, device="cuda")
    gather_context(t["cache"], t["page"], cu * PAGE_TOKENS, cache.flatten(0, 1), begin=0, latent=512)
    column = torch.arange(t["page"].shape[1], dtype=torch.int32, device="cuda")
    t |= {"cache": cache, "page": cu[:-1, None] + column}
    for name in ("out", "lse"):
        t[name].fill_(torch.nan)
    case.fp8 = False
    case.attend()
    assert all(same_bits(t[name], bits) for name, bits in zip(("out", "lse"), want, strict=True))
    assert int(t["fault"]) == 0


@pytest.mark.parametrize("keys", [1, 16])
@pytest.mark.parametrize("width", [0, 1, 2, 3, 4, 8])
def test_scores_of_keys_on_small_pages(width: int, keys: int) -> None:
    """Keys that stand for several tokens each, as those of DeepSeek V4; the last 64 of a row end in the midst of a
    page. A page that there is not is counted, and not followed."""
    rows = [(length, width or 60) for length in (130, 0, 65, 1024, 4097)]
    case = Sparse(rows, width=width, keys=keys, **V32)
    case.tensors["page"][2, 3 if keys == 16 else 1] = case.pages
    case.score()
    case.check_scores()
    # Each tile of a chunk's or a row's tokens meets it.
    assert int(case.tensors["fault"]) >= 1


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_models(dtype: torch.dtype, fp8: bool) -> None:
    case = Sparse([(300, 2), (0, 1), (64, 3)], fp8=fp8, dtype=dtype, device="cuda", features=32)
    case.write()
    case.check_keys()
    steps(case)
    check(case)


@pytest.mark.parametrize("tokens", [1, 5, 64, 600])
@pytest.mark.parametrize("values", ["normal", "few", "zeros", "wide"])
def test_selection(tokens: int, values: str) -> None:
    case = Sparse([(1, tokens)], selected=2048, device="cuda")
    score = torch.randn(tokens, 1 << 16, device="cuda")
    if values == "few":
        score = score.round()
    elif values == "zeros":
        score = score.relu() * (score > 2)
    elif values == "wide":
        score = score.sign() * 10 ** (score * 9)
    bound = torch.randint(0, (1 << 16) + 1, (tokens,), dtype=torch.int32, device="cuda")
    bound[0] = 1 << 16
    case.tensors |= {"score": score, "bound": bound}
    case.select()
    case.check_selected()


@pytest.mark.parametrize("fp8", [False, True])
def test_replayed_for_other_rows(fp8: bool) -> None:
    """The graph holds all four steps. Replays agree in every bit, and with what the same calls compute eagerly."""
    sizes = {"heads": 16, "fp8": fp8, "width": 2, "least_columns": 110, "least_pages": 300, **V32}
    case, other, third = (
        Sparse([(length, 2) for length in lengths], seed=seed, **sizes)
        for seed, lengths in enumerate([[3000, 100, 0, 64], [2, 6000, 2048, 0], [0, 0, 2050, 6300]])
    )
    workspaces = (
        sparse.SelectWorkspace.allocate(*case.tensors["score"].shape, case._poisoned),
        sparse.SparseWorkspace.allocate(8, 16, 512, 2048, torch.bfloat16, case._poisoned, fp8=fp8),
    )
    case.exact = workspaces[1].tiling.path == "fp8"
    t = case.tensors
    tokens = ("page", "row", "bound")

    def run() -> None:
        sparse.index_scores(
            t["index_q"], t["weight"], t["index"], *(t[name] for name in tokens), t["score"], t["fault"], width=2
        )
        sparse.select_positions(t["score"], t["bound"], t["selected"], t["fault"], workspaces[0])
        sparse.sparse_decode(
            *(t[name] for name in ("q", "cache", "page", "row", "selected", "out", "lse", "fault")),
            scale=case.scale,
            workspace=workspaces[1],
        )

    graph = capture(run)
    for filled in (other, third):

        def refill(filled: Sparse = filled) -> None:
            for name, tensor in t.items():
                tensor.copy_(filled.tensors[name])

        check_replays(graph, refill, [t["selected"], t["out"], t["lse"]])
        check(case)
        replayed = {name: t[name].clone() for name in ("selected", "out", "lse")}
        refill()
        run()
        assert all(same_bits(replayed[name], t[name]) for name in replayed)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_token_alone_selects_what_it_selects_in_a_batch(fp8: bool) -> None:
    batch = Sparse([(5000, 3), (2500, 3)], heads=16, fp8=fp8, invariant=True, **V32)
    batch.score()
    batch.select()
    for token in range(6):
        alone = Sparse([(5000, 3), (2500, 3)], heads=16, fp8=fp8, invariant=True, **V32)
        for name in ("index_q", "weight", "row", "bound", "score", "selected"):
            alone.tensors[name] = batch.tensors[name][token : token + 1].clone()
        alone.tensors["score"].fill_(torch.nan)
        alone.score()
        alone.select()
        assert torch.equal(alone.tensors["selected"][0], batch.tensors["selected"][token])


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("width", [1, 2])
def test_everything_selected_equals_dense_attention_bit_for_bit(width: int, heads: int, fp8: bool) -> None:
    lengths = [2048, 700, 65, *[1500] * 40]  # more tokens than are gathered at a time
    case = Sparse([(n, width) for n in lengths], heads=heads, fp8=fp8, invariant=True, width=width, **V32)
    steps(case)
    t = case.tensors
    out, lse = t["out"].view(len(lengths), width, heads, -1), t["lse"].view(len(lengths), width, heads)
    want, want_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    length = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    shape = DecodeShape(len(lengths), width, heads, 512, 64, t["page"].shape[1], invariant=True)
    workspace = schedule_decode(
        shape,
        length,
        t["page"],
        torch.bfloat16,
        lambda size: torch.empty(size, dtype=torch.uint8, device="cuda"),
        fp8=fp8,
    )
    q = t["q"].view(*out.shape[:3], -1)
    mla_decode(q, t["cache"], t["page"], length, want, want_lse, scale=case.scale, workspace=workspace, invariant=True)
    assert same_bits(out, want)
    assert same_bits(lse, want_lse)


@pytest.mark.parametrize("fp8", [False, True])
def test_pages_past_two_to_the_31_elements(fp8: bool) -> None:
    case = Sparse([(64, 1)], heads=16, fp8=fp8, **V32)
    t = case.tensors
    for name in ("index", "cache"):
        pages = 2**31 // t[name][0].numel() + 2
        large = torch.empty(pages, *t[name].shape[1:], dtype=t[name].dtype, device="cuda")
        large[-1] = t[name][int(t["page"][0, 0])]
        small = t[name]
        t[name] = large
        table = t["page"].clone()
        t["page"][0, 0] = pages - 1
        if name == "index":
            case.score()
        else:
            case.select()
            case.attend()
        t[name], t["page"] = small, table
        del large
    check(case)


def test_faults_are_counted() -> None:
    case = Sparse([(100, 1), (70, 1), (0, 1)], heads=16, width=1, **V32)
    case.plant_faults()
    case.score()
    assert int(case.tensors["fault"]) == 2
    case.tensors["selected"].fill_(-1)
    case.tensors["selected"][1, :3] = torch.tensor([-2, 1 << 20, 3], dtype=torch.int32)
    case.tensors["row"][0] = 77
    case.tensors["selected"][0, 5:7] = 1
    case.attend()
    assert int(case.tensors["fault"]) == 2 + 4
    case.check_attention()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("context", "least"), [(16384, 0.99), (131072, 0.985)])
def test_recall_of_an_index_in_int8(context: int, least: float, kind: str) -> None:
    assert recall(kind, tokens=8, context=context, device="cuda") >= least
