"""`latentserve weights drop`, against weight keepers of real processes."""

from __future__ import annotations

import os
import tempfile

from workers.memory import keeper
from workers.memory.keeper import KeeperClient, WeightKeeper


def test_what_is_kept_on_this_machine_is_let_go(command, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(keeper, "_SHORT", str(tmp_path))
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
    assert list(tmp_path.iterdir()) == []
