"""The portable decode kernels in the repaired interpreter. Run with TRITON_INTERPRET=1, see
test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import math  # noqa: E402
from dataclasses import replace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from decode_case import Case  # noqa: E402

from kernels.mla_decode import launch  # noqa: E402
from kernels.mla_decode.schedule import hopper_tiling, portable_tiling  # noqa: E402

PROCESSORS = 3
"""Few, so that small cases already share rows among CTAs and give CTAs several rows."""


def check(case: Case, **changes: int) -> None:
    case.check(replace(portable_tiling(case.shape, PROCESSORS, fp8=case.fp8), **changes))


@pytest.mark.parametrize(
    "lengths", [[1], [63], [64], [65], [200, 0, 1, 129], [0, 0], [30] * 7, [300, 2, 2, 2, 2], [4097]]
)
@pytest.mark.parametrize("width", [1, 3])
def test_lengths(lengths: list[int], width: int) -> None:
    check(Case(lengths, width))


@pytest.mark.parametrize("width", [2, 5, 7, 8])
def test_widths(width: int) -> None:
    check(Case([width - 1, 70, 129], width, heads=3))


@pytest.mark.parametrize("heads", [1, 3, 16, 32, 63, 64, 126, 128])
def test_heads(heads: int) -> None:
    check(Case([100, 40], 1, heads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types(dtype: torch.dtype) -> None:
    check(Case([150, 0, 33], 2, dtype=dtype))


@pytest.mark.parametrize(("latent", "rope"), [(32, 8), (48, 24), (16, 2), (6, 12), (72, 16)])
@pytest.mark.parametrize("invariant", [False, True])
def test_sizes_that_are_no_powers_of_two(latent: int, rope: int, invariant: bool) -> None:
    check(Case([5, 0, 600, 64], 3, latent=latent, rope=rope, invariant=invariant))


@pytest.mark.parametrize("invariant", [False, True])
def test_sizes_of_mistral_small_4(invariant: bool) -> None:
    check(Case([5, 0, 130], 2, 32, latent=256, rope=64, dtype=torch.bfloat16, invariant=invariant))


@pytest.mark.parametrize("first", [1, 5])
@pytest.mark.parametrize("invariant", [False, True])
def test_first_entry(first: int, invariant: bool) -> None:
    check(Case([first, first + 1, 100], 2, first=first, invariant=invariant))


@pytest.mark.parametrize("lengths", [[5, 600, 0, 513], [512], [1100, 1]])
def test_invariant_mode(lengths: list[int]) -> None:
    check(Case(lengths, 2, invariant=True))


def test_many_ctas_and_one() -> None:
    check(Case([400, 30], 1), ctas=40)
    check(Case([400, 30], 1), ctas=1)


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    batch = Case([700, 65, 1025], 3, heads=4, invariant=True, least_columns=600)
    out, lse = (x.clone() for x in batch.run(portable_tiling(batch.shape, PROCESSORS)))
    for row, length in enumerate(batch.lengths):
        for token in range(batch.width):
            alone = Case([length - (batch.width - 1 - token)], 1, heads=4, invariant=True)
            entries = batch.tensors["cache"].shape[0]
            alone.tensors["cache"] = torch.cat([batch.tensors["cache"], torch.zeros(1, 64, 80)])
            alone.tensors["table"] = batch.tensors["table"][row : row + 1].clone()
            alone.tensors["q"] = batch.tensors["q"][row : row + 1, token : token + 1].contiguous()
            assert entries + 1 == alone.tensors["cache"].shape[0]
            got = alone.run(portable_tiling(alone.shape, PROCESSORS + 4))
            assert torch.equal(got[0][0, 0], out[row, token])
            assert torch.equal(got[1][0, 0], lse[row, token])


def test_pieces_depend_on_their_position_alone() -> None:
    """A token's bits in a row that goes on behind it, whatever rows are before it, how many CTAs there are, and where
    the row's pieces begin to be longer. Planted faults that this finds: a CTA that begins inside a piece, and sizes by
    the row's length."""
    lengths = [0, 4097, 300, 127, 4096, 16_700, 129]
    batch = Case(lengths, 2, heads=2, latent=16, rope=16, invariant=True, least_columns=300)
    want = [x.clone() for x in batch.run(portable_tiling(batch.shape, PROCESSORS))]
    batch.compare()
    for processors in (5, 61):
        got = batch.run(portable_tiling(batch.shape, processors))
        assert all(torch.equal(mine, first) for mine, first in zip(got, want, strict=True))
    for row, length in enumerate(lengths):
        if length < 2:
            continue
        alone = Case([length - 1], 1, heads=2, latent=16, rope=16, invariant=True)
        alone.tensors["cache"] = batch.tensors["cache"]
        alone.tensors["table"] = batch.tensors["table"][row : row + 1]
        alone.tensors["q"] = batch.tensors["q"][row : row + 1, :1].contiguous()
        got = alone.run(portable_tiling(alone.shape, 7))
        assert all(torch.equal(mine[0, 0], first[row, 0]) for mine, first in zip(got, want, strict=True))


@pytest.mark.parametrize("shards", [1, 2, 8])
def test_a_ctas_share_in_invariant_mode_is_of_whole_pieces(shards: int) -> None:
    """Every piece is one CTA's, once, in a slot of its own, and no CTA has more than the others but for a piece."""
    torch.manual_seed(shards)
    for trial in range(20):
        lengths = [int(x) for x in torch.randint(0, 20_000 // shards, (1 + trial % 5,))]
        lengths[trial % len(lengths)] *= trial % 3
        case = Case(lengths, heads=1, latent=16, rope=16, invariant=True)
        tiling = portable_tiling(case.shape, 1 + 3 * trial)
        workspace = case.workspace(tiling, shards)
        launch.schedule(case.tensors["length"], case.tensors["table"], workspace)
        blocks = [-(-length // 128) for length in lengths]
        pieces = [[unit for unit in range(count) if unit % size_of(unit, shards) == 0] for count in blocks]
        slots = iter(range(10**6))
        want = {(row, begin): next(slots) for row, own in enumerate(pieces) for begin in own}
        records = workspace.metadata[: tiling.ctas * 8].view(-1, 8).tolist()
        found: dict[tuple[int, int], int] = {}
        for row, at, left, slot, *_ in records:
            assert left <= -(-sum(blocks) // tiling.ctas) + 3
            while left > 0:
                if not blocks[row]:
                    row += 1
                    continue
                take = min(at // size_of(at, shards) * size_of(at, shards) + size_of(at, shards), blocks[row]) - at
                assert (row, at) not in found
                found[row, at], slot = slot, slot + 1
                left, at = left - take, at + take
                if at == blocks[row]:
                    row, at = row + 1, 0
            assert left == 0
        assert found == want
        rows = workspace.metadata[tiling.ctas * 8 :][: 4 * len(lengths)].view(-1, 4)
        assert rows[:, 2].tolist() == list(map(len, pieces))


def size_of(block: int, shards: int) -> int:
    """Blocks of 128 entries of the piece in which a row's block lies on one of so many shards."""
    entry = block * 128 * shards
    return 1 if entry < 4096 else 2 if entry < 16384 else 4


def test_every_kv_block_is_scheduled_once_and_evenly() -> None:
    torch.manual_seed(0)
    for trial in range(40):
        rows = int(torch.randint(1, 9, ()))
        lengths = [int(x) for x in torch.randint(0, 2000, (rows,))]
        lengths = [0 if trial % 3 == 0 and i % 2 else length for i, length in enumerate(lengths)]
        case = Case(lengths, least_columns=33)
        tiling = replace(portable_tiling(case.shape, PROCESSORS), unit=64, row_cost=trial % 3, ctas=1 + trial % 11)
        workspace = case.workspace(tiling)
        launch.schedule(case.tensors["length"], case.tensors["table"], workspace)
        records = workspace.metadata[: tiling.ctas * 8].view(-1, 8).tolist()
        units = [-(-length // 64) for length in lengths]
        spans = [u + tiling.row_cost if u else 0 for u in units]
        seen: list[list[int]] = [[] for _ in lengths]
        for row, at, left, *_ in records:
            while left > 0:
                take = min(left, spans[row] - at)
                seen[row] += range(max(at - tiling.row_cost, 0), at + take - tiling.row_cost)
                left, at = left - take, at + take
                if at >= spans[row]:
                    row, at = row + 1, 0
        assert seen == [list(range(u)) for u in units]
        share = max(tiling.least, -(-sum(spans) // tiling.ctas))
        assert max((left for _, _, left, *_ in records), default=0) <= share * 17 / 16


def test_blocks_of_a_short_row_share_its_kv_blocks() -> None:
    """Records of the blocks in turn, then nothing; a row one token longer has a record for every CTA."""
    for length, width, programs in ((700, 4, 9), (700, 3, 11), (64, 4, 132), (0, 4, 9), (1500, 4, 4), (900, 8, 35)):
        case = Case([length], width, 16, 512, 64, torch.bfloat16, first=int(length == 64))
        for short in (length, length - 1):
            tiling = replace(hopper_tiling(case.shape, programs), short=short)
            assert tiling.path == "either"
            workspace = case.workspace(tiling)
            launch.schedule(case.tensors["length"], case.tensors["table"], workspace, first=case.first)
            ctas = tiling.ctas
            assert tiling.blocks(case.shape) * ctas <= programs
            records = workspace.metadata[: ctas * 8].view(-1, 8)
            parts = min(width, 4) if short == length else 1
            assert records[:, 7].eq(parts).all()
            shared = records[: ctas // parts * parts].view(-1, parts, 8)
            assert shared[:, :, :6].eq(shared[:, :1, :6]).all()
            assert records[ctas // parts * parts :, 2].eq(0).all()
            units = [unit for _, at, left, *_ in shared[:, 0].tolist() for unit in range(at, at + left)]
            assert units == list(range(-(-length // 64)))
            assert int(shared[:, 0, 2].max()) == -(-len(units) // (ctas // parts))


@pytest.mark.parametrize(("length", "pieces"), [(128 * 64, 32), (33 * 64 + 1, 17), (9000, 71), (132 * 128, 132)])
def test_more_pieces_than_are_loaded_at_once(length: int, pieces: int) -> None:
    """Drawn pieces of a row alone, short or long, of the sizes that a step merges them with."""
    case = Case([length], 4, 16, 512, 64, torch.bfloat16)
    tiling = hopper_tiling(case.shape, 132)
    assert (tiling.path, tiling.merge_pieces) == ("either", 64)
    workspace, t = case.workspace(tiling), case.tensors
    launch.schedule(t["length"], t["table"], workspace)
    slots = [132, *range(1, pieces)]  # a row's first piece lies behind those of all CTAs
    part, log = torch.randn(pieces, 64, 512).bfloat16(), 4 * torch.randn(pieces, 64)
    workspace.partial_SQL[slots], workspace.partial_lse_SQ[slots] = part, log
    launch.merge(t["out"], t["lse"], workspace)
    weight = torch.softmax(log.double() * math.log(2), 0)
    want = (weight[:, :, None] * part.double()).sum(0)
    got = t["out"].view(64, 512).double()
    assert torch.all((got - want).norm(dim=1) <= 2**-8 * want.norm(dim=1))  # the output is rounded once
    torch.testing.assert_close(t["lse"].view(64).double(), torch.logsumexp(log.double() * math.log(2), 0))


def test_the_plan_follows_lengths_and_tables_changed_in_place() -> None:
    case = Case([500, 0, 64], 2)
    tiling = portable_tiling(case.shape, PROCESSORS)
    workspace = case.workspace(tiling)
    case.run(tiling, workspace)
    other = Case([3, 450, 190], 2, seed=9)
    for name in ("q", "length"):
        case.tensors[name].copy_(other.tensors[name])
    case.tensors["table"].fill_(2147480000)
    case.tensors["table"][:, : other.tensors["table"].shape[1]] = other.tensors["table"]
    case.tensors["cache"] = other.tensors["cache"]
    out, lse = case.run(tiling, workspace)
    want_out, want_lse = other.expected()
    torch.testing.assert_close(out.double(), want_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("latent", "rope", "dtype", "invariant"),
    [
        (64, 16, torch.float32, False),
        (64, 16, torch.bfloat16, True),
        (512, 64, torch.bfloat16, True),
        (256, 64, torch.bfloat16, False),
        (200, 12, torch.float16, False),
        (6, 8, torch.float32, True),
    ],
)
def test_fp8_entries(latent: int, rope: int, dtype: torch.dtype, invariant: bool) -> None:
    check(Case([5, 0, 600, 64], 3, latent=latent, rope=rope, dtype=dtype, invariant=invariant, fp8=True))


def test_first_fp8_entry() -> None:
    check(Case([5, 6, 100], 2, first=5, fp8=True))
