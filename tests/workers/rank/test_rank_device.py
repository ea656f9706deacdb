"""The device each rank takes."""

from __future__ import annotations

import pytest
import torch

from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.rank import device as devices
from workers.rank.cache_size import check_standby, own_pages, words_of_standby
from workers.rank.device import passed_over, pick_device


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
    monkeypatch.setattr(devices, "visible_gpus", lambda: gpus)
    note = passed_over(EngineConfig(model="demo", device=wanted), torch.device(device))
    assert ("shows 2" in note) == said == bool(note)


def test_a_gpu_that_others_fill_leaves_no_room_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3000 << 20, 140000 << 20))
    with pytest.raises(RuntimeError, match=r"no room .*: -11\d{3} MiB left.*; 3000 of the GPU's 140000 MiB are free"):
        own_pages(EngineConfig(model="demo"), Group(), torch.device("cuda", 0), 1 << 20, 2048, 3, 0)


@pytest.mark.parametrize(
    ("cache_pages", "said"),
    [
        (None, "2.00 GiB of each GPU are left for an engine that stands by"),
        (40960, "cache_pages = 40960 leave the 2.00 GiB of this GPU that an engine that stands by takes"),
        (41984, "stands by takes 2.00 GiB of each GPU, and cache_pages = 41984 leave 1.00: give fewer"),
        (61440, "stands by takes 2.00 GiB of each GPU, and cache_pages = 61440 leave 0.00: give fewer"),
    ],
)
def test_a_start_says_whether_an_engine_that_stands_by_has_room(
    monkeypatch: pytest.MonkeyPatch, cache_pages: int | None, said: str
) -> None:
    """With a number of pages that somebody chose none is set aside: 45 GiB are free, of which graphs take 3."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (45 << 30, 80 << 30))
    config = EngineConfig(model="demo", cache_pages=cache_pages)
    assert said in words_of_standby(config, torch.device("cuda", 0), 2 << 30, 1 << 20, 3 << 30)


def test_a_second_engine_on_a_gpu_needs_graphs() -> None:
    cuda, eager = torch.device("cuda", 0), EngineConfig(model="demo", graphs=False)
    for role in ("primary", "standby"):
        with pytest.raises(RuntimeError, match=r"standby = hot needs graphs on a GPU.*: leave that out, or give"):
            check_standby(eager, role, cuda)
        check_standby(eager, role, torch.device("cpu"))
        check_standby(EngineConfig(model="demo"), role, cuda)
    check_standby(eager, "alone", cuda)
