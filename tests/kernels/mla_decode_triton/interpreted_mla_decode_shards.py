"""Attention of decode rows to the entries of D shards, merged by log-sum-exp, against attention to all of them by one
formula in float64. Reference and portable kernel. Run with TRITON_INTERPRET=1, see test_interpreted.py."""

from tests.support import interpreter

interpreter.repair()

import math  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from decode_case import Case  # noqa: E402
from shards_of_case import cache_of, run_invariant_shards, with_pieces_in_turns  # noqa: E402

from kernels.mla_decode import launch, mla_decode  # noqa: E402
from kernels.mla_decode.schedule import DecodeShape, Workspace, portable_tiling  # noqa: E402
from kernels.own_entries import OwnEntries, own_entries  # noqa: E402
from kernels.page import NULL_PAGE, PAGE_TOKENS, Shards, pages_for  # noqa: E402
from kernels.shard_exchange import merge_parts  # noqa: E402
from kernels.strands import merge_tree  # noqa: E402

LATENT, ROPE, HEADS, SCALE = 32, 16, 3, 0.2
ARBITRARY_PAGE = 2147480000


class Sharded:
    """Rows in the caches of D shards. All else in these is NaN, the null page, too."""

    def __init__(self, lengths: list[int], width: int, count: int, first: int = 0, *, in_turn: bool = True) -> None:
        """`in_turn`: a row's pages go round the shards; else each lies on any."""
        random = torch.Generator().manual_seed(100 * count + width)
        self.lengths, self.width, self.count, self.first = lengths, width, count, first
        self.entries = [torch.randn(length, LATENT + ROPE, generator=random) for length in lengths]
        self.q = torch.randn(len(lengths), width, HEADS, LATENT + ROPE, generator=random)
        per_shard = sum(map(pages_for, lengths)) + 2
        free = [list(range(1 + owner, 1 + owner + count * per_shard, count)) for owner in range(count)]
        self.caches = torch.full((count, per_shard + 1, PAGE_TOKENS, LATENT + ROPE), torch.nan)
        columns = pages_for(max(lengths)) + 2
        self.table = torch.full((len(lengths), columns), ARBITRARY_PAGE, dtype=torch.int32)
        for row, length in enumerate(lengths):
            for column in range(pages_for(length)):
                owner = (row + column) % count if in_turn else int(torch.randint(count, (1,), generator=random))
                page = free[owner].pop()
                self.table[row, column] = page
                some = self.entries[row][column * PAGE_TOKENS : (column + 1) * PAGE_TOKENS]
                self.caches[owner, -(-page // count), : len(some)] = some
                if column == 0:
                    self.caches[owner, -(-page // count), :first] = torch.nan

    def shard(self, index: int, triton: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and log-sum-exp of what one shard has."""
        rows, columns = self.table.shape
        own = OwnEntries.allocate(rows, self.width, columns, torch.empty)
        length = torch.tensor(self.lengths, dtype=torch.int32)
        own_entries(self.table, length, own, Shards(self.count, index), first=self.first)
        out = torch.full((rows, self.width, HEADS, LATENT), torch.nan)
        lse = torch.full((rows, self.width, HEADS), torch.nan)
        workspace = None
        if triton:
            shape = DecodeShape(rows, self.width, HEADS, LATENT, ROPE, columns)
            tiling = portable_tiling(shape, 3)
            buffer = torch.full((Workspace.bytes(shape, tiling, torch.float32),), 255, dtype=torch.uint8)
            workspace = Workspace.over(buffer, shape, tiling, torch.float32)
            launch.schedule(own.length_R, own.page_RP, workspace)
        tensors = self.q, self.caches[index], own.page_RP, own.length_R, out, lse
        mla_decode(*tensors, scale=SCALE, workspace=workspace, own=own)
        return out, lse

    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of all entries, one token at a time, in float64."""
        out = torch.zeros(*self.q.shape[:3], LATENT, dtype=torch.float64)
        lse = torch.full(self.q.shape[:3], -torch.inf, dtype=torch.float64)
        for row, entries in enumerate(self.entries):
            for token in range(self.width):
                seen = entries[self.first : max(0, len(entries) - (self.width - 1 - token))].double()
                if len(seen):
                    score = SCALE * self.q[row, token].double() @ seen.T
                    out[row, token] = score.softmax(1) @ seen[:, :LATENT]
                    lse[row, token] = score.logsumexp(1)
        return out, lse

    def check(self, triton: bool) -> None:
        parts = [self.shard(index, triton) for index in range(self.count)]
        out = torch.stack([out for out, _ in parts]).double()
        lse = torch.stack([lse for _, lse in parts]).double()
        assert not out.isnan().any()
        assert not lse.isnan().any()
        assert (out[lse == -torch.inf] == 0).all()
        total = lse.logsumexp(0)
        weight = (lse - total.masked_fill(total == -torch.inf, 0)).exp()
        want_out, want_lse = self.whole()
        torch.testing.assert_close(total, want_lse, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close((weight.unsqueeze(-1) * out).sum(0), want_out, atol=2e-5, rtol=1e-5)


PATHS = pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])


@PATHS
@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_draft_bounds(width: int, count: int, triton: bool) -> None:
    """A planted fault that this finds: all drafts have the bound of the last one."""
    border = PAGE_TOKENS * count
    Sharded([1, 0, 63, 64, 65, 130, border - 1, border, border + 1], width, count).check(triton)


@PATHS
def test_empty_shard(triton: bool) -> None:
    """A shard without entries has output 0 and log-sum-exp -inf, so that it counts for nothing."""
    case = Sharded([40, 0], 2, 4)
    case.check(triton)
    out, lse = case.shard(3, triton)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@PATHS
@pytest.mark.parametrize("lengths", [[1, 2, 64, 65], [200, 3, 129]])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_first_entry_is_left_out_on_its_shard_alone(lengths: list[int], count: int, triton: bool) -> None:
    Sharded(lengths, 2, count, first=1).check(triton)


@PATHS
def test_any_shards_may_have_a_rows_pages(triton: bool) -> None:
    Sharded([700, 300, 65], 3, 4, in_turn=False).check(triton)


@PATHS
def test_a_row_with_a_nan_stays_non_finite_and_no_other(triton: bool) -> None:
    """One entry of the first row holds NaN, which takes all that its shard has of it. A planted fault that this finds:
    weight 0 takes nothing of a part, and attention leaves a log-sum-exp of -inf beside NaN."""
    case = Sharded([100, 130], 1, 2)
    page = int(case.table[0, 0])
    case.caches[(page - 1) % 2, -(-page // 2), 7] = torch.nan
    out, lse = (torch.stack(parts) for parts in zip(*(case.shard(index, triton) for index in range(2)), strict=True))
    merged = torch.full(out.shape[1:], 7.0)
    merge_parts(out.flatten(1, 2), lse.flatten(1, 2), merged.view(2, HEADS, LATENT))
    assert merged[0].isnan().all()
    torch.testing.assert_close(merged[1].double(), case.whole()[0][1], atol=2e-5, rtol=1e-5)


def test_one_shard_has_the_bits_of_the_whole_cache() -> None:
    case = Sharded([130, 1, 64], 3, 1)
    length, out, lse = torch.tensor(case.lengths, dtype=torch.int32), torch.empty(3, 3, HEADS, LATENT), None
    lse = torch.empty(3, 3, HEADS)
    mla_decode(case.q, case.caches[0], case.table, length, out, lse, scale=SCALE)
    own_out, own_lse = case.shard(0, triton=False)
    assert torch.equal(out, own_out)
    assert torch.equal(lse, own_lse)


@pytest.mark.parametrize("triton", [False, True], ids=["reference", "triton"])
def test_shards_have_the_bits_of_one_in_invariant_mode(triton: bool) -> None:
    """Rows of fewer and of more stretches than strands, and of pieces of two sizes on each shard. Planted faults that
    this finds: owners change at every page; the owner of a page for that of the page before; strands rotated; sizes of
    pieces by the position in the shard."""
    case = Case([600, 0, 1, 513, 4700], 2, 3, 32, 16, torch.float32, first=1, invariant=True)
    with_pieces_in_turns(case, 8)
    tiling = portable_tiling(case.shape, 3)
    want = None
    for count in (1, 2, 4, 8):
        found = run_invariant_shards(case, tiling, count) if triton else reference_shards(case, count)
        if want is None:
            want = found
            case.compare()
        assert all(torch.equal(mine, one) for mine, one in zip(found, want, strict=True))


def test_shards_have_the_bits_of_one_behind_all_fine_rounds() -> None:
    """Of FP8 entries, with pieces of all three sizes. A planted fault that this finds: as many fine rounds on a shard
    as a whole row has, each of as many stretches."""
    case = Case([16_897, 300], 2, 2, 16, 16, torch.float32, first=1, invariant=True, fp8=True)
    with_pieces_in_turns(case, 4)
    tiling = portable_tiling(case.shape, 3, fp8=True)
    want = run_invariant_shards(case, tiling, 1)
    case.compare()
    found = run_invariant_shards(case, tiling, 4)
    assert all(torch.equal(mine, one) for mine, one in zip(found, want, strict=True))


def reference_shards(case: Case, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """As `run_invariant_shards`, in plain torch."""
    t, parts = case.tensors, []
    settings = {"scale": case.scale, "invariant": True}
    if count == 1:
        mla_decode(t["q"], t["cache"], t["table"], t["length"], t["out"], t["lse"], first=case.first, **settings)
        return t["out"].clone(), t["lse"].clone()
    for index in range(count):
        shards = Shards(count, index)
        own = OwnEntries.allocate(len(case.lengths), case.width, t["table"].shape[1], torch.empty)
        own_entries(t["table"], t["length"], own, shards, first=case.first)
        out, lse = torch.full_like(t["out"], torch.nan), torch.full_like(t["lse"], torch.nan)
        tensors = t["q"], cache_of(case, shards), own.page_RP, own.length_R, out, lse
        mla_decode(*tensors, own=own, shards=count, **settings)
        parts.append((out, lse))
    out, lse = merge_tree(parts)
    return out, lse * math.log(2)


def test_what_it_cannot_do_is_refused() -> None:
    case = Sharded([70], 1, 2)
    own = OwnEntries.allocate(1, 1, 4, torch.zeros)
    out, lse = torch.empty(1, 1, HEADS, LATENT), torch.empty(1, 1, HEADS)
    tensors = case.q, case.caches[0], own.page_RP, own.length_R, out, lse
    with pytest.raises(ValueError, match="attended to from `first_R` on"):
        mla_decode(*tensors, scale=SCALE, own=own, first=1)
    assert own.page_RP[0, 0] == NULL_PAGE
