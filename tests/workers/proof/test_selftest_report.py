"""The self-test of a whole replica: which steps it takes, what all ranks say together, how that reaches the front."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.rank_processes import run_ranks
from tests.tiny_models import write_tiny
from tests.workers.test_engine import engine
from workers.channel.ports import free_port
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh
from workers.processes.launch import local_engine
from workers.proof import decode_steps as selftest
from workers.proof.prove import prove
from workers.protocol.front import EngineFault
from workers.protocol.messages import FromWorker, ToFront
from workers.protocol.plan import DecodeBuckets
from workers.protocol.report import BucketReport, SelfTestReport


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose last norm is not a number."""
    path = write_tiny(tmp_path_factory.mktemp("broken"), "v3", seed=3)
    tensors = load_file(path / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def config(folder: Path, **settings: Any) -> EngineConfig:
    # Processes of a busy machine are silent at times.
    small = {"max_rows": 4, "cache_pages": 40, "heartbeat_timeout_s": 60.0}
    return EngineConfig(model=str(folder), device="cpu", **{**small, **settings})


def test_a_cpu_checks_a_few_eager_steps_and_says_which(folder: Path) -> None:
    report = engine(folder).replica.selftest
    assert report is not None
    assert report.passed
    assert [(b.bucket, b.drafts) for b in report.buckets] == [("8 x 3", 2), ("3 x 3", 2), ("1 x 3", 2)]
    assert report.left_out == len(list(DecodeBuckets(8, 3))) - 3 == 3
    assert report.summary().startswith(
        "no CUDA graphs on this device: 3 eager steps were checked, the smallest, a middle and the largest of 6 "
        "(8 x 3, 3 x 3, 1 x 3), 3 passed ("
    )


@pytest.mark.long
def test_all_buckets_when_told_so(folder: Path) -> None:
    report = engine(folder, selftest_buckets="all", width="auto").replica.selftest
    assert report is not None
    keys = list(DecodeBuckets(8, 4, adaptive=True))
    assert [(b.bucket, b.drafts) for b in report.buckets] == [(f"{k.rows} x {k.width}", k.drafts) for k in keys]
    assert report.summary().startswith("no CUDA graphs on this device: 42 eager steps were checked, 42 passed (")
    assert 0 < sum(bucket.seconds for bucket in report.buckets) <= report.seconds


def test_one_bucket_alone_and_a_test_that_is_switched_off(folder: Path) -> None:
    report = engine(folder, max_rows=1, width=1).replica.selftest
    assert report is not None
    assert (len(report.buckets), report.left_out) == (1, 0)
    assert engine(folder, selftest=False).replica.selftest is None


def test_a_replica_that_fails_does_not_come_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TOLERANCE", {torch.float32: 0.0})
    with pytest.raises(
        RuntimeError, match=r"failed for 3 of 3 eager steps, the first being decode 8 x 3, 2 drafts: log"
    ):
        engine(folder)


def test_progress_is_told_now_and_then(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = engine(folder, selftest=False, max_rows=2).runner.parts
    lines: list[str] = []
    monkeypatch.setattr(selftest, "PROGRESS_PERIOD_S", 0.0)
    prove(parts, None, every_bucket=True, progress=lines.append)
    assert lines == [f"self-test: {n} of 2" for n in range(1, 3)]


class TwoRanks:
    """A group whose other rank found these problems."""

    mesh = Mesh.of(0, 2)

    def __init__(self, *other: list[str]) -> None:
        self._other = msgspec.msgpack.encode(other)

    def gather_bytes(self, payload: bytes, device: torch.device) -> list[bytes]:
        return [payload, self._other]

    def broadcast(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_what_any_rank_found_is_reported(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = engine(folder, selftest=False, width=1, max_rows=3).runner.parts
    honest = selftest.SelfTest.run

    def run(self: Any, *args: Any) -> list[BucketReport]:
        first, *others = honest(self, *args)
        return [msgspec.structs.replace(first, problems=("a", "b")), *others]

    monkeypatch.setattr(selftest.SelfTest, "run", run)
    object.__setattr__(parts, "group", TwoRanks(["b", "c"], ["d"], []))
    report = prove(parts, None)
    assert [bucket.problems for bucket in report.buckets] == [("rank 0: a", "b", "rank 1: c"), ("rank 1: d",), ()]
    assert not report.passed
    assert report.cause().startswith("self-test failed for 2 of 3 eager steps, the first being decode 3 x 1, 0 drafts")


def test_a_report_survives_the_wire_and_is_json() -> None:
    buckets = (
        BucketReport("decode", "4 x 3", 0.5, drafts=2, rows=3, accepted=1, logits_error=1e-6),
        BucketReport("decode", "1 x 1", 0.5, ("logits differ",), logits_error=float("inf")),
    )
    report = SelfTestReport("cpu", 2, "", 2, 1 << 20, 1.5, 1e9, 1.0, buckets)
    for union in (FromWorker, ToFront):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=union) == report
    told = report.to_json()
    assert json.loads(json.dumps(told, allow_nan=False)) == json.loads(json.dumps(told))
    assert (told["passed"], told["summary"]) == (False, "1 of 2 graphs compute what eager computes (1.0 s)")
    assert [(b["passed"], b["bucket"], b["logits_error"]) for b in told["buckets"]] == [
        (True, "4 x 3", 1e-6),
        (False, "1 x 1", None),
    ]


async def test_two_ranks_send_one_report(folder: Path) -> None:
    heard: list[SelfTestReport] = []
    lines: list[str] = []
    async with local_engine(config(folder, tensor_parallel=2), lines.append, on_selftest=heard.append) as client:
        assert [client.selftest] == heard
        [report] = heard
        assert (report.ranks, report.device, report.passed, len(report.buckets)) == (2, "cpu", True, 3)
    told = [line.partition(" s] ")[2] for line in lines if "] self-test" in line]
    # On a slow machine it says before how far it has come.
    ended = [line for line in told if not re.fullmatch(r"self-test: \d+ of \d+", line)]
    assert ended == [f"self-test: {report.summary()}"]


async def test_a_broken_model_is_reported_before_the_fault(broken: Path) -> None:
    heard: list[SelfTestReport] = []
    with pytest.raises(EngineFault, match=r"self-test failed for 3 of 3 eager steps.*logits or ids were out of range"):
        async with local_engine(config(broken, tensor_parallel=2), on_selftest=heard.append):
            pass
    [report] = heard
    assert len(report.failed) == 3


def _gather(rank: int, port: int, folder: str) -> None:
    group = Group.connect(Mesh.of(rank, 2), f"tcp://127.0.0.1:{port}", torch.device("cpu"), 60.0)
    payloads = group.gather_bytes(b"x" * 7 * rank, torch.device("cpu"))
    assert payloads == [b"", b"x" * 7]
    (Path(folder) / str(rank)).touch()
    group.close()


@pytest.mark.long
def test_bytes_of_any_length_are_gathered(tmp_path: Path) -> None:
    run_ranks(_gather, 2, free_port(), str(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {"0", "1"}
    assert Group().gather_bytes(b"alone", torch.device("cpu")) == [b"alone"]
