"""The benchmark of `--width auto`: drafts that are made to stand, and what it says of what it finds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import ModuleType

import agreement_case as case
import pytest
import torch

from tests.support.interpreter import interpreted_pytest

pytestmark = pytest.mark.soak

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import adaptive_width

    return adaptive_width


def test_drafts_are_accepted_as_often_as_is_said(bench: ModuleType) -> None:
    torch.manual_seed(0)
    agreement = bench.synthetic_acceptance.Agreement(case.nowhere())
    case.check(agreement, agreement.reference)


def test_drafts_are_random(bench: ModuleType) -> None:
    agreement = bench.synthetic_acceptance.Agreement(case.nowhere())
    case.check_drafts(agreement, agreement.reference_redraw)


def test_whatever_a_drafter_makes_is_replaced(bench: ModuleType, tmp_path: Path) -> None:
    """Drafts are replaced in a running process, by what the file says, and in the slots of rows that were drafted
    for."""
    synthetic, file = bench.synthetic_acceptance, tmp_path / "acceptance"
    tensors = Namespace(length_S=torch.arange(4), draft_SK=torch.zeros(4, 3, dtype=torch.int64))
    parts = Namespace(state=Namespace(tensors=tensors), model=Namespace(config=Namespace(vocab_size=case.VOCAB)))

    def plain(parts: Namespace, hidden: None, slot_R: torch.Tensor, *rest: object) -> None:
        parts.state.tensors.draft_SK[slot_R] = -5

    draft = synthetic.Agreement(file).behind(plain)
    for probability, replaced in ((0.3, True), (synthetic.OFF, False), (0.0, True)):
        synthetic.write(file, probability)
        deadline = time.monotonic() + 60
        while bool((tensors.draft_SK[2, :2] >= 0).all()) != replaced:
            assert time.monotonic() < deadline
            draft(parts, None, torch.tensor([2]), None, None, None, 2, None, None)
            assert tensors.draft_SK[2, 2] == -5
            time.sleep(0.01)
    assert (tensors.draft_SK[[0, 1, 3]] == 0).all()
    draft(parts, None, torch.tensor([2]), None, None, None, 0, None, None)
    assert (tensors.draft_SK[2] == -5).all()


def test_the_kernels_in_the_interpreter() -> None:
    interpreted_pytest([Path(__file__).with_name("interpreted_bench_acceptance.py")])


def test_steps_follow_the_file(bench: ModuleType, tmp_path: Path) -> None:
    """A draft stands where the target agrees with it, from the first position on, in a running process."""
    synthetic, file = bench.synthetic_acceptance, tmp_path / "acceptance"
    counts: list[int] = []

    def plain(target_DW: torch.Tensor, draft_DX: torch.Tensor, *_: object) -> None:
        counts.append(int((target_DW[:, :-1] == draft_DX).sum()))

    accept = synthetic.Agreement(file).before(plain)
    for probability, accepted in ((1.0, 3), (0.0, 0), (1.0, 3)):
        synthetic.write(file, probability)
        deadline = time.monotonic() + 60
        while not counts or counts[-1] != accepted:
            assert time.monotonic() < deadline, counts
            accept(torch.tensor([[1, 2, 3, 4]]), torch.tensor([[7, 2, 9]]), torch.zeros(1), case.VOCAB, None, None)
            time.sleep(0.01)


def test_only_processes_that_are_told_change_what_is_accepted(bench: ModuleType) -> None:
    code = (
        "from workers.step import decode, mixed, parts; "
        "print(mixed.accept_drafts.__name__, decode.accept_drafts.__name__, parts.StepParts.draft.__qualname__)"
    )
    with bench.acceptance_file() as file:
        told = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"] + os.pathsep + str(ROOT)}
        assert file.read_bytes()
    untold = {name: value for name, value in told.items() if name != bench.VARIABLE}
    assert bench.VARIABLE not in os.environ
    said = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True).stdout.split()
        for env in (told, untold)
    ]
    drafts = ["Agreement.behind.<locals>.draft", "StepParts.draft"]
    assert said == [["accept", "accept", drafts[0]], ["accept_drafts", "accept_drafts", drafts[1]]]


def found(bench: ModuleType, auto: float, accepted: int = 600) -> dict[object, object]:
    def point(speed: float, offered: int = 0, accepted: int = 0) -> object:
        return bench.Point(speed, offered, accepted, Counter({2: 3, 1: 1}))

    return {
        1: {(4, None): point(100.0), (2, bench.YIELD): point(200.0)},
        2: {(4, 0.6): point(130.0, 1000, accepted), (1, bench.YIELD): point(150.0)},
        3: {(4, 0.6): point(120.0, 2000, 960)},
        4: {(4, 0.6): point(110.0, 3000, 1176)},
        "auto": {(4, 0.6): point(auto, 1000, 600)},
    }


@pytest.mark.parametrize(
    ("auto", "accepted", "status", "said"),
    [
        (127.0, 600, 0, ""),
        (126.0, 600, 1, "auto reaches 0.969 of the best"),
        (130.0, 700, 1, "700 of 1000 drafts accepted"),
    ],
)
def test_the_verdict(
    bench: ModuleType, auto: float, accepted: int, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = Namespace(batch=[4], acceptance=[0.6], bound=0.97, json=None)
    assert bench.verdict(found(bench, auto, accepted), given) == status
    printed = capsys.readouterr().out
    assert said in printed
    assert "1: 25%, 2: 75%" in printed
    assert "6.667 ms a token; two rows without drafts: 10.000 ms a step; 1.20 of its 1.8th" in printed
