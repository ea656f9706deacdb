"""Stand-ins for one rank of several, or for files that are too large, are what the loader would have made of files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.workers.bench_shapes import SMALL
from workers.families.loading import load_model
from workers.memory.scratch import Scratch
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.weights.formats import FP8_BLOCKS

pytestmark = pytest.mark.soak

CPU = torch.device("cpu")
SIZES = SMALL | {
    "vocab_size": 156,
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "first_k_dense_replace": 2,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "v_head_dim": 64,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
}
"""Divided by eight, some matrices stay in FP8 and others do not; the vocabulary is not divided evenly."""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import share

    return share


def values_of(shape: str) -> dict[str, Any]:
    from shapes import V2_LITE, V3

    sizes = SIZES if shape == "v3" else {**SIZES, "q_lora_rank": None}
    return {**{"v3": V3, "v2-lite": V2_LITE}[shape], **sizes}


def tensors(thing: object, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All that a model holds, by where."""
    if isinstance(thing, Tensor):
        yield path, thing
    elif isinstance(thing, list | tuple):
        for index, one in enumerate(thing):
            yield from tensors(one, f"{path}.{index}")
    elif type(thing).__module__.startswith("workers.") and hasattr(thing, "__dict__"):
        for name, one in vars(thing).items():
            if name not in ("group", "model", "segments"):
                yield from tensors(one, f"{path}.{name}")


def write_files(folder: Path, source: Any) -> None:
    """Write the numbers that `source` gives as a checkpoint is published."""
    import json

    import checkpoint

    wanted = checkpoint.wanted(json.loads((folder / "config.json").read_text()))
    whole = {
        name: source.read(name, tensor.shape, tensor.dtypes[0], tuple(slice(0, n) for n in tensor.shape))
        for name, tensor in wanted.items()
    }
    save_file({name: tensor.clone() for name, tensor in whole.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("shape", ["v3", "v2-lite"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_the_share_is_what_a_rank_loads_from_files(
    bench, ranks: int, shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import generated

    form = generated.GENERATED[shape][1]
    generated.write_folder(values_of(shape), form, tmp_path, seed=3, size=1 << 19)
    ours = bench.load(tmp_path, ranks, CPU, torch.float32)
    write_files(tmp_path, generated.Numbers(3, 1 << 19))
    monkeypatch.setattr(Group, "minimum", lambda self, x: x)  # the other ranks are not there
    group, most = Group(Mesh.of(0, ranks)), ours.max_positions
    files = load_model(
        tmp_path, group=group, dtype=torch.float32, device=CPU, max_positions=most, quantize_activations=True
    )
    found, wanted = dict(tensors(ours)), dict(tensors(files))
    assert {path: (x.shape, x.dtype) for path, x in found.items()} == {p: (x.shape, x.dtype) for p, x in wanted.items()}
    assert all(torch.equal(x.float(), wanted[path].float()) for path, x in found.items())
    assert {tensor.dtype for tensor in found.values()} >= (
        {torch.float8_e4m3fn, torch.float32} if form is FP8_BLOCKS else {torch.float32}
    )
    assert (ours.drafter is not None) == (shape == "v3")
    assert len(found) > 3 * 8


@torch.inference_mode()
def test_a_step_of_a_share_runs(bench, tmp_path: Path) -> None:
    import generated
    from shapes import ATTENTION, Case, Tokens, target_work

    generated.write_folder(values_of("v3"), FP8_BLOCKS, tmp_path, size=1 << 19)
    plan = bench.planned(tmp_path, 8, 4)
    model = bench.load(tmp_path, 8, CPU, torch.float32)
    for width in (1, 2):
        case = Case(model, 2, width, 100, room=8)
        assert 3 <= bench.chosen_experts(case) <= min(6 * width, 8)
        case.rewind()
        output = case.step(Scratch(CPU)).run()
        assert int(output.decided_N[-1]) == 0
        assert output.logits_NV.shape == (2 * width, 156)
        assert bool(output.logits_NV.isfinite().all())
        near, far = (target_work(model, Tokens.decode(2, width, n, 4))[ATTENTION].bytes for n in (64, 128))
        assert far - near == 4 * 2 * 64 * (128 + 16) * 4  # a rank caches all of a latent
    weights, cache = bench.wanted_bytes(plan, 4)
    assert bench.check_capacity(plan, 4, int(weights + cache + bench.AROUND)) == ""
    assert "too small" in bench.check_capacity(plan, 4, int(weights + cache + bench.AROUND) - 1)


def test_numbers_depend_on_seed_and_name_alone(bench) -> None:
    import generated

    def read(seed: int, name: str, dtype: str = "BF16", rows: slice = slice(0, 4096), columns: slice = slice(0, 300)):
        return generated.Numbers(seed, 1 << 19).read(name, (4096, 300), dtype, (rows, columns)).float()

    whole = read(1, "a.weight")
    assert torch.equal(whole, read(1, "a.weight"))
    assert not torch.equal(whole, read(2, "a.weight"))
    assert not torch.equal(whole, read(1, "b.weight"))
    assert whole.std() == pytest.approx(0.02, rel=0.01)
    fp8 = read(1, "a.weight", "F8_E4M3")
    assert not fp8.isnan().any()
    source = generated.Numbers(1, 1 << 19)
    source.read("norm.weight", (7,), "BF16", (slice(0, 7),))  # whatever was read before
    for rows in (slice(0, 4096), slice(5, 6), slice(870, 876), slice(873, 874), slice(874, 2000), slice(4095, 4096)):
        for dtype, all_of in (("BF16", whole), ("F8_E4M3", fp8)):
            found = source.read("a.weight", (4096, 300), dtype, (rows, slice(7, 200))).float()
            assert torch.equal(found, all_of[rows, 7:200])
    assert len(set(map(tuple, whole[:, :4].tolist()))) > 4090
    with pytest.raises(ValueError, match="longer than tables"):
        source.read("a.weight", (2, 1 << 19), "BF16", (slice(0, 2), slice(0, 1 << 19)))


def test_the_weights_of_a_generated_folder_have_an_identity(bench, tmp_path: Path) -> None:
    """A replica hashes it into the root of its pages' keys."""
    from generated import installed, write_folder

    from workers.weights.identity import weights_identity

    for name, seed in (("a", 1), ("same", 1), ("b", 2)):
        write_folder(values_of("v3"), FP8_BLOCKS, tmp_path / name, seed)
    with installed():
        a, same, b = (weights_identity(tmp_path / name) for name in ("a", "same", "b"))
    assert a == same != b
