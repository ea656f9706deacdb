"""An engine for tests of commands, and how they run one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from deploy.cli.app import app
from workers.config import EngineConfig
from workers.protocol.front import ModelInfo
from workers.protocol.messages import EngineStats, Request, RequestOutput


@dataclass
class Clock:
    """Time that passes only when told to."""

    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class FakeEngine:
    """Counts up from the last prompt id, `step` tokens an output; each output takes `step_s` after `prefill_s`."""

    clock: Clock = field(default_factory=Clock)
    step: int = 1
    prefill_s: float = 0.5
    step_s: float = 0.01
    vocab: int = 4096
    eos: tuple[int, ...] = ()
    drafts_a_step: int = 0
    fault: str | None = None
    requests: list[Request] = field(default_factory=list)
    offered: int = 0

    @property
    def info(self) -> ModelInfo:
        return ModelInfo("fake", 2048, self.vocab, self.eos, 1 + self.drafts_a_step, 0)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(drafts_offered=self.offered, drafts_accepted=self.offered // 2)

    async def generate(self, request: Request) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        begin, sampling = self.clock.now, request.sampling
        await asyncio.sleep(0)  # requests of one batch begin together
        done, token = 0, request.prompt[-1]
        while True:
            count = min(self.step if done else 1, sampling.max_tokens - done)
            tokens = tuple((token + i + 1) % self.vocab for i in range(count))
            stopped = next((i for i, t in enumerate(tokens) if t in sampling.stop_ids), None)
            tokens = tokens if stopped is None else tokens[: stopped + 1]
            steps = -(-done // self.step)
            self.clock.now = max(self.clock.now, begin + self.prefill_s + steps * self.step_s)
            self.offered += self.drafts_a_step if done else 0
            done, token = done + len(tokens), tokens[-1]
            finish = "stop" if stopped is not None else "length" if done == sampling.max_tokens else None
            yield RequestOutput(request.request_id, tokens, finish)
            if finish:
                return


@dataclass
class FakeReplica:
    """The processes of one engine, which speak to stdout as soon as they start."""

    config: EngineConfig
    begin: float = 0.0
    alive: bool = False

    def __enter__(self) -> FakeReplica:
        os.write(1, b"noise of a child\n")
        self.alive = True
        return self

    def __exit__(self, *_: object) -> None:
        self.alive = False


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    """Stands for every engine a command starts; `engine.configs` are the settings asked for, `engine.replicas` what was
    started beforehand."""
    fake = FakeEngine()
    fake.configs = []
    fake.replicas = []

    def replica_of(config):
        fake.replicas.append(FakeReplica(config))
        return fake.replicas[-1]

    @asynccontextmanager
    async def engine_of(config, quiet, replica=None):
        assert replica is None or (replica.config == config and replica.alive)
        fake.configs.append(config)
        print("noise")
        os.write(1, b"noise of a child\n")
        yield fake

    monkeypatch.setattr("workers.processes.launch.LocalReplica", replica_of)
    monkeypatch.setattr("deploy.cli.local.engine_of", engine_of)
    monkeypatch.setattr("deploy.cli.latency.time.perf_counter", fake.clock)
    return fake


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Runs `latentserve ARGS` in this process."""

    def run(*args: str) -> Ran:
        with pytest.raises(SystemExit) as left:
            app(list(args), prog_name="latentserve")
        out, err = capfd.readouterr()
        return Ran(left.value.code or 0, out, err)

    return run


@pytest.fixture
def model_folder(tmp_path):
    """A model folder without tokenizer and without weights."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)
