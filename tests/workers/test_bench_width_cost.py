"""The benchmark of a row's width compares what is the same computation, and says so when it is not; what it times needs
a GPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.workers.bench_shapes import SMALL
from workers.memory.scratch import Scratch
from workers.models.execution_paths import ExecutionPaths

pytestmark = pytest.mark.soak

CPU = torch.device("cpu")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "bench"))
    import width_cost

    return width_cost


@pytest.fixture
def model(bench: ModuleType) -> Any:
    return bench.model_of(bench.V2_LITE | SMALL | {"num_hidden_layers": 3}, 1, torch.float32, CPU)


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("few", [False, True], ids=["many", "few"])
@torch.inference_mode()
def test_a_row_computes_what_rows_of_one_token_compute(
    width: int, few: bool, bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ExecutionPaths, "takes_small_batch", lambda *_: few)
    pair = bench.Pair(model, width, 128)
    before = pair.state.tensors.length_S.clone()
    both = pair.settle(lambda both: both.tipped + both.more)
    one, many = both.one, both.many
    assert (both.tipped, both.more, both.choices) == (0, 0, 2 * width)
    assert both.apart < 1e-5
    torch.testing.assert_close(one.logits_TV, many.logits_TV, atol=1e-5, rtol=1e-5)
    assert one.chosen_LTX.shape == (2, width, 8)
    assert torch.equal(one.chosen_LTX, many.chosen_LTX)
    assert torch.equal(one.chosen_LTX.sum(2), torch.full((2, width), 6))
    assert one.woken == int((one.chosen_LTX.sum(1) > 0).sum())
    # And what the tokens compute when each is fed behind the one before.
    step = pair.step(1, Scratch(CPU))
    step.slot_R.fill_(-1)
    for token in range(width):
        step.slot_R[0] = 1 + token
        logits_TV = step.run().logits_NV
        assert logits_TV is not None
        torch.testing.assert_close(logits_TV[0], one.logits_TV[token], atol=1e-5, rtol=1e-5)
    assert torch.equal(pair.state.tensors.length_S, before)


@torch.inference_mode()
def test_a_step_ends_with_its_decision(bench: ModuleType, model: Any) -> None:
    """Target tokens, accepted drafts, faults: drafts that the target would have sampled stand."""
    pair = bench.Pair(model, 3, 128)
    pair.draw(0)
    tensors = pair.state.tensors
    step = pair.step(3, Scratch(CPU))
    pair.fill(step)
    for accepted in (0, 1, 2):
        output = step.run()
        assert torch.equal(output.decided_N[:3], output.logits_NV.argmax(1))
        assert output.decided_N[3:].tolist() == [accepted, 0, 0, 0, 0]
        tensors.draft_SK[0, accepted : accepted + 1] = output.decided_N[accepted : accepted + 1]


@torch.inference_mode()
def test_what_is_printed(
    bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = [(2.10, 2.0), (2.0, 2.0), (2.04, 2.0)]
    monkeypatch.setattr(bench, "replayed", lambda pair: (timed, 1e-3))
    monkeypatch.setattr(bench, "MOST_DRAWS", 2)
    assert bench.compare(model, 2, 128)
    printed = capsys.readouterr().out
    assert "width 2 context 128: one row 2.040 ms, 2 rows 2.000 ms, ratio 1.020 (1.050, 1.000, 1.020)\n" in printed
    assert "; choices tipped 0 of 4\n" in printed
    assert ", replayed 1.0e-03\n" in printed
    assert "NOT" not in printed

    # Replays that computed something else.
    for apart in (float("nan"), 1.4):
        monkeypatch.setattr(bench, "replayed", lambda pair, apart=apart: (timed, apart))
        assert not bench.compare(model, 2, 128)
        assert capsys.readouterr().out.count("NOT THE SAME: logits, more than") == 1

    # Rows whose last token is another.
    draw = bench.Pair.draw

    def wrong(pair: Any, seed: int) -> None:
        draw(pair, seed)
        pair.state.tensors.last_S[2] ^= 1

    monkeypatch.setattr(bench.Pair, "draw", wrong)
    monkeypatch.setattr(bench, "replayed", lambda pair: (timed, 1e-3))
    assert not bench.compare(model, 2, 128)
    printed = capsys.readouterr().out
    assert "of 4 choices of experts in few layers, at best" in printed
    assert "NOT THE SAME: logits of few layers" in printed
    assert "NOT THE SAME: logits, more than" in printed


@torch.inference_mode()
def test_steps_are_replayed_in_turns(bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock is one that only a replay moves, by its step's width; a replay runs what it would have been captured
    from."""
    now = 0.0

    class Event:
        def record(self) -> None:
            self.time = now

        def elapsed_time(self, other: Event) -> float:
            return other.time - self.time

    class EagerStep:
        def __init__(self, step: Any) -> None:
            self.step = step
            step.slot_R.fill_(-1)
            self.output = step.run()
            assert self.output.decided_N[-1] == 0

        def replay(self) -> None:
            nonlocal now
            now += self.step.key.width
            self.output = self.step.run()

    monkeypatch.setattr(bench, "CapturedStep", EagerStep)
    monkeypatch.setattr(bench.parts, "event", Event)
    monkeypatch.setattr(bench.parts, "wait", lambda: None)
    monkeypatch.setattr(bench, "REPEATS", 2)
    pair = bench.Pair(model, 4, 128)
    pair.draw(0)
    medians, apart = bench.replayed(pair)
    assert medians == [(4.0, 1.0)] * 3
    assert apart < 1e-5


def test_differences_are_counted(bench: ModuleType) -> None:
    def computed(*experts: tuple[int, int]) -> Any:
        chosen_LTX = torch.zeros(1, len(experts), 8, dtype=torch.bool)
        for token, pair in enumerate(experts):
            chosen_LTX[0, token, list(pair)] = True
        return bench.Computed(torch.ones(len(experts), 4), chosen_LTX)

    one, same_bytes, more = computed((0, 1), (2, 3)), computed((0, 1), (2, 4)), computed((0, 1), (1, 3))
    assert (one.woken, same_bytes.woken, more.woken) == (4, 4, 3)
    both = bench.Both(one, same_bytes)
    assert (both.tipped, both.choices, both.more, both.apart) == (1, 2, 0, 0.0)
    assert (bench.Both(one, more).tipped, bench.Both(one, more).more, bench.Both(more, one).more) == (1, 1, 1)


@torch.inference_mode()
def test_tokens_are_drawn_until_nothing_is_wrong(
    bench: ModuleType, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = bench.Pair(model, 2, 128)

    def settled(*wrong: int) -> torch.Tensor:
        found = iter(wrong)
        pair.settle(lambda both: next(found))
        return pair.state.tensors.last_S.clone()

    def drawn(seed: int) -> torch.Tensor:
        pair.draw(seed)
        return pair.state.tensors.last_S

    assert torch.equal(settled(2, 1, 3, 0), drawn(3))
    monkeypatch.setattr(bench, "MOST_DRAWS", 3)
    assert torch.equal(settled(2, 1, 3), drawn(1))


def test_arguments(bench: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    everything = bench.arguments([])
    assert (everything.widths, everything.context) == ([2, 4], 1024)
    assert bench.arguments(["--widths", "16"]).widths == [16]
    for wrong, said in (
        (["--widths", "1"], "2 to 16"),
        (["--widths", "2,17"], "2 to 16"),
        (["--context", "1000"], "multiple of 64"),
        (["--context", "0"], "multiple of 64"),
    ):
        with pytest.raises(SystemExit):
            bench.arguments(wrong)
        assert said in capsys.readouterr().err
