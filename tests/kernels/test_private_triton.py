# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A Triton or torch that has changed: slower, with a line that says so, and never wrong."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITCallable, JITFunction, KernelInterface, KernelParam

from kernels import moe
from kernels.mla_decode import schedule as decode_schedule
from kernels.mla_decode.schedule import DecodeShape, hopper_tiling
from kernels.moe import schedule
from kernels.private_api import PrivateApiGone
from kernels.runtime import ahead, operators, repeat
from kernels.runtime.repeat import Layers, Repeat
from kernels.sparse import workspace as sparse_workspace
from kernels.sparse.workspace import SparseWorkspace
from tests.support.private_apis import untouched

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A CPU that passes for a GPU; the lines that are logged."""
    monkeypatch.setattr(Tensor, "is_cuda", True)
    with untouched(repeat, operators) as lines:
        # Imported by name: one object in both.
        monkeypatch.setattr(repeat, "WATCHING", operators.WATCHING)
        yield lines


def runs_of_three_layers() -> int:
    """Return how often layers do something themselves; what is done is right however often that is."""
    own, ran = [(torch.ones(4),) for _ in range(3)], 0
    repeated = Repeat(Layers(own))

    def layer(x: Tensor) -> None:
        nonlocal ran
        ran += 1
        x.add_(1)

    for index, (x,) in enumerate(own):
        repeated(index, lambda x=x: layer(x))
    assert all((x == 2).all() for (x,) in own)
    return ran


def test_with_all_parts_the_first_layer_is_repeated(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeat, "_stream", lambda device: 0)
    assert runs_of_three_layers() == 1
    assert gpu == []


@pytest.mark.parametrize(
    ("holder", "name", "said"),
    [
        (nvidia, "CudaLauncher", "CudaLauncher.__call__"),
        (nvidia.CudaLauncher, "__call__", "CudaLauncher.__call__"),
        (KernelParam, "default", "KernelParam.default"),
        (torch.ops.aten.add, "Tensor", "is_view"),
        (torch.utils._python_dispatch, "TorchDispatchMode", "TorchDispatchMode"),
    ],
)
def test_without_a_part_every_layer_launches_for_itself(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch, holder: Any, name: str, said: str
) -> None:
    monkeypatch.setattr(holder, name, SimpleNamespace()) if name == "Tensor" else monkeypatch.delattr(holder, name)
    assert runs_of_three_layers() == runs_of_three_layers() == 3
    [line] = gpu
    assert said in line
    assert "several times as long" in line


def test_without_a_way_to_launch_every_layer_launches_for_itself(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(KernelInterface, "run")
    monkeypatch.delattr(JITFunction, "run")
    assert runs_of_three_layers() == 3
    [line] = gpu
    assert "triton.JITFunction.run(grid, warmup)" in line


def test_a_way_to_launch_with_other_arguments_is_another_one(gpu: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, blocks, **options: None)
    assert runs_of_three_layers() == 3
    assert len(gpu) == 1


def test_without_torchs_short_way_the_stream_is_asked_for_the_long_way(
    gpu: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(torch._C, "_cuda_getCurrentRawStream", raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=77))
    assert repeat._stream(torch.device("cuda", 0)) == repeat._stream(torch.device("cuda", 0)) == 77
    assert len(gpu) == 1


@pytest.mark.parametrize(
    ("holder", "name"), [(triton, "AsyncCompileMode"), (JITCallable, "parse"), (triton.runtime.jit, "JITFunction")]
)
def test_without_a_part_nothing_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch, holder: Any, name: str) -> None:
    with untouched(ahead) as lines:
        assert ahead.possible()
    with untouched(ahead) as lines:
        monkeypatch.delattr(holder, name)
        assert not ahead.possible()
        assert not ahead.possible()
        [line] = lines
        assert name in line
        assert "when they are first launched" in line
        refused = pytest.raises(PrivateApiGone, match=f"{name}.*pip install 'triton>=3.6,<3.7'")
        with refused, ahead.compile_ahead(torch.device("cpu"), threads=1):
            raise AssertionError("something was launched")


def test_without_views_of_shared_memory_tritons_tiles_take_the_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "is_hopper", lambda device: True)
    x, id, down = torch.zeros(4096, 64, dtype=torch.bfloat16), torch.zeros(4096, 2), torch.zeros(4, 64, 32)
    with untouched(moe) as lines:
        assert schedule.tiling(moe.experts_shape(x, id, down)).programs
        assert lines == []
    with untouched(moe) as lines:
        monkeypatch.delattr(gl.shared_memory_descriptor, "_reinterpret")
        tiling = schedule.tiling(moe.experts_shape(x, id, down))
        moe.experts_shape(x, id, down)
        assert (tiling.rows, tiling.programs) == (128, 0)
        assert len(lines) == 1


def test_without_views_of_shared_memory_kernels_for_few_query_vectors_take_fp8_entries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shapes = [DecodeShape(64, 1, heads, 512, 64, 4, invariant) for heads in (16, 128) for invariant in (False, True)]
    with untouched(decode_schedule) as lines:
        assert {hopper_tiling(shape, 132, fp8=True).path for shape in shapes} == {"fp8", "wide"}
        assert lines == []
    with untouched(decode_schedule) as lines:
        monkeypatch.setattr(sparse_workspace, "REINTERPRETED", decode_schedule.REINTERPRETED)
        monkeypatch.delattr(gl.shared_memory_descriptor, "_reinterpret")
        assert {hopper_tiling(shape, 132, fp8=True).path for shape in shapes} == {"narrow", "triton"}
        assert all(hopper_tiling(shape, 132).path in ("narrow", "wide") for shape in shapes)
        sizes = (3, 128, 512, 2048, torch.bfloat16, torch.empty)
        assert SparseWorkspace.allocate(*sizes, fp8=True, hopper=True).tiling.path == "triton"
        assert SparseWorkspace.allocate(*sizes, hopper=True).tiling.path == "wide"
        assert len(lines) == 1


WITHOUT_MODES = """
import torch, torch.utils._python_dispatch
del torch.utils._python_dispatch.TorchDispatchMode
from kernels.runtime import repeat
from workers.graphs.guard import capture_guard
x = torch.ones(4)
torch.Tensor.is_cuda = True
layers = repeat.Repeat(repeat.Layers([(x,), (torch.ones(4),)]))
with capture_guard(torch.device("cpu")):
    layers(0, lambda: x.add_(x + 1))
    layers(1, lambda: x.add_(1))
assert x.tolist() == [4.0] * 4
"""


@pytest.mark.long
def test_without_dispatch_modes_captures_go_unwatched_and_layers_launch_for_themselves() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_MODES], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    [line] = run.stderr.splitlines()
    assert "TorchDispatchMode" in line
    assert "not noticed" in line
