"""Matrices made of parts of a checkpoint's tensors, whatever their format, against what those tensors mean."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantized_checkpoints import WRITERS
from safetensors.torch import save_file

from kernels.matrix import BlockScaled
from workers.parallel.mesh import Mesh
from workers.weights.checkpoint import Checkpoint, WeightsError
from workers.weights.formats import FP8_BLOCKS, INT4_GROUPS, PLAIN
from workers.weights.loading_progress import LoadingProgress
from workers.weights.part import Part, RopeRows, Shard
from workers.weights.reader import CheckpointReader
from workers.weights.source import DryRun
from workers.weights.weight import Weight

CPU = torch.device("cpu")
FORMATS = {"fp8": FP8_BLOCKS, "int4": INT4_GROUPS, "plain": PLAIN}


def read(
    folder: Path, stacks: list[list[Part]], mesh: Mesh, dtype: torch.dtype = torch.float32
) -> tuple[Weight, list[str]]:
    """One matrix, or those of several experts, as a rank loads them after its dry run; and what the user is told."""
    said: list[str] = []

    def build(source: Any) -> Weight:
        return source.matrix(*stacks[0]) if len(stacks) == 1 else source.experts(stacks)

    with Checkpoint.open(folder) as checkpoint:
        dry_run = DryRun(mesh, dtype, dtype_of=checkpoint.dtype_of)
        counted = build(dry_run)
        checkpoint.verify(dry_run.wanted, ["other"])
        with CheckpointReader(checkpoint, mesh, dtype, CPU, LoadingProgress(dry_run.bytes, None)) as reader:
            reader.tell = said.append  # type: ignore[method-assign]
            weight = build(reader)
            reader.settle()
    assert dry_run.bytes == weight.nbytes
    assert (counted.format, counted.block, counted.shape) == (weight.format, weight.block, weight.shape)
    return weight, said


def kernels_read(weight: Weight) -> None:
    """ValueError where kernels do not take a matrix in FP8 as it is kept."""
    assert weight.scales is not None
    assert weight.block is not None
    matrix = BlockScaled(weight.data, weight.scales, *weight.block)
    assert torch.equal(matrix.float(), weight.dequantized(torch.float32))


def reordered(numbers: np.ndarray, rope: RopeRows) -> np.ndarray:
    """A row at a time."""
    result = numbers.copy()
    for head in range(0, len(numbers), rope.head):
        first = head + rope.head - rope.rope
        for i in range(rope.rope // 2):
            result[first + 2 * i], result[first + 2 * i + 1] = numbers[first + i], numbers[first + rope.rope // 2 + i]
    return result


@st.composite
def parts_of(draw: st.DrawFn, ranks: int, shard: Shard | None, width: int) -> Part:
    """A part that `ranks` can share, whose share of the columns is `width` wide."""
    units = draw(st.sampled_from([1, 1, 2, 3])) if shard is not None else 1
    unit = draw(st.integers(0, units - 1))
    share = draw(st.one_of(st.integers(1, 150), st.sampled_from([16, 32, 48, 64, 96, 128, 192, 256])))
    rope, rows, columns = None, share, width
    dimension = None if shard is None else shard.dimension
    if dimension == 0:
        rows *= ranks * units
    elif dimension == 1:
        columns *= ranks * units
    if units == 1 and dimension != 1 and draw(st.integers(0, 3)) == 0:
        head = draw(st.sampled_from([48, 64, 96, 192]))
        rows = head * draw(st.integers(1, 2)) * (ranks if dimension == 0 else 1)
        rope = RopeRows(head, draw(st.sampled_from([16, 32])))
    return Part("", rows, columns, shard=shard, unit=unit, units=units, rope=rope)


def matrices_are_what_the_files_mean(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    ranks = data.draw(st.sampled_from([1, 2, 4]), label="ranks")
    shard = data.draw(
        st.sampled_from([None, Shard(0, "heads"), Shard(0, "experts"), Shard(1, "experts")]), label="shard"
    )
    width = data.draw(
        st.one_of(st.integers(1, 200), st.sampled_from([32, 64, 96, 128, 160, 256])), label="columns of a rank"
    )
    shapes = data.draw(st.lists(parts_of(ranks, shard, width), min_size=1, max_size=3), label="parts")
    kinds = [data.draw(st.sampled_from(list(WRITERS)), label="kind")] * len(shapes)
    if data.draw(st.integers(0, 4), label="mixed") == 0:
        kinds[-1] = "plain"
    experts = data.draw(st.sampled_from([1, 1, 2]), label="experts")
    tensors: dict[str, torch.Tensor] = {}
    stacks, meant = [], {}
    for expert in range(experts):
        parts = []
        for number, (part, kind) in enumerate(zip(shapes, kinds, strict=True)):
            name = f"experts.{expert}.{number}.weight"
            parts.append(Part(name, part.rows, part.columns, part.shard, part.unit, part.units, rope=part.rope))
            written, meant[name] = WRITERS[kind](name, part.rows, part.columns, seed=17 * expert + number)
            tensors |= written
        stacks.append(parts)
    folder = tmp_path_factory.mktemp("matrices")
    save_file(tensors, folder / "model.safetensors")

    loaded = []
    for rank in range(ranks):
        mesh = Mesh.of(rank, ranks)
        weight, said = read(folder, stacks, mesh)
        want = []
        for parts in stacks:
            rows = []
            for part in parts:
                share = meant[part.name][part.index(mesh)]
                rows.append(reordered(share, part.rope) if part.rope else share)
            want.append(np.concatenate(rows))
        wanted = torch.from_numpy(np.stack(want) if experts > 1 else want[0])
        assert torch.equal(weight.dequantized(torch.float32), wanted)
        assert len(said) == (rank == 0 and weight.format is PLAIN and set(kinds) != {"plain"})
        loaded.append(weight)
    assert len({(weight.format, weight.block) for weight in loaded}) == 1, "ranks differ"
    if set(kinds) == {"fp8"}:
        if len(shapes) == 1 and shard is None and shapes[0].rope is None:
            assert loaded[0].block == (128, 128), "blocks are made smaller only where they have to be"
        if loaded[0].block:
            assert loaded[0].block[0] >= 16
            assert loaded[0].block[1] >= 64
            kernels_read(loaded[0])
    if set(kinds) == {"int4"} and shard != 1 and width % 32 == 0:
        assert loaded[0].format is INT4_GROUPS


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_matrices_are_what_the_files_mean(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    matrices_are_what_the_files_mean(data, tmp_path_factory)


@pytest.mark.long
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_many_matrices_are_what_the_files_mean(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    matrices_are_what_the_files_mean(data, tmp_path_factory)


@pytest.mark.parametrize(
    ("ranks", "intermediate", "block"),
    [
        (1, 18432, (128, 128)),
        (8, 18432, (128, 128)),
        (8, 1536, (64, 128)),
        (8, 2048, (128, 128)),
        (32, 2048, (64, 128)),
    ],
)
def test_blocks_of_published_widths(ranks: int, intermediate: int, block: tuple[int, int]) -> None:
    """Gate above up, of which every rank has a share."""
    parts = [Part(f"mlp.{half}_proj.weight", intermediate, 7168, shard=Shard(0, "experts")) for half in ("gate", "up")]
    dry_run = DryRun(Mesh.of(0, ranks), torch.bfloat16, dtype_of={part.name: "F8_E4M3" for part in parts}.get)
    assert dry_run.matrix(*parts).block == block


@pytest.mark.parametrize("kind", ["F8_E4M3", "I32"])
@pytest.mark.parametrize(
    ("intermediate", "ranks", "kept", "block"),
    [
        (128, (1, 2, 4, 8), "", None),  # 16 features a rank of 8
        (256, (1, 2, 4, 8), "I32 down", None),
        (512, (1, 2, 4, 8), "I32 down, I32 gate_up, F8_E4M3 down, F8_E4M3 gate_up", (128, 64)),
        (1024, (1, 2, 4, 8), "I32 down, I32 gate_up, F8_E4M3 down, F8_E4M3 gate_up", (128, 128)),
        (1280, (1, 2, 4, 8), "I32 down, I32 gate_up, F8_E4M3 gate_up", None),
        (528, (1, 2, 4, 8), "I32 gate_up", None),
        (516, (1, 2, 4), "I32 gate_up", None),
    ],
)
def test_formats_of_invariant_mode_are_those_of_all_numbers_of_ranks(
    kind: str, intermediate: int, ranks: tuple[int, ...], kept: str, block: tuple[int, int] | None
) -> None:
    """Matrices that the most of 1, 2, 4 and 8 ranks which can share the features have to keep plain are plain on all of
    them."""
    down = Part("experts.0.down_proj.weight", 256, intermediate, shard=Shard(1, "experts"))
    gate_up = [
        Part(f"experts.0.{half}_proj.weight", intermediate, 256, shard=Shard(0, "experts")) for half in ("gate", "up")
    ]
    names = [part.name for part in (down, *gate_up)]
    dtypes = dict.fromkeys(names, kind) if kind == "F8_E4M3" else {f"{name}_packed": kind for name in names}
    for count in ranks:
        said: list[str] = []
        dry_run = DryRun(Mesh.of(0, count), torch.bfloat16, dtype_of=dtypes.get, invariant=True)
        dry_run.tell = said.append  # type: ignore[method-assign]
        down_XEI = dry_run.experts([[down]])
        gate_up_XFE = dry_run.experts([gate_up])
        weights = {"down": (down_XEI, "experts.down_proj"), "gate_up": (gate_up_XFE, "experts.gate_proj and")}
        for name, (weight, called) in weights.items():
            stays = f"{kind} {name}" in kept
            assert (weight.format is not PLAIN) == stays
            notes = [note for note in said if called in note and "invariant mode does on any number of ranks" in note]
            assert len(notes) == (not stays)
        if kind == "F8_E4M3" and f"{kind} down" in kept:
            assert down_XEI.block == block


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_plain_tensors_and_rows_of_a_quantized_matrix(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Pieces begin inside of blocks, on two ranks that do not share equally."""
    tensors, want = WRITERS[kind]("a.weight", 201, 96, seed=3)
    save_file(tensors, tmp_path / "model.safetensors")
    with Checkpoint.open(tmp_path) as checkpoint, pytest.MonkeyPatch.context() as patch:
        patch.setattr("workers.weights.reader.MOST_DEQUANTIZED", 7 * 96)
        reader = CheckpointReader(checkpoint, Mesh.of(1, 2), dtype, CPU, LoadingProgress(0, None))
        whole = reader.load("a.weight", 201, 96)
        rows = reader.plain(Part("a.weight", 201, 96, own=slice(101, 201)))
    assert torch.equal(whole, torch.from_numpy(want).to(dtype))
    assert torch.equal(rows, torch.from_numpy(want[101:]).to(dtype))


def negative_nan(row: int, column: int) -> torch.Tensor:
    """Put NaN in one place of a matrix [200, 160] that has the largest and the smallest number in others."""
    byte = torch.randint(0, 255, (200, 160), dtype=torch.uint8)
    byte[byte == 127] = 126
    byte[row, column] = 255
    return byte.view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("fp8", {"a.weight_scale_inv": None}, ["1 missing", "a.weight_scale_inv"]),
        ("fp8", {"a.weight_scale_inv": torch.ones(3, 2)}, ["a.weight_scale_inv is [3, 2]", "[2, 2]"]),
        ("fp8", {"a.weight_scale_inv": torch.ones(2, 2).double()}, ["a.weight_scale_inv is F64", "F32"]),
        ("fp8", {"a.weight_scale_inv": torch.full((2, 2), torch.nan)}, ["a.weight_scale_inv", "NaN or infinite"]),
        ("fp8", {"a.weight_scale_inv": torch.full((2, 2), torch.inf)}, ["a.weight_scale_inv", "NaN or infinite"]),
        ("fp8", {"a.weight": torch.full((200, 160), torch.nan).to(torch.float8_e4m3fn)}, ["a.weight holds NaN"]),
        ("fp8", {"a.weight": negative_nan(199, 159)}, ["a.weight holds NaN"]),
        ("fp8", {"a.weight": torch.zeros(200, 160).to(torch.float8_e5m2)}, ["a.weight is F8_E5M2", "unexpected"]),
        ("fp8", {"a.weight": torch.zeros(200, 160).bfloat16()}, ["1 unexpected", "a.weight_scale_inv"]),
        ("fp8", {"a.weight_scale": torch.ones(1)}, ["1 unexpected", "a.weight_scale"]),
        ("int4", {"a.weight_scale": None}, ["1 missing", "a.weight_scale"]),
        ("int4", {"a.weight_shape": None}, ["1 missing", "a.weight_shape"]),
        ("int4", {"a.weight_packed": None}, ["1 missing", "a.weight", "2 unexpected"]),
        ("int4", {"a.weight_shape": torch.tensor([160, 200])}, ["a.weight_shape says [160, 200]", "[200, 160]"]),
        ("int4", {"a.weight_scale": torch.ones(200, 5).half()}, ["a.weight_scale is F16", "BF16"]),
        ("int4", {"a.weight_scale": torch.ones(200, 2).bfloat16()}, ["a.weight_scale is [200, 2]", "[200, 5]"]),
        ("int4", {"a.weight_scale": torch.full((200, 5), torch.nan).bfloat16()}, ["a.weight_scale", "NaN or infinite"]),
        (
            "int4",
            {"a.weight_scale": torch.full((200, 5), -32.0).bfloat16()},
            ["a.weight_scale", "of 32 and more"],
        ),
        ("int4", {"a.weight_zero_point": torch.zeros(200, 5)}, ["1 unexpected", "a.weight_zero_point"]),
        ("int4", {"a.weight_g_idx": torch.zeros(160)}, ["1 unexpected", "a.weight_g_idx"]),
    ],
)
def test_damaged_tensors_are_named(kind: str, change: dict, words: list[str], tmp_path: Path) -> None:
    tensors = WRITERS[kind]("a.weight", 200, 160, seed=1)[0] | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        read(tmp_path, [[Part("a.weight", 200, 160)]], Mesh())
    for word in words:
        assert word in str(error.value)


def test_what_is_kept_unquantized_is_told_once(tmp_path: Path) -> None:
    tensors = {}
    for layer in range(3):
        tensors |= WRITERS["fp8"](f"model.layers.{layer}.self_attn.q_b_proj.weight", 48, 64, seed=layer)[0]
    save_file(tensors, tmp_path / "model.safetensors")
    for rank in range(2):
        said: list[str] = []
        with Checkpoint.open(tmp_path) as checkpoint:
            told = LoadingProgress(0, said.append)
            reader = CheckpointReader(checkpoint, Mesh.of(rank, 2), torch.float32, CPU, told)
            for layer in range(3):
                part = Part(f"model.layers.{layer}.self_attn.q_b_proj.weight", 48, 64, shard=Shard(0, "heads"))
                assert reader.matrix(part).format is PLAIN
        notes = [line for line in said if "unquantized" in line]
        words = "self_attn.q_b_proj: on 2 ranks a share's rows begin inside of a 128 x 128 block; kept unquantized"
        assert notes == [words] * (rank == 0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda mesh: Part("w", 5, 4, shard=Shard(0, "experts"), units=2).index(mesh),
        lambda mesh: Part("w", 6, 4, shard=Shard(0, "experts"), units=2).index(mesh),
    ],
)
def test_parts_that_ranks_cannot_share_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^w"):
        wrong(Mesh.of(0, 2))
