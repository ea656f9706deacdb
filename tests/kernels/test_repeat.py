# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""A repeat for a layer launches what the layer itself would have launched."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.mla_prefill.hopper import box
from kernels.runtime import launcher as launchers
from kernels.runtime import repeat
from kernels.runtime.ahead import compile_ahead
from kernels.runtime.repeat import Layers, Repeat, nothing_repeated
from tests.support.private_apis import untouched

STREAM = 77


@triton.jit
def scaled(x, weight, out, box, number, scale, N: tl.constexpr, FLAG: tl.constexpr = False):
    pass


class Launched:
    """Stands for a compiled kernel: remembers how it was launched."""

    function, packed_metadata, src = "function", "metadata", None

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def run(self, *args: Any) -> None:
        self.log.append(tuple(map(plainly, args)))


def plainly(value: Any) -> Any:
    """Addresses instead of tensors, as a device would see them."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if hasattr(value, "base"):
        return value.base.data_ptr(), tuple(value.shape), tuple(value.strides), value.padding
    return value


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every launch, whether Triton is asked for it or it is repeated."""
    launches: list[tuple[Any, ...]] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, num_warps: int = 4, **named: Any) -> Launched:
        values = [*args, *(named.get(p.name, p.default) for p in kernel.params[len(args) :])]
        sizes = (*grid, 1, 1)[:3]
        compiled = Launched(launches)
        compiled.run(*sizes, STREAM, "function", "metadata", None, None, None, *values)
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(repeat, "_RUN", run)
    monkeypatch.setattr(repeat, "_possible", lambda layers: len(layers.own) > 1 and not repeat._off)
    monkeypatch.setattr(repeat, "_stream", lambda device: STREAM)
    monkeypatch.setattr(repeat, "_direct", lambda compiled: None)
    return launches


def layers(count: int, shape: tuple[int, ...] = (4, 16, 64)) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return [(torch.randn(shape), torch.randn(2, 64)) for _ in range(count)]


def test_launches_get_the_tensors_of_each_layer(log: list[tuple[Any, ...]]) -> None:
    x, out = torch.randn(8, 64), torch.empty(8, 64)

    def layer(weight: Tensor, cache: Tensor) -> None:
        boxes = TensorDescriptor(weight, [64, 64], [64, 1], [16, 64])
        scaled[(3, 2)](x, weight[1:, 2], out, boxes, 7, 0.5, N=64, num_warps=8)
        scaled[(1,)](cache, weight.transpose(1, 2), x, box(cache, 1, 64), 1, 2.0, 16, FLAG=True)
        scaled[(5,)](cache[1:], x, out, box(x, 8, 64), 9, 1.0, 16)

    own = layers(4)
    for tensors in own:
        layer(*tensors)
    wanted, log[:] = list(log), []
    repeated, calls = Repeat(Layers(own)), 0

    def counted(tensors: tuple[Tensor, Tensor]) -> None:
        nonlocal calls
        calls += 1
        layer(*tensors)

    for index, tensors in enumerate(own):
        repeated(index, partial(counted, tensors))
    assert calls == 1
    assert log == wanted
    assert len(set(wanted)) == len(wanted) == 12
    assert JITFunction.run is repeat._RUN


def test_where_kernels_are_compiled_ahead_layers_of_one_shape_launch_them_once() -> None:
    (weight, cache), *others = layers(3)
    ran: list[int] = []

    def run_all() -> list[int]:
        ran.clear()
        repeated = Repeat(Layers([(weight, cache), *others, (weight[1:], cache)]))
        for index in range(4):
            repeated(index, partial(ran.append, index))
        return ran

    assert run_all() == [0, 1, 2, 3]
    with compile_ahead(torch.device("cpu"), threads=1):
        assert run_all() == [0, 3]


def test_operators_write_what_each_layer_would(log: list[tuple[Any, ...]]) -> None:
    x, gathered, out = torch.randn(5, 64), torch.empty(3, 64), torch.empty(2, 5, 16)
    chosen = torch.tensor([3, 0, 9])

    def layer(weight: Tensor, cache: Tensor) -> None:
        torch.mm(x, weight[1].t(), out=out[0])
        torch.index_select(weight.view(-1, 64), 0, chosen, out=gathered)
        out[1].copy_(weight[2, :, 8:13].t())
        cache[1].add_(gathered[0])

    wanted = []
    for weight, cache in layers(3):
        layer(weight, cache)
        wanted.append([tensor.clone() for tensor in (gathered, out, cache)])
    own = layers(3)
    repeated = Repeat(Layers(own))
    for index, (weight, cache) in enumerate(own):
        gathered.fill_(torch.nan)
        out.fill_(torch.nan)
        repeated(index, partial(layer, weight, cache))
        for got, result in zip((gathered, out, cache), wanted[index], strict=True):
            assert torch.equal(got, result)


def test_layers_in_one_memory_are_told_apart(log: list[tuple[Any, ...]]) -> None:
    weights, out = torch.randn(3, 4, 64), torch.empty(64)
    repeated = Repeat(Layers([(weight,) for weight in weights]))
    for index, weight in enumerate(weights):
        repeated(index, partial(torch.add, weight[3], 0, out=out))
        assert torch.equal(out, weight[3])


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: x + 1, id="a new tensor"),
        pytest.param(lambda x: torch.empty(3), id="new memory"),
        pytest.param(lambda x: x.sum().item(), id="a value for the host"),
        pytest.param(lambda x: x.view(torch.int32).zero_(), id="another dtype"),
    ],
)
def test_what_cannot_be_repeated_is_refused(log: list[tuple[Any, ...]], call: Callable[[Tensor], object]) -> None:
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="cannot be repeated"):
        Repeat(Layers([(x,), (x,)]))(0, lambda: call(x))
    assert JITFunction.run is repeat._RUN


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda x: x.t().flatten(), id="flatten"),
        pytest.param(lambda x: x.t().contiguous(), id="contiguous"),
        pytest.param(lambda x: x.to(torch.float64), id="to"),
        pytest.param(lambda x: x.view(2, 2, 3).transpose(0, 2).reshape(3, 4), id="reshape"),
    ],
)
@torch.inference_mode()
def test_copies_that_torch_calls_views_are_refused(
    log: list[tuple[Any, ...]], call: Callable[[Tensor], object]
) -> None:
    """Torch shows, in inference mode, an operator that copies only where it must, and not what that is made of."""
    x = torch.ones(4, 3)
    with pytest.raises(RuntimeError, match="cannot be repeated"):
        Repeat(Layers([(x,), (x,)]))(0, lambda: call(x))
    Repeat(Layers([(x,), (x,)]))(0, lambda: x.flatten().contiguous().to(torch.float32).view(2, 6).split(2, 1))


def test_tensors_in_lists_are_refused(log: list[tuple[Any, ...]]) -> None:
    """Only what is an argument itself gets the next layer's tensor."""
    x, other, out = torch.ones(4), torch.ones(4), torch.empty(8)
    both = Layers([(x,), (x.clone(),)])
    with pytest.raises(RuntimeError, match=r"cat.* cannot be repeated"):
        Repeat(both)(0, lambda: torch.cat([other, x[1:]], out=out[:7]))
    with pytest.raises(RuntimeError, match=r"scaled .*cannot be repeated"):
        Repeat(both)(0, lambda: scaled[(1,)](other, (other, (1, x)), out, None, 7, 0.5, N=64))
    Repeat(both)(0, lambda: torch.cat([other, other], out=out))
    Repeat(both)(0, lambda: scaled[(1,)](other, (other, 1), out, None, 7, 0.5, N=64))


def test_what_other_threads_launch_is_not_repeated(log: list[tuple[Any, ...]]) -> None:
    x, out = torch.randn(8, 64), torch.empty(8, 64)

    def launched(number: int, weight: Tensor) -> None:
        scaled[(1,)](x, weight, out, None, number, 0.5, N=64)

    def layer(weight: Tensor) -> None:
        if not log:
            other = Thread(target=launched, args=(1, x))
            other.start()
            other.join()
        launched(2, weight)

    own = [(torch.randn(64),) for _ in range(3)]
    repeated = Repeat(Layers(own))
    for index, (weight,) in enumerate(own):
        repeated(index, partial(layer, weight))
    numbers = [launch[13] for launch in log]
    assert numbers == [1, 2, 2, 2]


class OtherTriton:
    """Stands for what another Triton makes of a kernel: it is launched, but not known."""

    packed_metadata = "metadata"

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.log = log

    def run(self, *args: Any) -> None:
        self.log.append(tuple(map(plainly, args)))


def test_what_is_launched_in_an_unknown_way_every_layer_launches_itself(
    log: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, out = repeat._RUN, torch.empty(64)

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        plain(kernel, *args, grid=grid, warmup=warmup, **named)
        return OtherTriton(log)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(repeat, "_RUN", run)
    own = [(torch.randn(64),) for _ in range(3)]
    with untouched(repeat) as lines:
        for _ in range(2):
            repeated = Repeat(Layers(own))
            for index, (weight,) in enumerate(own):
                repeated(index, partial(scaled[(1,)], weight, out, weight, None, 7, 0.5, N=64))
    assert [launch[9] for launch in log] == 2 * [weight.data_ptr() for (weight,) in own]
    [line] = lines
    assert "OtherTriton.function" in line
    assert JITFunction.run is run


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(lambda: torch.ones(5, 8), id="shape"),
        pytest.param(lambda: torch.ones(8, 4).t(), id="strides"),
        pytest.param(lambda: torch.ones(4, 8, dtype=torch.float64), id="dtype"),
        pytest.param(lambda: torch.ones(33)[1:].view(4, 8), id="alignment"),
    ],
)
def test_a_layer_that_differs_runs_itself(log: list[tuple[Any, ...]], second: Callable[[], Tensor]) -> None:
    own, ran = [(torch.ones(4, 8),), (second(),), (torch.ones(4, 8),)], 0
    repeated = Repeat(Layers(own))

    def layer(x: Tensor) -> None:
        nonlocal ran
        ran += 1
        x.add_(1)

    for index, (x,) in enumerate(own):
        repeated(index, partial(layer, x))
        assert (x == 2).all()
    assert ran == 2


def test_a_layer_with_fewer_tensors_runs_itself(log: list[tuple[Any, ...]]) -> None:
    own = [(torch.ones(4), torch.ones(4)), (torch.ones(4),), (torch.ones(4), torch.ones(4))]
    repeated = Repeat(Layers(own))
    for index, tensors in enumerate(own):
        repeated(index, partial(lambda *both: [x.add_(1) for x in both], *tensors))
        assert all(bool((x == 2).all()) for x in tensors)


def test_nothing_is_noted_of_one_layer_or_where_told(log: list[tuple[Any, ...]]) -> None:
    x, sums = torch.ones(4), []

    def layer() -> None:
        sums.append(x.sum().item())

    Repeat(Layers([(x,)]))(0, layer)
    repeated = Repeat(Layers([(x,), (x,)]))
    with nothing_repeated():
        repeated(0, layer)
        repeated(1, layer)
    assert sums == [4.0] * 3


def test_a_cpu_repeats_nothing() -> None:
    x, sums = torch.ones(4), []
    repeated = Repeat(Layers([(x,)] * 3))
    for index in range(3):
        repeated(index, lambda: sums.append(x.sum().item()))
    assert sums == [4.0] * 3


def test_descriptors_of_both_kinds_say_what_a_repeated_one_does() -> None:
    for kind in (TensorDescriptor, GluonDescriptor):
        assert {"base", "shape", "strides", "padding"} <= set(kind.__dataclass_fields__)


@dataclass(eq=False)
class Compiled:
    """Parts of a compiled kernel that are asked for."""

    run: Any
    src: Any
    metadata: Any


@pytest.mark.parametrize("described", [False, True])
def test_the_inner_launcher_gets_what_the_outer_one_would_hand_it(
    monkeypatch: pytest.MonkeyPatch, described: bool
) -> None:
    """Triton's own code but for what it compiles in C, and for encoding descriptors, which asks the driver."""
    calls: list[tuple[Any, ...]] = []

    def inner(*args: Any) -> None:
        calls.append(args)

    monkeypatch.setattr(nvidia, "make_tensordesc_arg", lambda box, metadata: [metadata, *plainly(box)])
    signature = {"x": "*fp32", "box": "tensordesc<fp32[16, 64]>", "N": "constexpr", "other": "tensordesc<fp32[16, 64]>"}
    boxes, x = [TensorDescriptor(torch.ones(16, 64), [16, 64], [64, 1], [16, 64]) for _ in range(2)], 4096
    values = [x, boxes[0], 64, boxes[1]]
    metadata = ["swizzled", "plain"]
    if not described:
        signature, values, metadata = {"x": "*fp32", "N": "constexpr"}, [x, 64], []
    launcher = object.__new__(nvidia.CudaLauncher)
    launcher.launch = nvidia.wrap_handle_tensordesc(inner, signature, metadata)
    launcher.global_scratch_size = launcher.profile_scratch_size = 0
    launcher.global_scratch_align = launcher.profile_scratch_align = 1
    launcher.launch_cooperative_grid, launcher.launch_pdl = False, True
    src, described_as = SimpleNamespace(signature=signature), SimpleNamespace(tensordesc_meta=metadata)
    args = [3, 2, 1, STREAM, "function", "metadata", None, None, None, *values]
    direct = repeat._direct(Compiled(launcher, src, described_as))
    assert direct is not None
    launch, encode = direct
    launcher(*args)
    launch(*encode(*args))
    assert launch is inner
    assert len(calls) == 2
    assert calls[0] == calls[1]
    assert len(calls[0]) == len(args) + 4 + 8 * described
    launcher.global_scratch_size = 128
    assert repeat._direct(Compiled(launcher, src, described_as)) is None
    launcher.global_scratch_size = 0
    for hide in unknown_launchers(launcher, described):
        with untouched(launchers) as lines, pytest.MonkeyPatch.context() as patch:
            hide(patch)
            assert [repeat._direct(Compiled(launcher, src, described_as)) for _ in range(2)] == [None] * 2
            assert len(lines) == 1
            assert "the whole of Triton's launcher" in lines[0]
    with untouched(launchers) as lines:
        assert repeat._direct(Compiled(launcher, src, described_as)) is not None
        assert lines == []


def unknown_launchers(launcher: Any, described: bool) -> list[Callable[[pytest.MonkeyPatch], None]]:
    """Each makes Triton's launcher another one."""
    parts = ["launch", "launch_pdl", "launch_cooperative_grid", "global_scratch_size", "profile_scratch_size"]
    hiding = [partial(pytest.MonkeyPatch.delattr, target=launcher, name=name) for name in parts]
    for name in ("_BASE_ARGS_FORMAT", "wrap_handle_tensordesc"):
        hiding.append(partial(pytest.MonkeyPatch.delattr, target=nvidia, name=name))
    another = {"target": nvidia, "name": "_BASE_ARGS_FORMAT", "value": "another Triton's"}
    hiding.append(partial(pytest.MonkeyPatch.setattr, **another))
    if described:
        another = {"target": launcher, "name": "launch", "value": lambda *args: None}
        hiding.append(partial(pytest.MonkeyPatch.setattr, **another))
    return hiding
