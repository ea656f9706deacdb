"""bench/families.py proves, serves and asks a model of each family; here with tiny sizes, on a CPU."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.soak

TINY = ("--tiny", "--device", "cpu", "--max-rows", "2")


@pytest.fixture
def families(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import families

    return families


def run(families: ModuleType, *options: str) -> object:
    """Return the exit status of the program, or what it says when it fails."""
    with pytest.raises(SystemExit) as exit_:
        families.main(options)
    return exit_.value.code


def test_two_families_are_proven(families: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ("--only", "hy4-slice,axk1-slice", "--no-serve")
    assert run(families, *TINY, *only, "--out", str(tmp_path), "--patience", "2") == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["shape", "proven", "took"]
    assert [line.split()[0] for line in lines] == ["hy4-slice", "axk1-slice"]
    # Steps of 1 and 2 rows; of a model with an indexer also those that attend densely.
    assert [line.split()[1:4] for line in lines] == [["4", "of", "4"], ["2", "of", "2"]]
    assert all(line.endswith("ok") for line in lines)


def test_one_that_is_refused_ends_in_a_line_and_the_status(
    families: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families.TINY, "tie_word_embeddings", "no")
    only = ("--only", "youtu,axk2-slice", "--no-serve")
    assert run(families, *TINY, *only, "--out", str(tmp_path), "--patience", "2") == "1 of 2 failed"
    failed, other = capsys.readouterr().out.splitlines()[1:]
    assert "FAILED" in failed
    assert "see " in failed
    assert other.endswith("ok")
    assert "tie_word_embeddings" in (tmp_path / "youtu-selftest.txt").read_text()


def test_a_family_is_served_and_asked(families: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = ("--only", "sarvam-slice", "--no-selftest")
    assert run(families, *TINY, *only, "--out", str(tmp_path), "--patience", "2") == 0
    line = capsys.readouterr().out.splitlines()[-1].split()
    assert line[0] == "sarvam-slice"
    assert float(line[1]) > 0
    assert line[2:] == ["s", "ok"]
    printed = (tmp_path / "sarvam-slice-serve.txt").read_text()
    assert "chat: 32 tokens, 32 in the stream, which ended with length" in printed


def test_a_shape_that_nobody_knows_is_refused(families: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(families, "--only", "hy5-slice") == 2
    assert "no shape is called hy5-slice: v2-lite" in capsys.readouterr().err


def test_commands_are_listed(families: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    families.main(["--list", "--only", "hy4-slice"])
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert names == ["hy4-slice-selftest", "hy4-slice-serve", "hy4-slice-serve"]
