"""`latentserve weights drop`, against weight keepers of real processes."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from workers.memory import keeper
from workers.memory.keeper import KeeperClient, WeightKeeper


@pytest.fixture
def folder():
    """One whose path leaves room for a socket's name, as pytest's own may not."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        yield Path(name)


def test_what_is_kept_on_this_machine_is_let_go(command, folder, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(keeper, "_SHORT", str(folder))
    assert command("weights", "drop").out == "no weights of yours are kept on this machine\n"
    kept = [WeightKeeper(), WeightKeeper()]
    try:
        file = os.memfd_create("weights")
        for each in kept:
            KeeperClient(each.path()).keep("rank 0, model", {"fingerprint": "a", "size": 3 << 29}, [file])
        os.close(file)
        ran = command("weights", "drop")
        assert ran.code == 0
        assert ran.out == "let 3.00 GiB go: 2 times the weights of a rank or of its draft model\n"
        assert all(KeeperClient(each.path()).ask("rank 0, model", "a") is None for each in kept)
    finally:
        for each in kept:
            each.close()
    assert list(folder.iterdir()) == []
