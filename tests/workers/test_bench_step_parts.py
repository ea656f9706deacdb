"""The benchmark of a step's parts, run on a CPU with a clock of the host: what it runs, counts and divides. Times of a
device need one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from tests.workers.bench_shapes import SMALL
from workers.memory.scratch import Scratch
from workers.protocol.plan import TokenKey
from workers.step.decode import DecodeStep
from workers.step.mixed import Stage, Tail
from workers.step.parts import StepOutput, StepParts

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, where a device's events are the host's, and graphs are what they were captured from."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import parts
    import step_parts

    class Event:
        def record(self) -> None:
            self.time = time.perf_counter()

        def elapsed_time(self, other: Event) -> float:
            return (other.time - self.time) * 1e3

        def query(self) -> bool:
            return True

    class EagerStep:
        def __init__(self, step: DecodeStep) -> None:
            self.step = step

        def replay(self) -> StepOutput:
            return self.step.run()

    ran: set[int] = set()
    run_tail = Tail.run

    def run(self: Tail) -> None:
        ran.add(self.tokens)
        run_tail(self)

    class EagerTail(Tail):
        def __init__(self, parts: StepParts, tokens: int, inner: Scratch) -> None:
            super().__init__(parts, tokens, inner)
            assert tokens in ran, "a capture refuses what never ran for real"

    class EagerStage(Stage):
        def __init__(
            self, parts: StepParts, tokens: int, scratch: Scratch, inner: Scratch, tails: Mapping[TokenKey, Tail]
        ) -> None:
            super().__init__(parts, tokens, scratch, inner)
            self._tails = tails

        def tail(self, key: TokenKey) -> Tail:
            return self._tails[key]

    monkeypatch.setattr(Tail, "run", run)
    monkeypatch.setattr(parts, "event", Event)
    monkeypatch.setattr(parts, "hold", lambda ms: None)
    monkeypatch.setattr(parts, "wait", lambda: None)
    monkeypatch.setattr(step_parts, "CapturedTail", EagerTail)
    monkeypatch.setattr(step_parts, "CapturedStage", EagerStage)
    monkeypatch.setattr(step_parts, "CapturedStep", EagerStep)
    return step_parts


def small_model(bench: ModuleType, width: int) -> Any:
    return bench.model_of(bench.V2_LITE | SMALL, width, torch.float32, torch.device("cpu"))


def calls(printed: str) -> dict[str, int]:
    """Part -> calls, of the outer rows of the table of parts."""
    lines = printed[printed.index("part, with nothing replayed") :].splitlines()[1:]
    rows = [(line[2:46].rstrip(), line[46:52].strip()) for line in lines]
    return {name: int(number) for name, number in rows if number and not name.startswith(" ")}


LAYERS = {"attention's input side": 2, "attention": 2, "output + dense": 1, "output + experts": 1, "head": 1}


@pytest.mark.parametrize("width", [1, 2])
@torch.inference_mode()
def test_a_prefill_step_is_cut_into_parts(bench: ModuleType, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    step = bench.prefill(small_model(bench, width), 2, 70, width)
    bench.report(step)
    printed = capsys.readouterr().out
    assert f"prefill 2x70, width {width}: 140 tokens in a bucket of 144\n" in printed
    assert "the device began before the host had launched everything: device is too large" in printed
    drafts = {"draft pass": 2, "draft loop": 1} if width > 1 else {}  # for all tokens, then for those that are wanted
    assert calls(printed) == LAYERS | {"sampling": 2} | drafts
    assert "    prefill rows   " in printed
    assert step.case.state.tensors.length_S[:2].tolist() == [70, 70]


@pytest.mark.parametrize("width", [1, 2])
@torch.inference_mode()
def test_a_decode_step_is_cut_into_parts(bench: ModuleType, width: int, capsys: pytest.CaptureFixture[str]) -> None:
    step = bench.decode(small_model(bench, width), 20, width, 100)
    bench.report(step)
    printed = capsys.readouterr().out
    assert f"decode 20 rows, width {width}, context 100\n" in printed
    drafts = {"draft pass": 1, "draft loop": 1} if width > 1 else {}
    assert calls(printed) == LAYERS | {"sampling": 2} | drafts
    assert "    decode rows   " in printed


@pytest.mark.parametrize(
    ("rows", "width", "start"),
    [
        (5, 1, 0),
        (5, 2, 70),
        (16, 1, 0),
        (16, 2, 70),
    ],
)
@torch.inference_mode()
def test_a_mixed_step_is_cut_into_parts(
    bench: ModuleType, rows: int, width: int, start: int, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bench.mixed(small_model(bench, width), rows, 30, width, 100, start)
    bench.report(step)
    printed = capsys.readouterr().out
    title = f"{rows} decode rows, context 100, + 30 tokens behind {start} cached, width {width}"
    assert f"{title}: {rows * width + 30} tokens in a bucket of " in printed
    assert LAYERS.items() <= calls(printed).items()
    assert "    decode rows   " in printed
    assert "    prefill rows   " in printed
    assert step.case.state.tensors.length_S[rows] == start + 30


@torch.inference_mode()
def test_parts_are_nested_and_leave_nothing_behind(bench: ModuleType) -> None:
    from workers.models.layer import DecoderLayer

    plain = DecoderLayer.finish
    step = bench.decode(small_model(bench, 2), 20, 2, 100)
    rows, whole, ahead = bench.parts.measured(step.plain, 3, 1.0)
    assert DecoderLayer.finish is plain
    assert not ahead
    by_path = {row.path: row for row in rows}
    outer = ("output + experts",)
    inside = [row for row in rows if row.path[:-1] == outer]
    assert [row.path[-1] for row in inside] == [
        "attention's output, with the norm behind it",
        "routing",
        "experts, routed and shared",
    ]
    assert 0 < sum(row.total for row in inside) < by_path[outer].total * 1.5  # medians of three
    assert 0 < sum(row.total for row in rows if len(row.path) == 1) < whole * 1.5
    # Every part stands behind the one it lies in.
    for place, row in enumerate(rows):
        if len(row.path) > 1:
            assert row.path[:-1] in [above.path for above in rows[:place]]
    assert by_path[("draft pass",)].calls == 1
    assert by_path[("draft pass", *outer)].calls == 1


def test_medians_of_parts(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that only counts: a part of three ticks twice a step, and one of them in it."""
    ticks = iter(range(1000))

    class Event:
        def record(self) -> None:
            self.time = next(ticks)

        def elapsed_time(self, other: Event) -> float:
            return float(other.time - self.time)

        def query(self) -> bool:
            return False

    class Layer:
        def outer(self) -> None:
            self.inner()

        def inner(self) -> None:
            pass

    monkeypatch.setattr(bench.parts, "event", Event)
    named = tuple((Layer, name, lambda *_, name=name: name) for name in ("outer", "inner"))
    monkeypatch.setattr(bench.parts, "PARTS", named)
    layer = Layer()

    def run() -> None:
        layer.outer()
        layer.outer()

    rows, whole, ahead = bench.parts.measured(run, 3, 0.0)
    assert [(row.path, row.calls, row.total, row.each) for row in rows] == [
        (("outer",), 2, 6.0, 3.0),
        (("outer", "inner"), 2, 2.0, 1.0),
    ]
    assert whole == 9.0
    assert ahead


def test_the_floor_of_a_small_shape(bench: ModuleType) -> None:
    """Two layers of 64 features, two heads of 16 + 16 and 16; the first dense with 64, the second with experts of 32: a
    token takes 6 of 8, and 2 are shared."""
    from shapes import Tokens

    model = small_model(bench, 1)
    down, kv_up, out = (2 * 32 + 32 + 16) * 64, 2 * 32 * 32, 64 * 32
    dense, expert, router = 3 * 64 * 64, 3 * 64 * 32, 8 * 64
    head = 160 * 64
    pairs = 2 * (5 * 6 // 2)
    work = bench.target_work(model, Tokens.prefill(2, 5, experts=7.5))
    assert work["attention's input side"].bytes == 4 * 2 * (down + kv_up)
    assert work["attention's input side"].operations == 2 * 10 * 2 * (down + kv_up)
    assert work["attention"].bytes == 0
    assert work["attention"].operations == 2 * 2 * pairs * 2 * (32 + 16)
    assert work["output + dense"].bytes == 4 * (out + dense)
    assert work["output + dense"].operations == 2 * 10 * (out + dense)
    assert work["output + experts"].bytes == 4 * (out + router + 7.5 * expert + 2 * expert)
    assert work["output + experts"].operations == 2 * 2 * (out + router + 6 * expert + 2 * expert)  # the last layer's
    assert work["head"].bytes == 4 * head
    assert work["head"].operations == 2 * 2 * head
    # Decode rows read their context, and attend to latents.
    work = bench.target_work(model, Tokens.decode(3, 2, 100, experts=8))
    assert work["attention"].bytes == 4 * 2 * (kv_up + 3 * 100 * 48)
    assert work["attention"].operations == 2 * (2 * 6 * kv_up + 2 * 6 * 100 * 2 * (2 * 32 + 16))
    assert work["head"].operations == 2 * 6 * head
    # Both; the chunk's context is read, expanded, and attended to by each of its tokens.
    work = bench.target_work(model, Tokens.mixed(3, 2, 100, 5, 70, experts=8))
    assert work["attention's input side"].bytes == 4 * 2 * (down + kv_up)
    assert work["attention's input side"].operations == 2 * 2 * (11 * down + 5 * kv_up)
    assert work["attention"].bytes == 4 * 2 * (3 * 100 + 70) * 48
    pairs = 2 * 6 * 100 * 2 * (2 * 32 + 16) + 2 * (5 * 70 + 15) * 2 * (32 + 16)
    assert work["attention"].operations == 2 * (2 * (6 + 70) * kv_up + pairs)
    assert work["head"].operations == 2 * 7 * head
    assert bench.woken(model, 1) == pytest.approx(6)
    assert bench.woken(model, 2) == pytest.approx(8 * (1 - 0.25**2))


def test_the_time_of_a_floor(bench: ModuleType) -> None:
    assert bench.Work(8.4e9, 1.0).ms == pytest.approx(2)
    assert bench.Work(8.4e9, 2370e9).ms == pytest.approx(3)
    assert bench.Work(1, 2) + bench.Work(3, 4) == bench.Work(4, 6)


@torch.inference_mode()
def test_kernels_by_name(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = bench.decode(small_model(bench, 1), 20, 1, 100)
    bench.kernel_table(step)
    assert "torch's profiler saw nothing of the device" in capsys.readouterr().out

    def one(name: str, us: float, device: DeviceType = DeviceType.CUDA) -> SimpleNamespace:
        return SimpleNamespace(name=name, device_type=device, time_range=SimpleNamespace(elapsed_us=lambda: us))

    class Profile:
        def __init__(self, activities: list[ProfilerActivity]) -> None:
            assert activities == [ProfilerActivity.CUDA]

        def __enter__(self) -> Profile:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def events(self) -> list[SimpleNamespace]:
            return [one("norm", 2.0), one("gemm", 20.0), one("gemm", 10.0), one("aten::mm", 99.0, DeviceType.CPU)]

    monkeypatch.setattr(bench, "supported_activities", lambda: {ProfilerActivity.CUDA})
    monkeypatch.setattr(bench, "profile", Profile)
    bench.kernel_table(step, steps=2)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == [
        ["gemm", "1", "15.0", "93.8%", "15.0"],
        ["norm", "0.5", "1.0", "6.2%", "2.0"],
        ["all,", "one", "after", "the", "other", "1.5", "16.0"],
    ]


def test_arguments(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    everything = bench.arguments([])
    assert (everything.prefill, everything.decode) == ([(1, 1024), (8, 1024), (1, 8192)], [64, 256])
    given = bench.arguments(["--prefill", "1x100,2x8192", "--width", "2"])
    assert (given.prefill, given.decode, given.kernels) == ([(1, 100), (2, 8192)], None, False)
    for wrong, said in (
        (["--prefill", "3x8192"], "at most 16384 tokens per step"),
        (["--prefill", "1024"], "ROWSxTOKENS"),
        (["--decode", "8", "--width", "2"], "bench/decode_step.py"),
        (["--decode", "64", "--width", "0"], "--width must be positive"),
    ):
        with pytest.raises(SystemExit):
            bench.arguments(wrong)
        assert said in capsys.readouterr().err
