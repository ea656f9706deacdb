"""A replica whose folder has no chat template says at its start that chats are refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_tokenizer import TEMPLATE, backend

from deploy.config.application import ServeConfig
from deploy.serve import replica


class Stop(Exception):
    """All that matters here was said."""


class Client:
    """Stand-in for the engine's client, whose ranks still start."""

    serves = False

    def __init__(self, *_: Any) -> None:
        self.on_progress: list[Any] = []

    async def ready(self, timeout_s: float) -> None:
        raise Stop


async def start() -> list[str]:
    return []


@pytest.mark.parametrize(
    ("model_type", "template", "says"),
    [
        ("deepseek_v3", None, "has no chat template; name a file that holds one with --chat-template"),
        ("deepseek_v3", TEMPLATE, None),
        ("deepseek_v32", None, None),
        (None, None, "has no tokenizer"),
    ],
)
async def test_the_start_says_that_chats_are_refused(
    model_type: str | None,
    template: str | None,
    says: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    if model_type is not None:
        (tmp_path / "tokenizer.json").write_text(backend().to_str())
        (tmp_path / "tokenizer_config.json").write_text("{}")
    monkeypatch.setattr(replica, "EngineClient", Client)
    said: list[str] = []
    made: Any = SimpleNamespace(
        engine=None,
        config=ServeConfig.model_validate({"engine": {"model": str(tmp_path)}, "api": {"chat_template": template}}),
        status_store=SimpleNamespace(say=said.append),
        processes=SimpleNamespace(start=start, placements=[], run=lambda *_: None, asks_ahead=False, not_ahead=""),
    )
    made._start_processes = partial(replica.EngineReplica._start_processes, made)
    with pytest.raises(Stop):
        await replica.EngineReplica._bring_up(made)
    refused = [line for line in said if line.startswith("chats are refused")]
    assert refused == ([] if says is None else [f"chats are refused: {tmp_path} {says}"])
