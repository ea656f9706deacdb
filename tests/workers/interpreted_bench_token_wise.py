"""The benchmark of the kernels between large products, its kernels interpreted and its graphs run as they are captured.
Run with TRITON_INTERPRET=1, see test_bench_token_wise.py."""

from tests.support import gluon_interpreter, interpreter

interpreter.repair()
gluon_interpreter.install()

import sys  # noqa: E402
from collections.abc import Callable, Sequence  # noqa: E402
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from types import SimpleNamespace  # noqa: E402

import pytest  # noqa: E402
import torch  # noqa: E402
from bench_shapes import SMALL  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import token_wise as bench  # noqa: E402
from token_wise_calls import Call, Sizes, calls  # noqa: E402

CPU = torch.device("cpu")
SIZES = replace(Sizes.of(bench.V2_LITE | SMALL), streamed=256)


def named(name: str, tokens: int = 17, rows: int = 3, width: int = 4) -> Call:
    (call,) = (call for call in calls(SIZES, [tokens], [rows], [width], CPU) if call.name == name)
    return call


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Calls of every graph, each of which takes 3 us and runs once."""
    found: list[int] = []

    def captured(runs: Sequence[Callable[[], object]], count: int) -> int:
        for call in range(count):
            runs[call % len(runs)]()
        found.append(count)
        return count

    monkeypatch.setattr(bench, "timing", SimpleNamespace(captured=captured, milliseconds=lambda count, _: count * 3e-3))
    return found


@torch.inference_mode()
def test_every_kernel_is_right_at_every_size(
    graphs: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CALLS", 2)
    torch.manual_seed(0)
    chosen = [*calls(SIZES, [1, 3, 17], [1, 5], [1, 4], CPU)]
    assert bench.table(chosen, CPU, plain=False)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line[:26].strip() for line in lines] == [call.name for call in chosen]
    assert all(line.split()[-3:-1] == ["3.00", "-"] for line in lines)
    assert graphs == [2] * len(chosen)
    assert {call.name: {c.size for c in chosen if c.name == call.name} for call in chosen} == {
        "embedding (torch)": {"1", "3", "17"},
        "pending_norm.enter": {"1", "3"},
        "pending_norm.add": {"1", "3"},
        "rms_norm": {"1", "3", "17"},
        "add_rms_norm": {"1", "3", "17"},
        "add_rms_norm, 1 parts": {"17"},
        "rope_cache": {"1", "3", "17"},
        "rope_absorb": {"1", "3", "17"},
        "rope_absorb, 1 parts": {"17"},
        "merge_up": {"1", "3", "17"},
        "merge_attention": {"1", "3", "17"},
        "gather_context": {"1", "3", "17"},
        "silu_mul": {"1", "3", "17"},
        "few_experts.choose": {"1", "3"},
        "moe.route": {"1", "3"},
        "moe.route, 16 parts": {"17"},
        "moe.combine_norm": {"3", "17"},
        "add_to_streams": {"1", "3", "17"},
        "add_to_streams, add": {"1", "3", "17"},
        **{f"ordered_sum, {parts} parts": {"1", "3", "17"} for parts in (2, 4, 8)},
        "decode_state.feed": {"1 x 1", "5 x 1", "1 x 4", "5 x 4"},
        "decode_state.advance": {"1 x 1", "5 x 1", "1 x 4", "5 x 4"},
        "decode_state.feed_draft": {"1 x 4", "5 x 4"},
        "decode_state.accept_drafts": {"1 x 1", "5 x 1", "1 x 4", "5 x 4"},
    }


@pytest.mark.parametrize("name", ["add_rms_norm", "rope_cache", "decode_state.feed", "decode_state.accept_drafts"])
@torch.inference_mode()
def test_a_kernel_that_leaves_something_out_is_wrong(
    name: str, graphs: list[int], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "CALLS", 1)
    call = named(name)
    idle = replace(call, run=lambda tensors, dependent: None)
    assert not bench.table([idle, call], CPU, plain=False)
    wrong, right = capsys.readouterr().out.splitlines()[1:]
    assert wrong.endswith("WRONG")
    assert not right.endswith("WRONG")


@torch.inference_mode()
def test_what_is_not_a_number_is_wrong(graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "CALLS", 1)
    call = named("silu_mul")

    def run(tensors: dict[str, torch.Tensor], dependent: bool) -> None:
        call.run(tensors, dependent)
        tensors["out"][3, 5] = torch.nan

    assert bench.error_of(replace(call, run=run), False) == float("inf")


@torch.inference_mode()
def test_calls_from_memory_take_sets_of_tensors_in_turn(graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, seen = named("rms_norm"), list[int]()
    call = replace(plain, run=lambda tensors, dependent: seen.append(id(tensors)))
    x_and_out, weight = 2 * 17 * 64 * 2, 64 * 2
    assert call.footprint(call.make()) == call.bytes(call.make()) == x_and_out + weight
    monkeypatch.setattr(bench, "CALLS", 8)

    # Three sets are four times the cache, which one does not fit in half of.
    monkeypatch.setattr(bench, "L2_BYTES", (x_and_out + weight) * 3 / 4)
    assert bench.times(call, False) == (None, pytest.approx(3))
    assert graphs == [9]
    assert len({*seen[:3]}) == 3
    assert seen == seen[:3] * 3

    seen.clear()
    monkeypatch.setattr(bench, "L2_BYTES", 1e6)
    assert bench.times(call, False) == (pytest.approx(3), None)
    assert graphs == [9, 8]
    assert len({*seen}) == 1


@torch.inference_mode()
def test_bytes_that_must_move() -> None:
    def moved(name: str, **size: int) -> int:
        call = named(name, **size)
        return call.bytes(call.make())

    assert moved("add_rms_norm") == 4 * 17 * 64 * 2 + 64 * 2
    assert moved("silu_mul") == 3 * 17 * 64 * 2
    # Two heads of 16 roped features there and back, 48 of an entry in, twice out, a norm, angles and slots.
    assert moved("rope_cache") == 17 * (2 * 2 * 16 * 2 + 3 * 48 * 2 + 16 * 4 + 8) + 32 * 2
    # Tokens' queries and latents of two heads, W_UK, a norm, angles, a position and a slot in; queries and entries out.
    assert moved("rope_absorb") == 17 * (2 * (2 * 32 + 48) + 16 * 4 + 16 + 2 * (2 * 48 + 48)) + 2 * (2 * 16 * 32 + 32)
    # Two heads of 16 features, in fp32 as attention leaves pieces of context, with their sums; rounded at the end.
    assert moved("merge_attention") == 17 * 2 * (16 * (4 + 4 + 2) + 3 * 4)
    assert moved("ordered_sum, 4 parts") == 17 * 64 * (4 * 4 + 2)
    # Slot, length and four tokens in; tokens, positions, cache slots and a length out; the pages there and back.
    assert moved("decode_state.feed") == 3 * (8 * (1 + 4 + 3 * 4) + 4 + 2 * 256 * 4) + 4 * 8
