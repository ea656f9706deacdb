"""The kernels of compressed entries as they were compiled, at the sizes of DeepSeek V4's entries, under drawn
schedules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compressed_case import Attending, Compressing, Storing

from kernels.compressed import attention_launch
from kernels.linear.groups import launch_group_linear
from kernels.matrix import BlockScaled
from tests.support.ptx import Fault, Unordered, emulated

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("ratio", "features", "overlaps"), [(4, 512, True), (4, 128, True), (128, 512, False)])
def test_compressors(ratio: int, features: int, overlaps: bool) -> None:
    case = Compressing(
        2,
        ratio + 16,
        ratio=ratio,
        features=features,
        overlaps=overlaps,
        rope=64,
        width=3,
        dtype=torch.bfloat16,
    )
    case.dependent = True
    with emulated(ratio):
        case.run([ratio - 3, ratio - 1])
        case.run([3, 3], 3, [1, 0])
        case.run([3, 3], 3, [2, 2])


def test_queries_and_the_window() -> None:
    case = Storing(2, 40, heads=5, features=512, rope=64, window=6, width=3, dtype=torch.bfloat16)
    case.dependent = True
    with emulated(1):
        case.run([9, 2])
        case.run([3, 3], 3, [0, 2])


@pytest.mark.parametrize(
    ("heads", "ratio", "selected", "programs", "width"),
    [(16, 4, 40, 4, 2), (20, 4, 40, 1, 0), (8, 0, 0, 1, 2), (3, 128, 0, 8, 2)],
)
def test_attention(heads: int, ratio: int, selected: int, programs: int, width: int) -> None:
    """Several tiles in flight; tokens that several programs share, or one."""
    case = Attending(
        2,
        300,
        heads=heads,
        features=512,
        rope=64,
        window=70,
        ratio=ratio,
        selected=selected,
        width=max(width, 1),
        programs=programs,
        dtype=torch.bfloat16,
    )
    case.length, case.dependent = [260, 0], True
    # Triton's own pipelined loops do without the fence behind cp.async.
    with emulated(heads, fences=False):
        case.run([width or 1, width or 2], width)


def follow_each_other(monkeypatch: pytest.MonkeyPatch, edit: Callable[[str], str] = lambda ptx: ptx) -> list[str]:
    """Attention of decode rows in two layers, one behind the other as in a captured graph, in the same memory. Returns
    what was launched."""
    sizes = {"heads": 16, "features": 512, "rope": 64, "window": 200, "ratio": 4, "selected": 40, "programs": 32}
    case = Attending(2, 400, dtype=torch.bfloat16, width=2, **sizes)  # type: ignore[arg-type]
    case.length, case.dependent = [360, 0], True
    workspace = attention_launch.AttendWorkspace.allocate(6, 16, 512, 240, case.poisoned, programs=32)
    monkeypatch.setattr(attention_launch.AttendWorkspace, "allocate", lambda *_, **__: workspace)
    with emulated(3, consecutive=True, fences=False, edit=edit) as launches:
        for _ in range(2):
            case.run([2, 2], 2)
    return launches


def test_attention_of_decode_rows_in_layers_behind_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither kernel reads what another one still writes, or what L1 has of memory that was used before."""
    assert follow_each_other(monkeypatch) == ["attend", "merge"] * 2


@pytest.mark.parametrize("lost", ["griddepcontrol.wait;", ".cg"])
def test_pieces_that_are_read_too_early_are_noticed(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def without(ptx: str) -> str:
        return ptx.replace(lost, "") if ".entry merge" in ptx else ptx

    with pytest.raises(Unordered, match="reads partial"):
        follow_each_other(monkeypatch, without)


@pytest.mark.parametrize(("heads", "programs", "width"), [(8, 1, 2), (8, 8, 2), (20, 1, 2), (20, 8, 0)])
def test_entries_that_a_layer_that_drafts_has_not_made(heads: int, programs: int, width: int) -> None:
    """Of decode rows, and of chunks, which see each other's entries as well; in one block of heads, and in two."""
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 70, "first": 1, "width": 2, "programs": programs}
    case = Attending(2, 90, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    case.length, case.missing = [64, 1], {(0, 64 - 20)}
    with emulated(programs, fences=False):
        case.run([2, 2], width)


@pytest.mark.parametrize(("heads", "programs"), [(8, 8), (20, 1)])
def test_tokens_of_a_block_see_all_of_each_other(heads: int, programs: int) -> None:
    sizes = {"heads": heads, "features": 512, "rope": 64, "window": 70, "programs": programs}
    case = Attending(2, 90, dtype=torch.bfloat16, **sizes)  # type: ignore[arg-type]
    case.length = [75, 1]
    with emulated(programs, fences=False):
        case.run([3, 3], block=3)


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sizes of `Attending` for Hopper's own kernel, which takes few tokens here, too."""
    monkeypatch.setattr(attention_launch, "FEWEST_OF_HOPPER", 1)
    return {"features": 512, "rope": 64, "dtype": torch.bfloat16, "hopper": True}


@pytest.mark.parametrize(
    ("heads", "window", "ratio", "selected", "programs", "lengths", "counts"),
    [
        (64, 130, 4, 200, 2, [590, 0], [3, 2]),  # many tiles and one, tokens of nobody
        (32, 130, 128, 0, 3, [590, 100], [2, 4]),  # pairs of tokens, and a token that is alone
        (20, 8, 4, 60, 1, [333, 2], [4, 1]),
        (100, 70, 0, 0, 1, [260, 60], [1, 8]),  # two blocks of heads; two tiles and one
        (64, 70, 0, 0, 1, [260, 0], [1, 70]),  # one tile, many times
        pytest.param(64, 65, 4, 64, 1, [255, 126], [1, 3], marks=pytest.mark.soak),  # full tiles
        pytest.param(32, 65, 4, 40, 2, [300, 60], [3, 4], marks=pytest.mark.soak),
    ],
)
def test_attention_on_hopper(
    heads: int,
    window: int,
    ratio: int,
    selected: int,
    programs: int,
    lengths: list[int],
    counts: list[int],
    on_hopper: dict[str, Any],
) -> None:
    """Programs that take several tokens one after the other."""
    sizes = {"heads": heads, "window": window, "ratio": ratio, "selected": selected, "programs": programs}
    case = Attending(2, 600, **sizes, **on_hopper)
    case.length = lengths
    # As in other loops of copies by threads, nothing stands between these and the products.
    with emulated(heads + window, fences=False):
        case.run(counts)


def test_queries_that_are_overwritten_too_early_are_noticed(on_hopper: dict[str, Any]) -> None:
    """Both groups say that they need the queries no more."""

    def after_one(ptx: str) -> str:
        edited, found = re.subn(r"(mbarrier\.init\S* \[[^\]]+\], )2;", r"\g<1>1;", ptx)
        assert found == (".entry attend_entries" in ptx)
        return edited

    case = Attending(2, 300, heads=64, window=130, programs=1, **on_hopper)
    case.length = [200, 0]
    with emulated(1, fences=False, edit=after_one), pytest.raises((AssertionError, Fault)):
        case.run([3, 2])


def test_decode_rows_on_hopper(on_hopper: dict[str, Any]) -> None:
    """Their entries are in the ring alone. A page that there is not is counted, its entries are absent."""
    case = Attending(2, 300, heads=64, window=70, ratio=4, selected=30, width=2, programs=2, **on_hopper)
    case.length = [90, 60]
    with emulated(1, fences=False):
        case.run([2, 2], 2, outside=(1, 0))
    assert case.absent > 0


@pytest.mark.parametrize("selected", [pytest.param(0, marks=pytest.mark.soak), 12])
def test_entries_outside_of_pairs_on_hopper(selected: int, on_hopper: dict[str, Any]) -> None:
    case = Attending(2, 200, heads=32, window=8, ratio=4, selected=selected, programs=1, **on_hopper)
    case.length = [130, 150]
    with emulated(5, fences=False):
        case.run([2, 4], outside=(1, 1))
    assert case.absent > 0


def test_drafts_on_hopper(on_hopper: dict[str, Any]) -> None:
    """Entries that a layer that drafts has not made; blocks of tokens that see all of each other."""
    case = Attending(2, 90, heads=20, window=70, first=1, width=2, programs=1, **on_hopper)
    case.length, case.missing = [64, 1], {(0, 64 - 20)}
    with emulated(2, fences=False):
        case.run([2, 2], 2)
        case.run([2, 1])
    case = Attending(2, 90, heads=64, window=70, programs=2, **on_hopper)
    case.length = [75, 1]
    with emulated(3, fences=False):
        case.run([3, 3], block=3)


def test_what_is_not_finite_stays_in_its_row_on_hopper(on_hopper: dict[str, Any]) -> None:
    case = Attending(2, 90, heads=64, window=8, ratio=4, width=2, programs=1, **on_hopper)
    case.length = [64, 70]
    case.near[0, 65] = torch.nan
    with emulated(4, fences=False), pytest.raises(AssertionError):
        case.run([2, 2], 2)
    assert case.out[0].isfinite().all()
    assert case.out[1].isnan().all()
    assert case.out[2:].isfinite().all()


@pytest.mark.parametrize("tokens", [3, 20])
def test_products_of_groups(tokens: int) -> None:
    groups, rows, features = 2, 128, 256
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, groups, features, generator=random).bfloat16()
    data = torch.randn(groups * rows, features, generator=random).to(torch.float8_e4m3fn)
    matrix = BlockScaled(data, torch.rand(groups, 2, generator=random) + 0.5)
    out = torch.full((tokens, groups, rows), torch.nan, dtype=torch.bfloat16)
    with emulated(tokens, fences=False):
        launch_group_linear(x, matrix, out)
    want = torch.einsum("tge,gue->tgu", x.double(), matrix.float().view(groups, rows, features).double())
    torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=2**-8 * float(want.abs().max()))
