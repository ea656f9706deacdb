"""Entries of DeepSeek V4, reference and Triton, in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

from types import ModuleType  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from compressed_case import ARBITRARY_PAGE, TOLERANCE, Attending, Compressing, Storing, rotations, turned  # noqa: E402

from kernels.compressed import attention_launch, launch, reference  # noqa: E402
from kernels.residual_streams import StreamMemory  # noqa: E402
from tests.support.bounds import check_bounds  # noqa: E402

check_bounds()

PATHS = {"reference": reference, "triton": launch}
both = pytest.mark.parametrize("functions", PATHS.values(), ids=PATHS)


@both
@pytest.mark.parametrize(
    ("ratio", "features", "overlaps", "rope", "dtype", "made_dtype"),
    [
        (4, 16, True, 8, torch.float32, torch.float32),
        (4, 24, True, 4, torch.bfloat16, torch.float32),
        (8, 8, False, 8, torch.float32, torch.bfloat16),
        (64, 16, False, 2, torch.float16, torch.float32),
        (128, 12, False, 6, torch.bfloat16, torch.float16),
    ],
)
def test_compressor(
    ratio: int,
    features: int,
    overlaps: bool,
    rope: int,
    dtype: torch.dtype,
    made_dtype: torch.dtype,
    functions: ModuleType,
) -> None:
    """Chunks longer and shorter than the ring, then decode rows of changing width whose drafts are rejected."""
    case = Compressing(
        3,
        3 * ratio + 60,
        ratio=ratio,
        features=features,
        overlaps=overlaps,
        rope=rope,
        width=5,
        dtype=dtype,
        made_dtype=made_dtype,
        functions=functions,
    )
    case.run([ratio * 3 + 5, 0, ratio - 3])
    case.run([1, 2 * ratio - 2, ratio])
    for width, accepted in ((5, [4, 0, 2]), (1, [0, 0, 0]), (5, [0, 3, 4]), (3, [2, 0, 1]), (5, [0, 0, 1])):
        case.run([width] * 3, width, accepted)


@both
def test_every_phase_of_an_entry_with_every_number_of_rejected_drafts(functions: ModuleType) -> None:
    for width in (2, 8):
        case = Compressing(
            4, 120, ratio=4, features=8, overlaps=True, rope=4, width=width, functions=functions, spare=width
        )
        case.run([1, 2, 3, 4])
        for accepted in range(width):
            case.run([width] * 4, width, [accepted, width - 1 - accepted, 0, width - 1])


@both
def test_what_is_not_finite_stays_in_its_row(functions: ModuleType) -> None:
    case = Compressing(2, 16, ratio=4, features=8, overlaps=True, rope=4, functions=functions)
    case.made[1, 2] = torch.nan
    rows, order = case.step([8, 8])
    made = torch.stack([case.made[row, position] for row, position in order])
    functions.compress(made, case.bias, case.norm, case.rotation, case.state, case.entry, rows, case.eps)
    finite = [[bool(case.entry[case.place(row, number)].isfinite().all()) for number in (0, 1)] for row in (0, 1)]
    assert finite == [[True, True], [False, False]]
    assert bool(case.state[case.slot[0] + 1].isfinite().all())


@both
def test_what_lies_outside_is_counted_and_not_followed(functions: ModuleType) -> None:
    case = Compressing(4, 16, ratio=4, features=8, overlaps=True, rope=4, functions=functions)
    rows, order = case.step([4, 4, 4, 4])
    rows.page_RP[0, 0] = ARBITRARY_PAGE
    rows.page_RP[1, 0] = -1
    rows.slot_R[2] = case.slots
    rows.row_T[12:16] = 9
    made = torch.stack([case.made[row, position] for row, position in order])
    functions.compress(made, case.bias, case.norm, case.rotation, case.state, case.entry, rows, case.eps)
    assert bool(case.entry.isnan().all())
    assert int(rows.fault_1) == 2 + 8
    assert case.state.isfinite().any(2).any(1).nonzero().flatten().tolist() == sorted(case.slot[i] + 1 for i in (0, 1))


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "features", "rope"), [(1, 8, 8), (5, 24, 4), (3, 136, 64)])
def test_queries_and_the_window(
    heads: int, features: int, rope: int, dtype: torch.dtype, functions: ModuleType
) -> None:
    case = Storing(
        3, 70, heads=heads, features=features, rope=rope, window=10, width=4, dtype=dtype, functions=functions
    )
    case.run([30, 0, 2])
    case.run([1, 13, 20])
    for width, accepted in ((4, [3, 0, 2]), (1, [0, 0, 0]), (4, [0, 1, 3]), (3, [2, 0, 1])):
        case.run([width] * 3, width, accepted)


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("heads", "features", "rope"), [(1, 8, 8), (5, 24, 4), (64, 128, 64)])
def test_an_indexers_queries(heads: int, features: int, rope: int, dtype: torch.dtype, functions: ModuleType) -> None:
    q, turn = (
        torch.randn(3, heads, features, generator=torch.Generator().manual_seed(heads)).to(dtype),
        rotations(9, rope),
    )
    want = turned(q, turn[5:8])
    functions.rope_queries(q, turn[5:8])
    torch.testing.assert_close(q.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


attending = pytest.mark.parametrize("functions", [reference, attention_launch], ids=PATHS)


@attending
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "features", "rope", "ratio", "selected", "programs"),
    [
        (3, 24, 8, 0, 0, 1),
        (5, 128, 64, 4, 9, 1),
        (17, 32, 4, 4, 40, 132),
        (2, 256, 64, 128, 0, 1),
        (40, 16, 16, 8, 0, 20),
    ],
)
def test_attention(
    heads: int,
    features: int,
    rope: int,
    ratio: int,
    selected: int,
    programs: int,
    dtype: torch.dtype,
    functions: ModuleType,
) -> None:
    """Decode rows, of which one begins, and chunks that are longer and shorter than the window."""
    case = Attending(
        3,
        300,
        heads=heads,
        features=features,
        rope=rope,
        window=20,
        ratio=ratio,
        selected=selected,
        width=3,
        programs=programs,
        dtype=dtype,
        functions=functions,
    )
    for length, counts, width in (
        ([150, 0, 13], [3, 3, 3], 3),
        ([255, 19, 127], [1, 1, 1], 1),
        ([130, 0, 0], [5, 30, 1], 0),
    ):
        case.length = length
        case.run(counts, width)


@attending
@pytest.mark.parametrize("programs", [1, 132])
def test_entries_that_a_layer_that_drafts_has_not_made(programs: int, functions: ModuleType) -> None:
    case = Attending(
        2, 90, heads=2, features=16, rope=4, window=70, first=1, width=2, programs=programs, functions=functions
    )
    case.length, case.missing = [64, 1], {(0, 64 - 20)}
    case.run([2, 2], 2)
    case.run([1, 7], 0)


@attending
@pytest.mark.parametrize(("block", "programs"), [(1, 1), (5, 1), (5, 132), (16, 132)])
def test_tokens_of_a_block_see_all_of_each_other(block: int, programs: int, functions: ModuleType) -> None:
    case = Attending(3, 120, heads=2, features=16, rope=4, window=70, width=1, programs=programs, functions=functions)
    for length in ([64, 0, 7], [100, 70, 69]):
        case.length = length
        case.run([block] * 3, block=block)


@attending
@pytest.mark.parametrize("programs", [1, 132])
def test_entries_outside_are_counted_and_absent(programs: int, functions: ModuleType) -> None:
    case = Attending(
        2, 90, heads=2, features=16, rope=4, window=8, ratio=4, selected=5, programs=programs, functions=functions
    )
    case.length = [64, 70]
    case.run([1, 1], 1, outside=(1, 0))
    assert case.absent > 0


@attending
def test_what_is_not_finite_in_one_row_is_in_no_others_output(functions: ModuleType) -> None:
    case = Attending(2, 90, heads=2, features=16, rope=4, window=8, ratio=4, width=2, functions=functions)
    case.length = [64, 70]
    case.near[1, 70] = torch.nan
    with pytest.raises(AssertionError):
        case.run([2, 2], 2)
    assert bool(case.out[:2].isfinite().all())
    assert bool(case.out[2:4].isnan().all())


def test_no_tokens() -> None:
    case = Storing(1, 8, heads=2, features=8, rope=4, window=4)
    rows, _ = case.step([0])
    none = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int32)
    empty = type(rows)(*none, rows.slot_R, rows.page_RP, rows.fault_1)
    x = torch.empty(0, 8)
    launch.rope_store(x.view(0, 2, 8), x, case.norm, x[:, :4], x, case.ring, empty, 1e-6)
    launch.keep_entries(x, case.ring, empty)
    launch.rope_queries(x.view(0, 2, 8), x[:, :4])
    assert bool(case.ring.isnan().all())


@both
def test_entries_without_queries(functions: ModuleType) -> None:
    case = Storing(2, 90, heads=0, features=16, rope=4, window=8, width=3, functions=functions)
    case.run([30, 2])
    case.run([3, 3], 3, [2, 0])


@both
@pytest.mark.parametrize("wanted", [False, True])
@pytest.mark.parametrize(("rows", "width", "ratio"), [(1, 1, 4), (5, 3, 4), (70, 8, 128)])
def test_whose_tokens_are_and_what_they_see(
    rows: int, width: int, ratio: int, wanted: bool, functions: ModuleType
) -> None:
    """Some rows are padding."""
    random = torch.Generator().manual_seed(rows)
    position = torch.randint(0, 3 * ratio, (rows, width), generator=random)
    length = torch.randint(0, 3, (rows,), generator=random, dtype=torch.int32)
    wanted_R = torch.randint(1, width + 1, (rows,), generator=random) if wanted else None
    row, bound = torch.full((2, rows * width), 77, dtype=torch.int32)
    functions.lay_out_rows(position.flatten(), length, wanted_R, row, bound, ratio)
    want_row, want_bound = [], []
    for own in range(rows):
        for place in range(width):
            kept = wanted_R is None or place < int(wanted_R[own])
            want_row.append(own if kept else -1)
            want_bound.append((int(position[own, place]) + 1) // ratio if kept and length[own] > 0 else 0)
    assert row.tolist() == want_row
    assert bound.tolist() == want_bound


@both
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("tokens", "streams", "features", "rope"), [(1, 4, 16, 4), (5, 4, 2100, 64), (3, 3, 24, 6)])
def test_what_a_pass_begins_with(
    tokens: int, streams: int, features: int, rope: int, dtype: torch.dtype, functions: ModuleType
) -> None:
    random = torch.Generator().manual_seed(features)
    embedding = torch.randn(11, features, generator=random).to(dtype)
    tables = rotations(20, rope), rotations(20, rope) + 1
    token, position = (torch.randint(0, most, (tokens,), generator=random) for most in (11, 20))
    kept, turns = torch.full_like(token, -1), tuple(torch.full((tokens, rope), torch.nan) for _ in tables)
    x, residual = (
        torch.full(shape, torch.nan, dtype=dtype) for shape in ((tokens, features), (tokens, streams, features))
    )
    nan = torch.full((tokens, 1 + streams, streams), torch.nan)
    memory = StreamMemory(nan[:, 0].clone(), nan, nan[:, 1:].clone())
    functions.begin(token, position, embedding, tables, kept, turns, x, residual, memory)
    assert torch.equal(kept, token)
    assert torch.equal(x, embedding[token])
    for table, own in zip(tables, turns, strict=True):
        assert torch.equal(own, table[position])
    assert memory.mix_TSS is not None
    assert not residual.any()
    assert not memory.mix_TSS.any()
    assert bool((memory.open_TS == 1).all())
