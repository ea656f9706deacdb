"""The kernels of compressed entries on a GPU, at the sizes of DeepSeek V4 Flash: eager, and captured and replayed for
other rows."""

from __future__ import annotations

import pytest
import torch
from captured import capture
from compressed_case import Attending, Compressing, Storing

import kernels.compressed as family
from kernels.compressed import TokenRows
from kernels.linear import group_linear
from kernels.matrix import BlockScaled
from kernels.page import pages_for
from kernels.runtime.hopper import is_hopper

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16


@pytest.mark.parametrize(("ratio", "features", "overlaps"), [(4, 512, True), (4, 128, True), (128, 512, False)])
def test_compressors(ratio: int, features: int, overlaps: bool) -> None:
    case = Compressing(
        3,
        3 * ratio + 90,
        ratio=ratio,
        features=features,
        overlaps=overlaps,
        rope=64,
        width=8,
        dtype=BF16,
        device="cuda",
    )
    case.dependent = True
    case.run([ratio * 3 + 5, 0, ratio - 3])
    case.run([1, 2 * ratio - 2, ratio])
    for width, accepted in ((8, [7, 0, 2]), (1, [0, 0, 0]), (8, [0, 3, 4]), (3, [2, 0, 1])):
        case.run([width] * 3, width, accepted)


@pytest.mark.parametrize("heads", [8, 64])
def test_queries_and_the_window(heads: int) -> None:
    case = Storing(3, 400, heads=heads, features=512, rope=64, window=128, width=8, dtype=BF16, device="cuda")
    case.dependent = True
    case.run([300, 0, 2])
    for width, accepted in ((8, [7, 0, 2]), (1, [0, 0, 0]), (8, [0, 3, 4])):
        case.run([width] * 3, width, accepted)


@pytest.mark.parametrize(("heads", "programs"), [(8, 132), (16, 1), (32, 132), (64, 132)])
@pytest.mark.parametrize(("ratio", "selected"), [(0, 0), (4, 512), (128, 0)])
def test_attention(ratio: int, selected: int, heads: int, programs: int) -> None:
    case = Attending(
        3,
        4000,
        heads=heads,
        features=512,
        rope=64,
        window=128,
        ratio=ratio,
        selected=selected,
        width=8,
        programs=programs,
        dtype=BF16,
        device="cuda",
    )
    for length, counts, width in (
        ([3990, 0, 13], [8, 8, 8], 8),
        ([2555, 19, 127], [1, 1, 1], 1),
        ([130, 0, 9], [5, 200, 1], 0),
    ):
        case.length, case.dependent = length, True
        case.run(counts, width)


@pytest.mark.parametrize(("heads", "programs"), [(8, 132), (16, 1), (32, 132), (64, 132)])
def test_attention_of_the_layer_that_drafts(heads: int, programs: int) -> None:
    """It has no entry of the first position, and passes over entries that are not finite."""
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 128, "width": 8, "programs": programs}
    case = Attending(3, 4000, first=1, dtype=BF16, device="cuda", **sizes)  # type: ignore[arg-type]
    for length, missing, counts, width in (
        ([3990, 1, 13], {(0, 3968), (2, 3)}, [8, 8, 8], 8),
        ([2555, 19, 127], {(1, 18), (2, 126)}, [1, 1, 1], 1),
        ([130, 1, 9], {(0, 128), (2, 8)}, [5, 200, 1], 0),
    ):
        case.length, case.missing, case.dependent = length, missing, True
        case.run(counts, width)


@pytest.mark.parametrize(("heads", "programs"), [(8, 132), (16, 1), (32, 132), (64, 132)])
def test_attention_of_blocks(heads: int, programs: int) -> None:
    """Of DSpark, whose tokens see all of each other and the window before all of them."""
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 128, "width": 6, "programs": programs}
    case = Attending(3, 4000, dtype=BF16, device="cuda", **sizes)  # type: ignore[arg-type]
    for length, block in (([3990, 1, 13], 5), ([2555, 128, 127], 1), ([130, 0, 900], 16)):
        case.length = length
        case.run([block] * 3, block=block)


@pytest.mark.parametrize(
    ("ratio", "selected", "heads"),
    [(0, 0, 32), (4, 512, 32), (128, 0, 32), (0, 0, 64), (4, 512, 64), (128, 0, 64), (4, 512, 20), (128, 0, 128)],
)
def test_attention_of_many_tokens(ratio: int, selected: int, heads: int) -> None:
    """By Hopper's own kernel, where this is one: chunks from the first token on and behind many others, beside short
    ones; decode rows."""
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 128, "ratio": ratio, "selected": selected}
    hopper = is_hopper(torch.device("cuda"))
    case = Attending(3, 4000, width=100, dtype=BF16, device="cuda", hopper=hopper, **sizes)  # type: ignore[arg-type]
    for length, counts, width in (
        ([0, 3700, 9], [513, 260, 1], 0),
        ([2555, 19, 127], [100, 100, 100], 100),
    ):
        case.length = length
        case.run(counts, width)


def test_attention_of_many_tokens_of_the_layer_that_drafts() -> None:
    sizes = {"heads": 64, "features": 512, "rope": 64, "window": 128, "first": 1}
    case = Attending(3, 4000, dtype=BF16, device="cuda", **sizes)  # type: ignore[arg-type]
    case.length, case.missing = [130, 1, 9], {(0, 128), (2, 8)}
    case.run([5, 300, 1])


def test_entries_without_queries() -> None:
    case = Storing(3, 400, heads=0, features=512, rope=64, window=128, width=8, dtype=BF16, device="cuda")
    case.run([300, 0, 2])
    case.run([8] * 3, 8, [7, 0, 2])


@pytest.mark.parametrize("tokens", [1, 5, 8, 9, 16, 64, 700])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(("groups", "rows", "features"), [(8, 1024, 4096), (4, 256, 640)])
def test_products_of_groups(fp8: bool, tokens: int, groups: int, rows: int, features: int) -> None:
    random = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, groups, features, generator=random, device="cuda").to(BF16)
    plain = torch.randn(groups * rows, features, generator=random, device="cuda")
    scales = torch.rand(groups * rows // 128, features // 128, generator=random, device="cuda") + 0.5
    matrix = BlockScaled(plain.to(torch.float8_e4m3fn), scales) if fp8 else plain.to(BF16)
    out = torch.full((tokens, groups, rows), torch.nan, dtype=BF16, device="cuda")
    # cuBLAS takes memory once a stream, whatever it multiplies.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        group_linear(x, matrix, out)
    capture(lambda: group_linear(x, matrix, out, dependent=True), stream).replay()
    weight = matrix.float().view(groups, rows, features).double()
    want = torch.einsum("tge,gue->tgu", x.double(), weight)
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8 * float(want.abs().max()))


def test_a_token_of_groups_does_not_depend_on_the_others() -> None:
    """Of few tokens with FP8 weights."""
    x = torch.randn(16, 8, 4096, device="cuda").to(BF16)
    data = torch.randn(8 * 1024, 4096, device="cuda").to(torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.rand(64, 32, device="cuda") + 0.5)
    all_of_them = torch.empty(16, 8, 1024, dtype=BF16, device="cuda")
    group_linear(x, matrix, all_of_them, dependent=True)
    for tokens in (1, 2, 8, 9):
        out = torch.empty(tokens, 8, 1024, dtype=BF16, device="cuda")
        group_linear(x[-tokens:], matrix, out, dependent=True)
        assert torch.equal(out, all_of_them[-tokens:])


def test_a_layer_replayed_for_other_rows() -> None:
    """What the kernels write into rings and pages, and what they attend to, follows the tensors as they are at a
    replay: of a step captured with rows of nobody alone."""
    rows_, width, heads, ratio, most = 4, 3, 8, 4, 2000
    case = Attending(
        rows_, most, heads=heads, features=512, rope=64, window=128, ratio=ratio, width=width, dtype=BF16, device="cuda"
    )
    tokens, random = rows_ * width, torch.Generator("cuda").manual_seed(1)

    def drawn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.randn(*shape, generator=random, device="cuda").to(dtype)

    rows = TokenRows(
        torch.zeros(tokens, dtype=torch.int64, device="cuda"),
        torch.arange(tokens, dtype=torch.int32, device="cuda") // width,
        torch.full((rows_,), -1, device="cuda"),
        torch.zeros(rows_, pages_for(most), dtype=torch.int32, device="cuda"),
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        width,
    )
    q, kv, made = drawn(tokens, heads, 512), drawn(tokens, 512), drawn(tokens, 2048, dtype=torch.float32)
    turn, table, norm, bias = drawn(tokens, 64, dtype=torch.float32), case.rotation.cuda(), drawn(512), drawn(4, 1024)
    bias, sink = bias.float(), drawn(heads, dtype=torch.float32)
    ring, state = drawn(rows_ + 1, 130, 512), drawn(rows_ + 1, 10, 2048, dtype=torch.float32)
    paged, entry, out = drawn(case.pages, 16, 512), torch.empty_like(kv), torch.empty_like(q)
    sizes = tokens, heads, 512, 128 + most // ratio
    workspace = family.AttendWorkspace.allocate(*sizes, lambda *shape, dtype: torch.empty(shape, dtype=dtype).cuda())

    def layer() -> None:
        family.rope_store(q, kv, norm, turn, entry, ring, rows, window=128, eps=1e-6, dependent=True)
        family.compress(made, bias, norm, table, state, paged, rows, eps=1e-6)
        how = {"window": 128, "ratio": ratio, "scale": 0.05, "dependent": True}
        family.attend(q, ring, None, paged, None, sink, turn, out, rows, workspace, **how)  # type: ignore[arg-type]

    kept = [x.clone() for x in (ring, state, paged)]
    graph = capture(layer)
    assert all(torch.equal(x, before) for x, before in zip((ring, state, paged), kept, strict=True))
    assert bool((out == 0).all())
    rows.position_T.copy_(torch.tensor([0, 1, 2, 700, 701, 702, 5, 6, 7, 1990, 1991, 1992]))
    rows.slot_R.copy_(torch.tensor([2, 0, -1, 1]))
    rows.page_RP.copy_(case.page)
    before = [x.clone() for x in (q, ring, state, paged)]
    graph.replay()
    replayed = [x.clone() for x in (q, ring, state, paged, out)]
    for tensor, old in zip((q, ring, state, paged), before, strict=True):
        tensor.copy_(old)
    layer()
    assert all(torch.equal(x, own) for x, own in zip((q, ring, state, paged, out), replayed, strict=True))
    assert bool(out[[0, 3, 11]].any())
    assert bool((out[6:9] == 0).all())
    assert not torch.equal(ring, before[1])
    assert int(rows.fault_1) == 0
