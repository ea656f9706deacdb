"""The experts' products with weights in FP8, INT4 and MXFP4 in the repaired interpreter, which reads nothing but the
arguments' memory. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import bounds, interpreter

interpreter.repair()
bounds.check_bounds()

from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from experts_case import Experts, Format, exact  # noqa: E402
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from kernels.matrix import BlockScaled, GroupScaled, Matrix, MicroScaled4  # noqa: E402
from kernels.moe import schedule  # noqa: E402
from kernels.moe.schedule import ExpertsShape, Workspace  # noqa: E402

FORMATS: list[Format] = ["int4", "mxfp8", "mxfp4", (128, 128), (16, 64)]
BLOCKS: list[Format] = [(rows, features) for rows in (16, 32, 64, 128) for features in (64, 128)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_any_number_of_tokens(tokens: int, format: Format, dtype: torch.dtype) -> None:
    case = Experts(tokens, 3, 6, 192, 32, dtype, shared=1, holes=True, formats=(format, format))
    case.run()
    case.check()


@pytest.mark.parametrize("format", ["int4", "mxfp4", (16, 64)])
@pytest.mark.parametrize("tokens", [1, 2, 12])
def test_clamped(tokens: int, format: Format) -> None:
    case = Experts(tokens, 3, 6, 192, 32, holes=True, formats=(format, format), limit=0.5)
    case.run()
    case.check()


@pytest.mark.parametrize("rows", [0, 16])
def test_added_to_what_comes_before(rows: int) -> None:
    """Blocks of `down` overlap, of tokens without tiles."""
    case = Experts(3, 3, 5, 144, 80, formats=((16, 64), (16, 64)), added=True, holes=True, padded=(1,))
    case.run(case.tiling(rows=rows))
    case.check()


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 9),
    sizes=st.tuples(st.sampled_from([32, 64, 96, 160, 288]), st.sampled_from([32, 64, 96, 224])),
    formats=st.tuples(
        st.sampled_from(["int4", "mxfp8", "mxfp4", None, *BLOCKS]),
        st.sampled_from(["int4", "mxfp8", "mxfp4", None, *BLOCKS]),
    ),
    rows=st.sampled_from([None, 16, 64, 128]),
    groups=st.sampled_from([0, 0, 1, 2, 4, 8]),
    tma=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_blocks_and_tiles_that_do_not_divide_each_other(
    tokens: int,
    sizes: tuple[int, int],
    formats: tuple[Format, Format],
    rows: int | None,
    groups: int,
    tma: bool,
    seed: int,
) -> None:
    """Either matrix in either format or in neither, tiles that begin inside a block of rows, groups of features to be
    summed apart that begin inside a block or a group of theirs; through the copy engine and not."""
    case = Experts(tokens, 2, 3, *sizes, groups=groups, formats=formats, seed=seed)
    tiling = case.tiling() if rows is None else case.tiling(rows=rows)
    if not tma or tiling.rows == 0:
        gate_up, down = (replace(product, tma=False) for product in (tiling.gate_up, tiling.down))
        tiling = replace(tiling, gate_up=gate_up, down=down)
    case.run(tiling)
    case.check()


@pytest.mark.parametrize("sizes", [(16, 16), (48, 80)])
@pytest.mark.parametrize("rows", [0, 16])
def test_features_that_pieces_of_fp8_do_not_divide(sizes: tuple[int, int], rows: int) -> None:
    case = Experts(3, 3, 5, *sizes, dtype=torch.float32, formats=((32, 64), (16, 64)))
    case.run(case.tiling(rows=rows))
    case.check()


@pytest.mark.parametrize(("rows", "format"), [(0, "mxfp8"), (0, (128, 128)), *((16, format) for format in FORMATS)])
def test_padded_tokens_get_zero_and_disturb_nobody(rows: int, format: Format) -> None:
    case = Experts(5, 2, 4, 64, 32, padded=(0, 3), holes=True, formats=(format, format))
    case.tensors["id"][1] = torch.tensor([4, 2**40])
    case.run(case.tiling(rows=rows))
    assert bool((case.tensors["out"][1] == 0).all())
    case.check()


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_token_alone_equals_the_token_in_a_batch(tokens: int, format: Format) -> None:
    batch = Experts(20, 2, 4, 64, 96, groups=4, skewed=True, formats=(format, format))
    out = batch.run().clone()
    part = Experts(tokens, 2, 4, 64, 96, groups=4, weights=batch.weights)
    mine = slice(20 - tokens, 20)
    for name in ("x", "id", "weight", "out"):
        part.tensors[name].copy_(batch.inputs[name][mine])
    assert torch.equal(part.run(), out[mine])


@pytest.mark.parametrize(
    ("format", "intermediate", "walked"),
    [
        ((16, 64), 8 * 64, 4),
        ((128, 128), 8 * 128, 4),
        ((16, 64), 8 * 48, 1),  # groups that end inside of a step
    ],
)
def test_programs_of_several_groups_have_the_bits_of_one_for_each(
    format: Format, intermediate: int, walked: int
) -> None:
    case = Experts(9, 3, 5, 96, intermediate, groups=8, holes=True, padded=(4,), formats=(format, format))
    assert case.tiling().walked == walked
    want = case.run(case.tiling(walked=1)).clone()
    for several in range(1, walked + 1):
        if 8 % several == 0:
            case.refill()
            assert torch.equal(case.run(case.tiling(walked=several)), want)
            case.check()


@pytest.mark.parametrize(
    ("intermediate", "format", "ranks"),
    [(512, (64, 128), 4), (384, (16, 64), 2), (64, "int4", 2), (768, "int4", 8), (64, "mxfp4", 2)],
)
def test_ranks_parts_are_the_parts_of_one(intermediate: int, format: Format, ranks: int) -> None:
    """Shares may be any of the rows of `gate_up` and of the columns of `down` that keep blocks or groups whole."""
    whole = Experts(9, 2, 3, 64, intermediate, groups=8, formats=(format, format))
    assert whole.weights is not None
    out = whole.run().clone()
    share, groups = intermediate // ranks, 8 // ranks
    for rank in range(ranks):
        weights = _share(whole.weights[0], whole.weights[1], rank, share)
        part = Experts(9, 2, 3, 64, share, groups=groups, weights=weights)
        kept = slice(rank * groups, (rank + 1) * groups)
        for name in ("x", "id", "weight"):
            part.tensors[name].copy_(whole.inputs[name])
        part.tensors["out"].copy_(whole.inputs["out"][:, kept])
        assert torch.equal(part.run(), out[:, kept])


def _share(gate_up: Matrix, down: Matrix, rank: int, share: int) -> tuple[Matrix, Matrix]:
    """A rank's rows of gate and of up, and its columns of `down`."""

    def rows(x: torch.Tensor, unit: int) -> torch.Tensor:
        gate, up = x.chunk(2, 1)
        mine = slice(rank * share // unit, (rank + 1) * share // unit)
        return torch.cat([gate[:, mine], up[:, mine]], 1)

    def columns(x: torch.Tensor, unit: int) -> torch.Tensor:
        return x[:, :, rank * share // unit : (rank + 1) * share // unit].contiguous()

    if isinstance(gate_up, BlockScaled) and isinstance(down, BlockScaled):
        sizes = gate_up.rows, gate_up.features
        scales = rows(gate_up.scales, gate_up.rows), columns(down.scales, down.features)
        return (
            BlockScaled(rows(gate_up.data, 1), scales[0], *sizes),
            BlockScaled(columns(down.data, 1), scales[1], *sizes),
        )
    assert isinstance(gate_up, GroupScaled | MicroScaled4)
    assert isinstance(down, GroupScaled | MicroScaled4)
    return (
        type(gate_up)(rows(gate_up.data, 1), rows(gate_up.scales, 1)),
        type(down)(columns(down.data, 2), columns(down.scales, 32)),
    )


@pytest.mark.parametrize(("format", "most"), [((64, 128), 2e-6), ((128, 64), 2e-6), ("int4", 2**-9), ("mxfp4", 2e-6)])
def test_what_is_rounded(format: Format, most: float) -> None:
    """Sums of FP8 weights differ from float64 by what sums of a hundred in fp32 do. INT4 weights are rounded to 8 bits,
    by at most 2**-9 of each, independently; MXFP4 weights are not."""
    case = Experts(5, 2, 3, 64, 256, groups=2, formats=(None, format))
    tiling = case.tiling()
    call = case.call(tiling, case.workspace(tiling))
    call.run()
    assert case.weights is not None
    scratch, id = call.scratch, case.tensors["id"].flatten()
    for place, pair in enumerate(scratch.sorted_Y[: len(id)].tolist()):
        down = exact(case.weights[1], int(id[pair])).unflatten(1, (2, -1))
        want = torch.einsum("gi,egi->ge", scratch.act_YI[place].double().unflatten(0, (2, -1)), down)
        error = torch.linalg.vector_norm(scratch.partial_YGE[pair] - want) / torch.linalg.vector_norm(want)
        assert error < most


def test_tiles_for_weights_of_another_format_are_refused() -> None:
    case, other = (Experts(2, formats=(format, format)) for format in ("int4", (64, 64)))
    with pytest.raises(ValueError, match="stored as"):
        case.run(other.tiling())


@pytest.mark.parametrize("formats", [("int4", "int4"), ((128, 128), None), (None, "int4")])
@pytest.mark.parametrize("tokens", [1, 16, 256, 512, 1024])
def test_hoppers_own_kernels_get_plain_weights_alone(tokens: int, formats: tuple[Format, Format]) -> None:
    """Others are left to Triton, in the same memory and in tiles of the same height; a single token has tiles with INT4
    alone."""
    shape = ExpertsShape(tokens, 4, 16, 256, 128, shared=1, hopper=132)
    plain, scaled = schedule.tiling(shape), schedule.tiling(shape, Experts(1, 1, 2, 256, 128, formats=formats).stored)
    assert bool(plain.programs) == (tokens >= 512)
    tiles_of_one = 16 if "int4" in formats else 0
    assert (scaled.rows, scaled.programs) == (plain.rows if tokens > 1 else tiles_of_one, 0)
    assert Workspace.bytes(shape, scaled) == Workspace.bytes(shape, plain)
