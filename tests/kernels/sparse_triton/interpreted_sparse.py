"""The kernels of sparse attention in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from sparse_case import VALUES, Sparse, drawn_scores  # noqa: E402

from kernels.mla_decode import launch as dense  # noqa: E402
from kernels.mla_decode.schedule import DecodeShape, Workspace, portable_tiling  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()

ROWS = st.lists(st.tuples(st.integers(0, 90) | st.integers(120, 300), st.integers(1, 5)), min_size=1, max_size=4)


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("features", [128, 48])
def test_keys(features: int, dtype: torch.dtype, fp8: bool) -> None:
    case = Sparse([(70, 1), (3, 1)], features=features, dtype=dtype, fp8=fp8, kernels=True)
    case.write()
    case.check_keys()


@pytest.mark.parametrize(("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)])
@pytest.mark.parametrize(("index_heads", "features"), [(64, 128), (32, 128), (3, 48)])
@pytest.mark.parametrize("width", [0, 1, 2, 5])
def test_scores(width: int, index_heads: int, features: int, dtype: torch.dtype, fp8: bool) -> None:
    rows = [(130, max(width, 1)), (0, max(width, 1)), (65, max(width, 1))]
    case = Sparse(rows, index_heads=index_heads, features=features, dtype=dtype, fp8=fp8, kernels=True, width=width)
    case.score()
    case.check_scores()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keys", [16, 1, 32])
@pytest.mark.parametrize("width", [0, 1, 3])
def test_scores_of_keys_on_small_pages(width: int, keys: int, dtype: torch.dtype) -> None:
    """Keys that stand for several tokens each; the last 64 of a row end in the midst of a page."""
    rows = [(130, max(width, 1)), (0, max(width, 1)), (65, max(width, 1))]
    case = Sparse(rows, index_heads=5, features=48, dtype=dtype, kernels=True, width=width, keys=keys)
    case.tensors["page"][2, 3 if keys == 16 else 1] = case.pages
    case.score()
    case.check_scores()
    assert int(case.tensors["fault"]) == 1


@settings(max_examples=15, deadline=None)
@given(rows=ROWS, width=st.integers(0, 8), index_heads=st.integers(1, 33), fp8=st.booleans(), seed=st.integers(0, 99))
def test_any_rows(rows: list[tuple[int, int]], width: int, index_heads: int, fp8: bool, seed: int) -> None:
    case = Sparse(rows, index_heads=index_heads, features=32, width=width, fp8=fp8, seed=seed, kernels=True)
    case.score()
    case.check_scores()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_keys_and_queries_in_int8_that_are_not_finite_are_seen_in_their_own_scores(number: float) -> None:
    """A query tells by its weight, into which its scale was multiplied."""
    case = Sparse([(70, 2)], fp8=True, kernels=True)
    case.key[5, 3] = number
    case.write()
    case.tensors["weight"][1, 2] = torch.nan
    case.score()
    score = case.tensors["score"]
    assert score[0, :69].isnan().nonzero().tolist() == [[5]]
    assert score[1, :70].isnan().all()


def test_pages_and_bounds_outside_are_counted_and_not_followed() -> None:
    case = Sparse([(100, 1), (70, 1), (0, 1), (20, 1)], width=1, kernels=True)
    case.plant_faults()
    case.tensors["row"][3] = -1
    case.score()
    assert int(case.tensors["fault"]) == 3
    case.check_scores()


def test_a_token_alone_equals_the_token_in_a_batch() -> None:
    batch = Sparse([(200, 3), (70, 2)], invariant=True, kernels=True, dtype=torch.bfloat16)
    batch.score()
    for token, bound in enumerate(batch.tensors["bound"].tolist()):
        alone = Sparse([(200, 3), (70, 2)], invariant=True, kernels=True, dtype=torch.bfloat16)
        for name in ("index_q", "weight", "row", "bound", "score"):
            alone.tensors[name] = batch.tensors[name][token : token + 1].clone()
        alone.tensors["score"].fill_(torch.nan)
        alone.score()
        assert torch.equal(alone.tensors["score"][0, :bound], batch.tensors["score"][token, :bound])


def select(scores: torch.Tensor, bounds: list[int], selected: int, columns: int = 0) -> Sparse:
    """Positions of given scores; those behind the bounds are large."""
    case = Sparse([(1, len(bounds))], selected=selected, kernels=True)
    case.tensors["bound"] = torch.tensor(bounds, dtype=torch.int32)
    behind = torch.arange(scores.shape[1]) >= case.tensors["bound"].unsqueeze(1)
    case.tensors["score"] = scores.masked_fill(behind, 1e30)
    case.select()
    case.check_selected()
    return case


@settings(max_examples=20, deadline=None)
@given(
    bounds=st.lists(st.integers(0, 130) | st.integers(0, 4096), min_size=1, max_size=3),
    selected=st.sampled_from([1, 3, 64, 700, 2048]),
    values=st.sampled_from(VALUES),
    seed=st.integers(0, 99),
)
def test_selection(bounds: list[int], selected: int, values: str, seed: int) -> None:
    select(drawn_scores(values, len(bounds), 4096, seed), bounds, selected)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("tokens", [60, 150])
def test_selection_in_long_contexts(tokens: int, values: str) -> None:
    """Several programs select for a token, or one."""
    bounds = [40000, 20001, 8192, 2049] + [0] * (tokens - 4)
    select(drawn_scores(values, len(bounds), 40960, tokens), bounds, 2048)


def test_a_bound_outside_the_scores_selects_nothing_and_is_counted() -> None:
    case = Sparse([(1, 3)], selected=5, kernels=True)
    case.tensors["bound"] = torch.tensor([-1, 64, case.tensors["score"].shape[1] + 1], dtype=torch.int32)
    case.tensors["score"].normal_()
    case.select()
    assert int(case.tensors["fault"]) == 2
    assert case.tensors["selected"][[0, 2]].eq(-1).all()
    assert case.tensors["selected"][1].ge(0).all()


def chosen(case: Sparse, seed: int = 0) -> Sparse:
    """Choose some of what each token sees, in rising order, with absent ones behind and between them."""
    random = torch.Generator().manual_seed(seed)
    selected = case.tensors["selected"].fill_(-1)
    for token, bound in enumerate(case.tensors["bound"].tolist()):
        some = torch.randperm(bound, generator=random)[: case.selected].sort().values
        selected[token, : len(some)] = some.to(torch.int32)
        gaps = torch.rand(case.selected, generator=random) < 0.1 * (token % 2)
        selected[token, gaps] = -1
    return case


@pytest.mark.parametrize(
    ("dtype", "fp8"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)]
)
@pytest.mark.parametrize(("heads", "programs"), [(1, 1), (3, 5), (16, 132), (40, 1), (126, 8)])
def test_attention(heads: int, programs: int, dtype: torch.dtype, fp8: bool) -> None:
    rows = [(300, 2), (0, 1), (64, 1), (1, 1)]
    case = Sparse(rows, heads=heads, selected=160, dtype=dtype, fp8=fp8, kernels=True, programs=programs)
    chosen(case).attend()
    case.check_attention()
    assert int(case.tensors["fault"]) == 0


@pytest.mark.parametrize(("latent", "rope"), [(48, 24), (6, 12), (200, 16), (128, 8), (512, 64)])
@pytest.mark.parametrize(("dtype", "fp8"), [(torch.bfloat16, False), (torch.bfloat16, True), (torch.float32, True)])
def test_sizes(latent: int, rope: int, dtype: torch.dtype, fp8: bool) -> None:
    case = Sparse([(130, 2)], latent=latent, rope=rope, selected=100, dtype=dtype, fp8=fp8, kernels=True, programs=3)
    chosen(case).attend()
    case.check_attention()


@settings(max_examples=15, deadline=None)
@given(
    rows=ROWS,
    heads=st.integers(1, 40),
    selected=st.integers(1, 200),
    programs=st.integers(1, 60),
    seed=st.integers(0, 99),
)
def test_attention_of_any_rows(
    rows: list[tuple[int, int]], heads: int, selected: int, programs: int, seed: int
) -> None:
    case = Sparse(rows, heads=heads, latent=32, rope=8, selected=selected, seed=seed, kernels=True, programs=programs)
    chosen(case, seed).attend()
    case.check_attention()


def test_positions_and_pages_outside_are_counted_and_not_followed() -> None:
    case = chosen(Sparse([(100, 1), (70, 1), (20, 1)], heads=2, selected=64, kernels=True, programs=7))
    case.tensors["selected"][0, 3:6] = torch.tensor([-2, 1 << 20, 1 << 30], dtype=torch.int32)
    case.tensors["selected"][1] = torch.arange(64)
    case.tensors["page"][1, 0] = case.pages
    case.tensors["row"][2] = 3
    case.tensors["selected"][2, 2:] = -1
    case.attend()
    assert int(case.tensors["fault"]) == 3 + 64 + 2
    case.check_attention()


def test_all_steps() -> None:
    case = Sparse([(300, 2), (40, 1)], heads=3, selected=64, dtype=torch.bfloat16, fp8=True, kernels=True)
    case.write()
    case.score()
    case.select()
    case.attend()
    case.check_scores()
    case.check_selected()
    case.check_attention()


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("latent", "rope"), [(64, 16), (6, 12), (6, 9)])
def test_invariant_mode(latent: int, rope: int, fp8: bool) -> None:
    rows = [(130, 2), (0, 1), (64, 1), (3, 1)]
    case = Sparse(
        rows,
        heads=3,
        latent=latent,
        rope=rope,
        selected=100,
        dtype=torch.bfloat16,
        fp8=fp8,
        invariant=True,
        kernels=True,
    )
    chosen(case)
    case.tensors["selected"][0, 4] = -7
    case.attend()
    case.check_attention()
    assert int(case.tensors["fault"]) == 1


@pytest.mark.parametrize("fp8", [False, True])
def test_everything_selected_equals_dense_attention_bit_for_bit(fp8: bool) -> None:
    rows, width, heads = [(700, 2), (64, 2), (40, 2)], 2, 3
    case = Sparse(rows, heads=heads, selected=704, dtype=torch.bfloat16, fp8=fp8, invariant=True, kernels=True)
    case.score()
    case.select()
    case.attend()
    t = case.tensors
    out, lse = t["out"].view(len(rows), width, heads, -1), t["lse"].view(len(rows), width, heads)
    want, want_lse = torch.full_like(out, torch.nan), torch.full_like(lse, torch.nan)
    shape = DecodeShape(len(rows), width, heads, case.latent, case.rope, t["page"].shape[1], invariant=True)
    tiling = portable_tiling(shape, 5, fp8=fp8)
    size = Workspace.bytes(shape, tiling, case.dtype)
    workspace = Workspace.over(torch.empty(size, dtype=torch.uint8), shape, tiling, case.dtype)
    length = torch.tensor([length for length, _ in rows], dtype=torch.int32)
    dense.schedule(length, t["page"], workspace)
    dense.attend(t["q"].view(*out.shape[:3], -1), t["cache"], t["page"], length, want, want_lse, workspace, scale=0.11)
    dense.merge(want, want_lse, workspace)
    assert torch.equal(out, want)
    assert torch.equal(lse, want_lse)
