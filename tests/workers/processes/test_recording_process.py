"""The scheduler's process records what it plans."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import write_tiny
from workers.config import EngineConfig
from workers.processes.launch import local_engine
from workers.protocol.front import EngineFault
from workers.protocol.messages import Request
from workers.protocol.plan import SamplingParams
from workers.recording.file import read_recording
from workers.recording.replay import Replay, replay_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2)


def config(folder: Path, file: Path) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        selftest=False,
        max_rows=4,
        token_budget=40,
        cache_pages=20,
        record_plans=str(file),
        record_prompts=True,
    )


@pytest.mark.long
async def test_what_ranks_were_told_can_be_run_again(folder: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    async with local_engine(config(folder, tmp_path / "plans"), lines.append) as client:
        request = Request("one", tuple(range(50)), SamplingParams(12, temperature=0.0))
        tokens = [token async for output in client.generate(request) for token in output.tokens]
    assert f"scheduler: step plans are recorded in {tmp_path / 'plans'}" in lines
    recording = read_recording(tmp_path / "plans")
    gained = [token for step in recording.steps if step.result for row in step.result.tokens for token in row]
    assert gained[:12] == tokens
    assert set(Replay(replay_config(recording.header), recording).run()) == {None}


async def test_a_file_that_cannot_be_written_is_said_at_the_start(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineFault, match=r"record_plans: cannot write .*nowhere/plans: No such file") as caught:
        async with local_engine(config(folder, tmp_path / "nowhere" / "plans")):
            pass
    assert caught.value.lasting
