"""Workspaces of all tilings in the memory of the largest, and those that are refused."""

import pytest
import torch
from decode_case import Case

from kernels.mla_decode import launch
from kernels.mla_decode.schedule import DecodeShape, Workspace, hopper_tiling, portable_tiling, wide_fp8_tiling
from kernels.own_entries import OwnEntries


def test_workspaces_lie_over_one_buffer() -> None:
    shapes = [DecodeShape(rows, width, 16, 512, 64, 64) for rows in (1, 7, 64) for width in (1, 2, 4)]
    tilings = [hopper_tiling(shape, 132) for shape in shapes]
    need = [Workspace.bytes(shape, tiling, torch.bfloat16) for shape, tiling in zip(shapes, tilings, strict=True)]
    buffer = torch.empty(max(need), dtype=torch.uint8)
    for shape, tiling, size in zip(shapes, tilings, need, strict=True):
        workspace = Workspace.over(buffer, shape, tiling, torch.bfloat16)
        assert workspace.partial_SQL.shape == (tiling.slots(shape), shape.queries, 512)
        assert workspace.metadata.numel() >= tiling.ctas * 8 + shape.rows * 4
        with pytest.raises(ValueError, match=str(size)):
            Workspace.over(buffer[: size - 1], shape, tiling, torch.bfloat16)


@pytest.mark.parametrize(
    ("rows", "width", "heads", "invariant", "path"),
    [
        (1, 1, 16, False, "narrow"),
        (1, 2, 16, False, "narrow"),
        (256, 1, 16, False, "narrow"),
        (2, 2, 16, False, "wide"),
        (32, 1, 128, False, "wide"),
        (1, 1, 33, False, "either"),
        (1, 4, 16, False, "either"),
        (1, 5, 16, False, "wide"),
        (1, 7, 16, False, "wide"),
        (1, 1, 128, False, "either"),
        (1, 2, 128, False, "wide"),
        (1, 2, 16, True, "wide"),
        (1, 4, 16, True, "wide"),
    ],
)
def test_which_kernel_serves_which_shape(rows: int, width: int, heads: int, invariant: bool, path: str) -> None:
    shape = DecodeShape(rows, width, heads, 512, 64, 64, invariant)
    tiling = hopper_tiling(shape, 132)
    assert tiling.path == path
    assert tiling.blocks(shape) * tiling.ctas <= 132  # all at once on a device of as many multiprocessors
    assert (tiling.short > 0) == (path == "either")


@pytest.mark.parametrize(
    ("rows", "width", "heads", "invariant", "fp8", "path", "block"),
    [
        (1, 1, 32, False, False, "narrow", 16),
        (2, 1, 8, False, False, "narrow", 16),
        (2, 1, 32, False, False, "wide", 64),
        (64, 1, 32, False, False, "wide", 64),
        (1, 2, 32, False, False, "either", 64),
        (2, 2, 32, False, False, "wide", 64),
        (2, 1, 32, True, False, "wide", 64),
        (2, 1, 32, False, True, "triton", 32),
    ],
)
def test_which_kernel_serves_latents_of_256_features(
    rows: int, width: int, heads: int, invariant: bool, fp8: bool, path: str, block: int
) -> None:
    shape = DecodeShape(rows, width, heads, 256, 64, 64, invariant)
    tiling = hopper_tiling(shape, 132, fp8=fp8)
    assert (tiling.path, tiling.block) == (path, block)
    assert tiling.blocks(shape) * tiling.ctas <= 132


@pytest.mark.parametrize(
    ("own", "invariant", "why"),
    [
        (True, False, "does not take a shard's own entries"),
        (False, True, "has no invariant mode: plan with fp8_tiling"),
    ],
)
def test_wide_blocks_of_fp8_entries_are_refused_where_they_would_write_wrong_results(
    own: bool, invariant: bool, why: str
) -> None:
    case = Case([70], 1, 64, 512, 64, torch.bfloat16, fp8=True, invariant=invariant)
    t, part = case.tensors, OwnEntries.allocate(1, 1, case.tensors["table"].shape[1], torch.zeros) if own else None
    tensors = t["q"], t["cache"], t["table"], t["length"], t["out"], t["lse"]
    with pytest.raises(ValueError, match=why):
        launch.attend(*tensors, case.workspace(wide_fp8_tiling(case.shape, 3)), scale=case.scale, own=part)


def test_pieces_of_invariant_mode_begin_with_the_row() -> None:
    """Entries that are left out may be of the first piece alone: those behind would be merged with the wrong ones."""
    case = Case([700], 1, 4, 64, 16, invariant=True)
    t, workspace = case.tensors, case.workspace(portable_tiling(case.shape, 3))
    with pytest.raises(ValueError, match=r"first = 128: .* only entries of a row's first 128 can be left out"):
        launch.schedule(t["length"], t["table"], workspace, first=128)
