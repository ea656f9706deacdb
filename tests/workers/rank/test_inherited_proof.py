"""A rank that is started again proves less, and only where everything is as it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from tests.tiny_models import write_tiny
from workers.config import EngineConfig
from workers.memory.keeper import KeeperClient, WeightKeeper
from workers.parallel.group import Group
from workers.proof.decode_steps import SelfTest
from workers.protocol.report import BucketReport, SelfTestReport
from workers.rank import inherited_proof
from workers.rank.rank import Rank


@pytest.fixture
def keeper() -> Iterator[WeightKeeper]:
    made = WeightKeeper()
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


class Starts:
    """Starts ranks, and notes which steps each of them proved."""

    def __init__(self, folder: Path, keeper: WeightKeeper, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.keeper = folder, keeper
        self.proven: list[str] = []
        self.told: list[str] = []
        self.fault = ""
        prove = SelfTest._bucket

        def noted(test: SelfTest, candidate: Any) -> BucketReport:
            report = prove(test, candidate)
            self.proven.append(str(report))
            return msgspec.structs.replace(report, problems=(self.fault,)) if self.fault else report

        monkeypatch.setattr(SelfTest, "_bucket", noted)

    def __call__(self, **settings: Any) -> SelfTestReport:
        """Start a rank; return its report."""
        self.proven.clear()
        self.told.clear()
        given = {"model": str(self.folder), "width": 3, "max_rows": 8, "token_budget": 96, "cache_pages": 200}
        config = EngineConfig(**{**given, "device": "cpu", "selftest_buckets": "all", **settings})
        heard: list[SelfTestReport] = []
        path = self.keeper.path()
        Rank(config, Group(), torch.device("cpu"), self.told.append, heard.append, keeper=path)
        return heard[0]


@pytest.fixture
def start(folder: Path, keeper: WeightKeeper, monkeypatch: pytest.MonkeyPatch) -> Starts:
    return Starts(folder, keeper, monkeypatch)


def names(report: SelfTestReport) -> list[str]:
    return [str(bucket) for bucket in report.buckets]


def test_the_first_and_the_last_step_are_proven_again_and_the_report_has_all(start: Starts) -> None:
    first = start()
    every = list(start.proven)
    assert names(first) == every
    assert len(every) > 4
    assert first.inherited == 0
    for _ in range(2):
        again = start()
        assert start.proven == [every[0], every[-1]]
        assert names(again) == every
        assert again.passed
        assert again.inherited == len(every) - 2
        assert again.summary().startswith("2 of 2 eager steps passed")
        assert f"{len(every) - 2} others did before the engine was started again" in again.summary()
        assert again.buckets[1] == first.buckets[1]
        assert again.buckets[0] != first.buckets[0]  # it took another time


@pytest.mark.parametrize(
    "settings",
    [
        {"max_context": 100},
        pytest.param({"max_rows": 7}, marks=pytest.mark.long),
        pytest.param({"invariant": True}, marks=pytest.mark.long),
    ],
)
def test_with_other_settings_all_are(start: Starts, settings: dict[str, Any]) -> None:
    start()
    assert start(**settings).inherited == 0
    assert len(start.proven) > 4


@pytest.mark.parametrize(("module", "name"), [(inherited_proof, "driver_version"), (inherited_proof, "_triton")])
def test_with_another_driver_or_compiler_all_are(
    start: Starts, module: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    monkeypatch.setattr(module, name, lambda: "1.2.3")
    assert start().inherited == 0


def test_with_other_files_all_are(keeper: WeightKeeper, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_tiny(tmp_path, "v3", seed=3)
    start = Starts(folder, keeper, monkeypatch)
    start()
    os.utime(folder / "model.safetensors")
    assert start().inherited == 0


def test_where_kept_weights_were_damaged_all_are(start: Starts, monkeypatch: pytest.MonkeyPatch) -> None:
    keep = KeeperClient.keep

    def damage(self: KeeperClient, slot: str, what: dict[str, Any], descriptors: Any) -> None:
        keep(self, slot, what | {"checksum": what["checksum"] ^ 1}, descriptors)

    with monkeypatch.context() as patch:
        patch.setattr(KeeperClient, "keep", damage)
        start()
    assert start().inherited == 0
    assert any("their checksum is not that of the loaded ones" in line for line in start.told)
    assert start().inherited > 0


def test_what_failed_is_not_inherited_and_takes_along_what_passed_before(start: Starts) -> None:
    start()
    start.fault = "logits differ"
    with pytest.raises(RuntimeError, match="self-test failed for 2 of 2 eager steps"):
        start()
    start.fault = ""
    assert start().inherited == 0
    assert start().inherited > 0


def test_without_a_keeper_that_answers_all_are(
    start: Starts, keeper: WeightKeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    start()
    path = keeper.path()
    keeper.close()
    monkeypatch.setattr(keeper, "path", lambda: path)
    assert start().inherited == 0
    assert any(line.startswith("every step is proven: ") for line in start.told)
