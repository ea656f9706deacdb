# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.runtime import repeat
from kernels.runtime.repeat import Layers
from tests.support.hopper import compile_only
from tests.support.private_apis import untouched
from workers.graphs import guard
from workers.graphs.guard import CaptureViolation, capture_guard
from workers.graphs.record import record

CPU = torch.device("cpu")


@triton.jit
def doubled(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 2 * tl.load(x + i))


@triton.jit
def tripled(x, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(x + i, 3 * tl.load(x + i))


def test_an_allocation_is_refused_and_its_line_named() -> None:
    x, out = torch.ones(4), torch.empty(4)
    with capture_guard(CPU):
        torch.add(x, x, out=out)
        out.view(2, 2).mul_(2)
        with pytest.raises(CaptureViolation, match=r"test_guard\.py:\d+: torch\.add\(x, x\)"):
            torch.add(x, x)
        with pytest.raises(CaptureViolation, match="allocates"):
            torch.empty(3)
        with pytest.raises(CaptureViolation, match="allocates"):
            x[torch.tensor([0, 1])]
    assert out.tolist() == [4.0] * 4
    torch.add(x, x)


def test_the_line_is_that_of_the_layer_where_its_launches_are_noted() -> None:
    x = torch.ones(4)
    refused = pytest.raises(CaptureViolation, match=r"test_guard\.py:\d+: torch\.add\(x, x\)")
    with capture_guard(CPU), repeat._noting(Layers([(x,), (x,)])), refused:
        torch.add(x, x)


def test_views_and_results_in_given_memory_pass() -> None:
    buffer = torch.arange(12.0)
    index = torch.tensor([2, 0])
    picked = torch.empty(2, 4)
    with capture_guard(CPU):
        rows = buffer[:12].view(3, 4)
        torch.index_select(rows, 0, index, out=picked)
        picked[:, 1:].copy_(rows[:2, 1:])
        torch.mm(rows[:2], picked.t()[:, :1], out=buffer[:2].unsqueeze(1))


def test_a_value_that_the_host_waits_for_is_refused_and_its_line_named() -> None:
    x = torch.ones(4)
    with capture_guard(CPU):
        with pytest.raises(CaptureViolation, match=r"waits for a value .*/test_guard\.py:\d+: x\[1\]\.item\(\)"):
            x[1].item()
        with pytest.raises(CaptureViolation, match=r"waits for a value .*/test_guard\.py:\d+: bool\(x\[1\]\)"):
            bool(x[1])
    assert x.sum().item() == 4


def test_a_kernel_that_nothing_has_compiled_before_is_refused() -> None:
    x = torch.ones(64)
    with compile_only() as compiled:
        with capture_guard(CPU), pytest.raises(CaptureViolation, match="compiled during a capture, at"):
            doubled[(1,)](x, 64)
        assert not compiled
        doubled[(1,)](x, 64)
        with capture_guard(CPU):
            doubled[(1,)](x, 64)
    assert len(compiled) == 2


def test_without_tritons_hook_a_compilation_passes_and_the_rest_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(64)
    with untouched(guard) as lines, compile_only() as compiled:
        with monkeypatch.context() as patch:  # for a moment: Triton reads it itself
            patch.setattr(triton.knobs, "runtime", SimpleNamespace())
            for _ in range(2):
                with capture_guard(CPU), pytest.raises(CaptureViolation, match="allocates"):
                    torch.add(x, x)
        with capture_guard(CPU):
            tripled[(1,)](x, 64)
    assert len(compiled) == len(lines) == 1
    assert "jit_cache_hook" in lines[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        pytest.param(lambda x: torch.add(x, x), "allocates", id="an allocation"),
        pytest.param(lambda x: tripled[(1,)](x, 64), "a kernel is compiled", id="a compilation"),
        pytest.param(lambda x: x[0].item(), "the host waits for a value", id="a value"),
        pytest.param(lambda x: x.cpu(), "waits for the device", id="a copy"),
    ],
)
def test_a_capture_on_a_gpu_refuses_it_and_the_next_one_succeeds(
    mistake: Callable[[Tensor], object], message: str
) -> None:
    device = torch.device("cuda", 0)
    x = torch.ones(64, device=device)
    doubled[(1,)](x, 64)  # loads it
    with pytest.raises(CaptureViolation, match=rf"{message}.*, at tests/workers/graphs/test_guard\.py:\d+"):
        record(device, lambda: mistake(x))
    graph, _ = record(device, lambda: doubled[(1,)](x, 64))
    graph.replay()
    assert x.eq(4).all()
    graph.reset()
