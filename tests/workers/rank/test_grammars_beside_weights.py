"""A rank on a GPU reads the vocabulary for grammars while it loads its weights."""

from __future__ import annotations

from typing import Any, Never

import pytest
import torch

from workers.config import EngineConfig
from workers.grammar.compiler import Compiler
from workers.parallel.group import Group
from workers.rank import rank
from workers.rank.rank import Rank


class Loads(Exception):
    pass


@pytest.mark.parametrize(("device", "prepared"), [("cuda", 1), ("cpu", 0)])
def test_the_vocabulary_is_read_beside_the_weights(device: str, prepared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Compiler] = []

    def load(*_: Any, **__: Any) -> Never:
        raise Loads(len(begun))

    monkeypatch.setattr(Compiler, "prepare", lambda compiler: begun.append(compiler))
    monkeypatch.setattr(rank, "load_model", load)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    with pytest.raises(Loads) as loading:
        Rank(EngineConfig(model="demo"), Group(), torch.device(device))
    assert loading.value.args == (prepared,)
