"""The device each rank takes."""

from __future__ import annotations

import pytest
import torch

from workers.config import EngineConfig
from workers.rank import rank as replica
from workers.rank.rank import Rank, passed_over, pick_device


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    config = EngineConfig(model="demo", tensor_parallel=3)
    assert [pick_device(config, index) for index in (None, 0, 1)] == [
        torch.device("cuda", index) for index in (0, 0, 1)
    ]
    with pytest.raises(RuntimeError, match=r"no GPU 2.*--tensor-parallel 2"):
        pick_device(config, 2)
    assert len(taken) == 3
    assert pick_device(EngineConfig(model="demo", device="cpu"), 2) == torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "wanted", "gpus", "said"),
    [("cpu", "auto", 2, True), ("cpu", "auto", 0, False), ("cpu", "cpu", 2, False), ("cuda", "auto", 2, False)],
)
def test_gpus_that_torch_cannot_use_are_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, device: str, wanted: str, gpus: int, said: bool
) -> None:
    monkeypatch.setattr(replica, "visible_gpus", lambda: gpus)
    note = passed_over(EngineConfig(model="demo", device=wanted), torch.device(device))
    assert ("shows 2" in note) == said == bool(note)


def test_a_gpu_that_others_fill_leaves_no_room_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000 << 20, 140000 << 20))
    with pytest.raises(RuntimeError, match=r"no room .*: -11\d{3} MiB left.*; 3000 of the GPU's 140000 MiB are free"):
        Rank._pages(EngineConfig(model="demo"), torch.device("cuda", 0), 1 << 20, 2048, 3, 0)
