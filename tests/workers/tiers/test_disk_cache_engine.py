"""Sessions that return to a disk, in one process or the next: the same bits, and so the same tokens, as computed."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kernels.page import PAGE_TOKENS
from tests.tiny_models import write_tiny
from tests.workers import harness
from tests.workers.harness import InlineEngine
from tests.workers.tiers.test_disk_files import flip
from tests.workers.tiers.test_host_cache_engine import engine, sessions, tokens
from workers.config import EngineConfig
from workers.processes.scheduler_process import scheduler_config
from workers.protocol.plan import SamplingParams
from workers.scheduler import read_pace
from workers.scheduler.read_pace import ReadPace
from workers.tiers import disk_files
from workers.tiers.disk_files import HEADER_BYTES, DiskFiles, segment_name
from workers.tiers.mover import record_layout


def worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have short prompts read from disk, however fast this machine computes them."""
    monkeypatch.setattr(read_pace, "FIRST_S", 0.0)
    monkeypatch.setattr(ReadPace, "page_s", lambda self: 0.0)
    monkeypatch.setattr(harness, "scheduler_config", lambda *given: replace(scheduler_config(*given), disk_least=1))


@pytest.fixture(autouse=True)
def short_prompts_are_worth_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    worth_a_load(monkeypatch)


def tiered(folder: Path, disk: Path, record: int, pages: int = 8, **settings: Any) -> InlineEngine:
    """A device with room for one session, host memory for `pages`, and a disk for all."""
    sizes = {"host_cache_bytes": pages * record, "disk_cache_bytes": 200 * (record + HEADER_BYTES)}
    return engine(folder, cache_pages=11, disk_cache_dir=str(disk), **{**sizes, **settings})


def record_bytes(replica: InlineEngine) -> int:
    return record_layout(replica.replica.model.caches)[-1]


def ended(replica: InlineEngine) -> Any:
    """What it counted; its files are free."""
    stats = replica.scheduler.stats()
    assert replica.replica.disk is not None
    replica.replica.disk.close()
    return stats


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        pytest.param("v3", {"width": 3}, id="drafts"),
        pytest.param("v3", {"width": 1, "invariant": True}, id="invariant", marks=pytest.mark.long),
        pytest.param("v3", {"width": 2, "kv_cache_dtype": "fp8"}, id="fp8", marks=pytest.mark.long),
        pytest.param("glm5", {"width": 2}, id="sparse", marks=pytest.mark.long),
        pytest.param(
            "v32",
            {"width": 3, "kv_cache_dtype": "fp8", "invariant": True},
            id="sparse-fp8-invariant",
            marks=pytest.mark.long,
        ),
    ],
)
def test_pages_from_disk_are_as_good_as_those_of_the_device(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """A device with room for one session, host memory for little more and a disk for all; then another start of it;
    beside a device with room for all."""
    folder = write_tiny(tmp_path, kind, seed=3)
    roomy = engine(folder, cache_pages=200, **settings)
    expected = sessions(roomy)
    replica = tiered(folder, tmp_path / "disk", record_bytes(roomy), **settings)
    assert sessions(replica) == expected
    other, stats = roomy.scheduler.stats(), ended(replica)
    assert stats.disk_loaded_pages >= 16
    assert stats.disk_lost_pages == stats.host_lost_pages == 0
    assert stats.drafts_accepted == other.drafts_accepted, "the drafter's cache comes back, too"
    assert stats.cached_tokens == other.cached_tokens
    again = tiered(folder, tmp_path / "disk", record_bytes(roomy), **settings)
    again.scheduler.save_pages()
    told = sessions(again, turns=1)
    assert told == sessions(roomy, turns=1), "which has them on the device"
    assert [cached for _, _, cached in told] == [4 * PAGE_TOKENS] * 4, "this start computed none of them"
    assert ended(again).disk_loaded_pages == 16


def test_tokens_are_equal_wherever_their_pages_were(tmp_path: Path) -> None:
    """Computed, on the device, in host memory and on disk, in invariant mode; and a disk whose pages are others."""
    folder = write_tiny(tmp_path, "v3", seed=3)
    record = record_bytes(engine(folder, cache_pages=4, invariant=True, max_context=100, width=1))
    replica = tiered(folder, tmp_path / "disk", record, pages=16, invariant=True, width=1)

    def asked(name: str, prompt: list[int]) -> tuple[list[int], int]:
        replica.add(name, prompt, SamplingParams(6, temperature=1.0, seed=5))
        replica.run()
        return replica.finished[name].tokens, replica.finished[name].outputs[0].cached_tokens

    prompt = tokens(450, seed=1)
    computed = asked("computed", prompt)
    device = asked("device", prompt)
    asked("in between", tokens(300, seed=2))
    asked("more", tokens(200, seed=3))
    before = replica.scheduler.stats()
    host = asked("host", prompt)
    between = replica.scheduler.stats()
    assert between.host_loaded_pages > before.host_loaded_pages
    assert between.disk_loaded_pages == 0
    for seed in range(4, 8):
        asked(f"other {seed}", tokens(450, seed=seed))
    disk = asked("disk", prompt)
    assert replica.scheduler.stats().disk_loaded_pages == 7
    assert computed[0] == device[0] == host[0] == disk[0]
    assert [cached // PAGE_TOKENS for _, cached in (computed, device, host, disk)] == [0, 7, 7, 7]
    for seed in range(4, 8):
        asked(f"again {seed}", tokens(450, seed=seed))
    assert replica.replica.disk is not None
    file = replica.replica.disk.files.folder / segment_name(0)
    for slot in range(200):  # whichever it is in
        flip(file, slot * record + 100)
    assert asked("changed", prompt) == (computed[0], 0)
    assert ended(replica).disk_lost_pages >= 7


def test_a_page_that_comes_back_with_one_bit_changed_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: nothing is compared, and otherwise the tests above would compare what was computed anew."""
    folder = write_tiny(tmp_path, "v3", seed=3)
    roomy = engine(folder, cache_pages=200, width=1)
    expected = sessions(roomy, turns=2)
    honest = DiskFiles.read

    def read(self: DiskFiles, page: Any, record_B: Any) -> bool:
        honest(self, page, record_B)
        record_B[0:4096:7] ^= 0x10
        return True

    monkeypatch.setattr(DiskFiles, "read", read)
    replica = tiered(folder, tmp_path / "disk", record_bytes(roomy), width=1)
    assert sessions(replica, turns=2) != expected
    assert ended(replica).disk_loaded_pages > 0


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"invariant": True}, {"drafter": "none"}])
def test_another_root_never_hits(tmp_path: Path, change: dict[str, Any]) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    roomy = engine(folder, cache_pages=20, max_context=400)
    record = record_bytes(roomy)
    replica = tiered(folder, tmp_path / "disk", record)
    sessions(replica, turns=1)
    assert ended(replica).disk_pages >= 16
    other = tiered(folder, tmp_path / "disk", record, **change)
    other.scheduler.save_pages()
    assert [cached for _, _, cached in sessions(other, turns=1)] == [0] * 4
    assert other.scheduler.stats().disk_loaded_pages == 0
    ended(other)


def test_what_a_replica_tells_of_its_disk(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    lines: list[str] = []
    replica = tiered(folder, tmp_path / "disk", 1 << 16)
    ready, disk = replica.replica.ready, replica.replica.disk
    assert disk is not None
    lines.append(disk.files.summary())
    assert ready.disk_pages == 200 * ((1 << 16) + HEADER_BYTES) // (ready.record_bytes + HEADER_BYTES)
    assert replica.scheduler.stats().disk_pages_total == ready.disk_pages
    assert f"disk behind that: {ready.disk_pages:,} pages" in lines[0]
    config = scheduler_config(EngineConfig(model="demo"), replica.replica.ready)
    assert config.disk_writes_per_s == 0
    given = {"host_cache_bytes": 1, "disk_cache_dir": "/d", "disk_cache_bytes": 86400 * 10**7}
    settings = scheduler_config(EngineConfig(model="demo", **given), ready)
    assert settings.disk_writes_per_s * ready.record_bytes == pytest.approx(1e7)
    assert settings.disk_writes_saved_up * ready.record_bytes == pytest.approx(3.6e10)
    none = scheduler_config(EngineConfig(model="demo", disk_write_bytes_per_day=0, **given), ready)
    assert none.disk_writes_per_s == none.disk_writes_saved_up == 0
    disk.close()


def test_a_replica_whose_disk_has_failed_starts_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    replica = tiered(folder, tmp_path / "disk", 1 << 16)
    expected = sessions(replica, turns=1)
    ended(replica)

    def chmod(*args: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(disk_files.os, "chmod", chmod)
    again = tiered(folder, tmp_path / "disk", 1 << 16)
    assert again.replica.disk is None
    assert again.scheduler.stats().disk_pages_total == again.replica.ready.disk_pages == 0
    assert sessions(again, turns=1) == expected
    assert [record.message for record in caplog.records if "disk" in record.message] == [
        f"the disk of cached pages has failed, and is not used: {tmp_path / 'disk'}: Read-only file system"
    ]


def test_settings_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="host_cache_bytes is 0"):
        EngineConfig(model="demo", disk_cache_bytes=1 << 30, disk_cache_dir="/d")
    with pytest.raises(ValueError, match="give disk_cache_dir, too"):
        EngineConfig(model="demo", disk_cache_bytes=1 << 30, host_cache_bytes=1 << 30)
    with pytest.raises(ValueError, match="say how many bytes it may take"):
        EngineConfig(model="demo", disk_cache_dir="/d", host_cache_bytes=1 << 30)
