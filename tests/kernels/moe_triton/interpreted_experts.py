"""Sorting and the experts' products in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from experts_case import Experts  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernels.moe import schedule  # noqa: E402
from kernels.moe.schedule import ExpertTiling, Workspace  # noqa: E402


def check(case: Experts, tiling: ExpertTiling | None = None) -> None:
    case.run(tiling)
    case.check()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 2, 5, 40])
def test_any_number_of_tokens(tokens: int, dtype: torch.dtype) -> None:
    check(Experts(tokens, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "groups"), [(1, 0), (5, 0), (40, 0), (5, 4)])
def test_clamped(tokens: int, groups: int, dtype: torch.dtype) -> None:
    case = Experts(tokens, dtype=dtype, groups=groups, limit=0.5)
    check(case)
    assert not torch.allclose(case.expected(), replace(case, limit=0.0, tensors={}, inputs={}).expected(), rtol=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 16, 64, 128])
def test_added_to_what_comes_before(rows: int, dtype: torch.dtype) -> None:
    """Blocks of `down` overlap, of tokens without tiles."""
    case = Experts(5, 3, 5, 144, 80, dtype=dtype, added=True, holes=True, padded=(1, 4))
    check(case, case.tiling(rows=rows))
    assert torch.equal(case.tensors["before"], case.inputs["before"])


@pytest.mark.parametrize("rows", [0, 16])
def test_clamping_leaves_what_is_not_a_number(rows: int) -> None:
    case = Experts(4, 2, limit=0.5)
    case.tensors["x"][1] = torch.nan
    out = case.run(case.tiling(rows=rows))
    assert out.isnan().any(1).tolist() == [False, True, False, False]


@pytest.mark.parametrize("shared", [1, 2])
@pytest.mark.parametrize("tokens", [1, 2, 3, 40, 70])
def test_shared_experts_have_every_token(tokens: int, shared: int) -> None:
    """Few tokens fill all tiles that can be filled: every choice is another expert, each with one pair."""
    check(Experts(tokens, 2 + shared, 8 + shared, shared=shared))
    padded = tuple(range(0, tokens, 3))
    check(Experts(tokens, 2 + shared, 8 + shared, shared=shared, padded=padded, skewed=True))
    check(Experts(tokens, 2 + shared, 8 + shared, shared=shared, groups=4, padded=padded))


@pytest.mark.parametrize("rows", [0, 16, 32, 64])
@pytest.mark.parametrize("sizes", [(48, 80), (16, 16), (144, 176)])
def test_features_that_blocks_do_not_divide(sizes: tuple[int, int], rows: int) -> None:
    case = Experts(3, 3, 5, *sizes, dtype=torch.float32)
    check(case, case.tiling(rows=rows))


@pytest.mark.parametrize("rows", [0, 16, 64])
@pytest.mark.parametrize("padded", [(0,), (2, 3, 4), (0, 1, 2, 3, 4)])
def test_padded_tokens_get_zero_and_disturb_nobody(padded: tuple[int, ...], rows: int) -> None:
    case = Experts(5, 2, padded=padded, holes=True)
    check(case, case.tiling(rows=rows))


def test_ids_of_no_expert_are_no_work() -> None:
    case = Experts(4, 2)
    case.tensors["id"][1:3] = torch.tensor([[8, 2**40], [-5, -(2**40)]])
    for rows in (0, 16):
        case.run(case.tiling(rows=rows))
        assert bool((case.tensors["out"][1:3] == 0).all())
        want = case.expected()
        torch.testing.assert_close(case.tensors["out"][[0, 3]].double(), want[[0, 3]], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("rows", [16, 32])
def test_an_expert_of_several_tiles(rows: int) -> None:
    case = Experts(70, 2, 9, skewed=True, holes=True)
    check(case, case.tiling(rows=rows))


@pytest.mark.parametrize("rows", [16, 32])
def test_nothing_is_written_for_pairs_that_are_no_work(rows: int) -> None:
    case = Experts(30, 2, holes=True)
    tiling = case.tiling(rows=rows)
    call = case.call(tiling, case.workspace(tiling))
    call.run()
    wanted = (case.tensors["id"].flatten() >= 0).sum()
    assert 0 < wanted < 60
    assert bool(call.scratch.act_YI[wanted:].isnan().all())
    assert not call.scratch.act_YI[:wanted].isnan().any()
    assert torch.equal(call.scratch.partial_YGE.isnan().all(2)[:, 0], case.tensors["id"].flatten() < 0)


def test_weights_through_the_copy_engine() -> None:
    case = Experts(20, 2, 3, 64, 48)
    tiling = case.tiling(rows=16)
    boxed = replace(tiling, gate_up=replace(tiling.gate_up, tma=True), down=replace(tiling.down, tma=True))
    check(case, boxed)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.one_of(st.integers(1, 60), st.sampled_from([127, 129, 256, 300])),
    chosen=st.integers(1, 8),
    experts=st.sampled_from([8, 9, 13, 31, 32, 64, 65, 100, 130]),
    rows=st.sampled_from([16, 32, 64, 128]),
    few=st.sampled_from([0, schedule.FEW]),
    span=st.sampled_from([32, 128, 2048]),
    holes=st.booleans(),
    skewed=st.booleans(),
    shared=st.integers(0, 2),
    spread=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_sorting(
    tokens: int,
    chosen: int,
    experts: int,
    rows: int,
    few: int,
    span: int,
    holes: bool,
    skewed: bool,
    shared: int,
    spread: bool,
    seed: int,
) -> None:
    skewed, shape = skewed and chosen + 1 < experts, (chosen + shared, experts + shared, 16, 16)
    case = Experts(tokens, *shape, shared=shared, holes=holes, skewed=skewed, seed=seed)
    experts = case.experts
    tiling = case.tiling(rows=rows, spread=spread)
    call = case.call(tiling, case.workspace(tiling))
    call.sort(span, few)
    scratch = call.scratch
    id = case.tensors["id"].flatten()
    want = [[pair for pair in range(len(id)) if id[pair] == expert] for expert in range(experts)]
    table = scratch.table.view(-1, 4).tolist()
    assert table[0][0] <= tiling.tiles(case.shape)
    got: list[list[int]] = [[] for _ in want]
    for expert, first, pairs, _ in table[1 : 1 + table[0][0]]:
        assert 0 < pairs <= rows
        got[expert] += scratch.sorted_Y[first : first + pairs].tolist()
    assert got == want
    tiles = [-(-len(pairs) // rows) for pairs in want]
    assert table[0] == [sum(tiles), sum(tiles[: experts - shared if spread else experts]), 0, 0]


def test_sums_of_groups_that_are_added_to_nothing() -> None:
    """They have the bits of those that are added to 0, whatever the output holds."""
    case = Experts(9, 3, 5, 48, 176, groups=4, holes=True, padded=(4,), adds=False)
    case.tensors["out"].fill_(torch.nan)
    check(case)
    got = case.tensors["out"].clone()
    zeros = Experts(9, 3, 5, 48, 176, groups=4, holes=True, padded=(4,))
    zeros.tensors["out"].zero_()
    assert torch.equal(zeros.run(), got)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("intermediate", "groups"), [(16, 8), (48, 2), (176, 4), (32, 1)])
def test_groups(intermediate: int, groups: int, dtype: torch.dtype) -> None:
    check(Experts(9, 3, 5, 48, intermediate, dtype, groups, holes=True, padded=(4,)))


@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 16, 17, 64])
def test_a_token_alone_equals_the_token_in_a_batch(tokens: int) -> None:
    batch = Experts(70, 2, 4, groups=8, skewed=True)
    out = batch.run().clone()
    for start in {0, 33, 70 - tokens}:
        part = Experts(tokens if start + tokens <= 70 else 1, 2, 4, groups=8, weights=batch.weights)
        mine = slice(start, start + part.tokens)
        for name in ("x", "id", "weight", "out"):
            part.tensors[name].copy_(batch.inputs[name][mine])
        assert torch.equal(part.run(), out[mine])


def test_companions_that_are_not_numbers_change_nothing() -> None:
    batch = Experts(40, 2, 4, groups=8, skewed=True)
    out = batch.run().clone()
    batch.refill()
    batch.tensors["x"][1::2] = torch.nan
    batch.tensors["x"][2::4] = 3e38
    assert torch.equal(batch.run()[::4], out[::4])


@pytest.mark.parametrize("intermediate", [32, 352])
def test_ranks_parts_are_the_parts_of_one(intermediate: int) -> None:
    whole = Experts(20, 2, 4, intermediate=intermediate, groups=8)
    assert whole.weights is not None
    out = whole.run().clone()
    gate_up, down = whole.weights
    share = intermediate // 2
    for rank in range(2):
        mine, kept = slice(rank * share, (rank + 1) * share), slice(rank * 4, (rank + 1) * 4)
        up = slice(intermediate + mine.start, intermediate + mine.stop)
        weights = torch.cat([gate_up[:, mine], gate_up[:, up]], 1), down[:, :, mine].contiguous()
        part = Experts(20, 2, 4, intermediate=share, groups=4, weights=weights)
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(whole.inputs[name])
        part.tensors["out"].copy_(whole.inputs["out"][:, kept])
        assert torch.equal(part.run(), out[:, kept])


def test_memory_follows_from_the_sizes() -> None:
    case = Experts(6)
    tiling = schedule.tiling(case.shape)
    need = Workspace.bytes(case.shape, tiling)
    with pytest.raises(ValueError, match="uint8 buffer"):
        Workspace.over(torch.empty(need - 1, dtype=torch.uint8), case.shape, tiling)
    with pytest.raises(ValueError, match="multiples of 16"):
        Experts(2, hidden=24).run()
    with pytest.raises(ValueError, match="some experts must be left to choose"):
        replace(case.shape, shared=2)
    with pytest.raises(ValueError, match="48 features do not make 5 equal groups"):
        Experts(2, intermediate=48, groups=5).run()


@pytest.mark.parametrize(("ranks", "walked"), [(1, 2), (4, 2), (8, 1)])
def test_sums_of_groups_have_a_kernel_of_their_own_on_hopper(ranks: int, walked: int) -> None:
    """Those of DeepSeek-V2-Lite, whose experts' features are shared out, but of very many tokens."""
    alone = schedule.ExpertsShape(1, 8, 66, 2048, 1408 // ranks, groups=8 // ranks, hopper=132)
    for tokens in (1, 2, 64, 2000, 5000):
        tiling = schedule.tiling(replace(alone, tokens=tokens))
        portable = schedule.tiling(replace(alone, tokens=tokens, hopper=0))
        assert Workspace.bytes(alone, tiling) == Workspace.bytes(alone, portable)
        assert (tiling.walked, tiling.down_programs) == ((walked, 132) if tokens <= 2000 else (1, 0))
        assert not portable.down_programs
        assert not schedule.tiling(replace(alone, tokens=tokens, groups=0)).down_programs


@pytest.mark.parametrize("tokens", [2, 16, 64, 128, 129, 256, 1000])
def test_shared_experts_do_not_change_the_tiles(tokens: int) -> None:
    """Shared experts' pairs are many, those of the others not more for it."""
    routed = schedule.ExpertsShape(tokens, 6, 64, 2048, 1408)
    assert schedule.tiling(replace(routed, chosen=8, experts=66, shared=2)) == schedule.tiling(routed)


def test_hopper_takes_the_tallest_tiles_of_what_its_kernels_take() -> None:
    """Everything else is left to Triton, in the same memory."""
    many = schedule.ExpertsShape(1024, 8, 66, 2048, 1408, shared=2)
    portable, own = schedule.tiling(many), schedule.tiling(replace(many, hopper=132))
    assert (portable.rows, portable.programs) == (128, 0)
    assert (own.rows, own.programs) == (128, 132)
    assert Workspace.bytes(many, own) == Workspace.bytes(many, portable)
    for other in (
        replace(many, tokens=256),
        replace(many, tokens=1),
        replace(many, groups=8, dtype=torch.float32),
        replace(many, groups=8, hidden=112),
        replace(many, dtype=torch.float32),
        replace(many, hidden=48),
        replace(many, intermediate=16),
    ):
        assert schedule.tiling(replace(other, hopper=132)) == schedule.tiling(other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 32), (80, 48)])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 0), (2, 16), (5, 16), (9, 64)])
def test_sums_go_onto_the_residual_and_are_normed(
    tokens: int, rows: int, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Sums are those of a launch for the sum and one for the norm; padding adds nothing."""
    case = Experts(tokens, 3, 6, *sizes, dtype, shared=1, holes=True, padded=(0,) if tokens > 2 else ())
    sum, norm = case.run(case.tiling(rows=rows)).clone(), case.norm()
    case.refill()
    case.run(case.tiling(rows=rows), norm=norm)
    case.check_norm(norm, sum)
