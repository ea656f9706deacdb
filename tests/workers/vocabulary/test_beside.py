"""A vocabulary that is read in a process of its own is the one that is read here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from workers.config import EngineConfig
from workers.vocabulary.beside import text_of_tokens_beside
from workers.vocabulary.folder import text_of_tokens


@pytest.mark.long
def test_another_process_reads_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = EngineConfig(model="demo").folder
    here = text_of_tokens(folder)
    monkeypatch.delitem(sys.modules, "transformers")
    assert text_of_tokens_beside(folder) == here
    assert "transformers" not in sys.modules


@pytest.mark.long
def test_what_is_wrong_with_a_folder_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    assert text_of_tokens_beside(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"the tokenizer in .* cannot be read"):
        text_of_tokens_beside(tmp_path)
