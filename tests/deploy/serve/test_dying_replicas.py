"""Whole replicas under kills: the program that measures it finds nothing wrong."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "bench/dying_replicas.py"


@pytest.mark.soak
@pytest.mark.alone
def test_no_answer_is_lost_or_different() -> None:
    arguments = [sys.executable, PROGRAM, "--answers", "150", "--kills", "8"]
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout
    assert "0 lost, 0 different, 0 tokens twice" in done.stdout


@pytest.mark.long
def test_answers_that_nothing_disturbs_are_there() -> None:
    """What the program kills comes up, so that it is not found out only where replicas are killed for hours."""
    arguments = [sys.executable, PROGRAM, "--answers", "12", "--kills", "0", "--tokens", "4"]
    done = subprocess.run(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout


def test_a_run_that_was_broken_off_goes_on_with_the_parts_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = runpy.run_path(str(ROOT / PROGRAM))  # runs nothing: it is not `__main__` there
    main, found, file = program["main"], program["Found"], tmp_path / "found.json"
    ran: list[int] = []

    async def run(options: Any, seed: int) -> Any:
        if seed == 3 and 3 not in ran:
            ran.append(seed)
            raise KeyboardInterrupt
        ran.append(seed)
        wrong = Counter({"lost": 1}) if seed == 4 else Counter[str]()
        gaps = {"front": [0.5], "rank": [1.0 + seed], "scheduler": []}
        return found(10, wrong, Counter({"front": 2, "rank": 1}), gaps, [0.25])

    monkeypatch.setitem(main.__globals__, "run", run)
    given = program["arguments"]().parse_args(["--answers", "10", "--parts", "4", "--seed", "2", "--json", str(file)])
    with pytest.raises(KeyboardInterrupt):
        main(given)
    assert main(given) == 1
    assert ran == [2, 3, 3, 4, 5]
    printed = capsys.readouterr().out
    assert "40 answers, 12 kills (8 fronts, 4 ranks):\n1 lost, 0 different, 0 tokens twice\n" in printed
    assert "4 streams ran at a replica whose rank died: longest gap p50 5.00 s, p99 6.00 s, longest 6.00 s" in printed
    assert sorted(json.loads(file.read_text())["parts"]) == ["2", "3", "4", "5"]
    assert main(given) == 1
    assert len(ran) == 5
    given.answers = 11
    with pytest.raises(SystemExit, match="give the same, or another file"):
        main(given)
