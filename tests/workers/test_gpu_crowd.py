"""A crowd of requests with mixed samplers on a GPU: the same tokens at every width in invariant mode."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import crowd, serve
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2)


def tokens(folder: Path, width: int, dtype: str, invariant: bool) -> list[list[int]]:
    config = EngineConfig(
        model=str(folder),
        device="cuda",
        width=width,
        dtype=dtype,
        invariant=invariant,
        max_rows=32,
        token_budget=300,
        cache_pages=200,
        max_context=200,
        selftest=False,
    )
    return serve(InlineEngine(config, torch.device("cuda")), crowd(240, VOCAB, seed=2))


@cache
def narrow(folder: Path, dtype: str) -> list[list[int]]:
    return tokens(folder, 1, dtype, invariant=True)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [1, 3, 7])
def test_a_crowd_gets_the_same_tokens_at_every_width(folder: Path, width: int, dtype: str) -> None:
    assert tokens(folder, width, dtype, invariant=True) == narrow(folder, dtype)


@pytest.mark.parametrize("width", [1, 3])
def test_a_crowd_is_served(folder: Path, width: int) -> None:
    tokens(folder, width, "bfloat16", invariant=False)
