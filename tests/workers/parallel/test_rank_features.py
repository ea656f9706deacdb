"""Quantized weights and caches, sparse attention, and masks with every drafter: two ranks give the bits of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rank_features import FEATURES, alone, demo, together

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


SOAKED = ("FP8 weights", "V3.2", "masks, no drafts")
"""Others show this, too: FP8 weights beside an FP8 cache, V3.2 beside an FP8 cache, masks beside drafters."""


def compare(name: str, root: Path, device: str, **settings: Any) -> None:
    outcomes, accepted = together(name, root, device, **settings)
    assert outcomes == alone(name, root, device)
    drafting = FEATURES[name].model is demo and FEATURES[name].settings["width"] > 1
    assert accepted > 0 or not drafting, "no draft was accepted, so none was tried beside masks"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.soak if n in SOAKED else pytest.mark.long) for n in FEATURES]
)
def test_two_ranks_give_the_bits_of_one(name: str, root: Path) -> None:
    compare(name, root, "cpu", tensor_parallel=2)


@cuda
@pytest.mark.gpu
@pytest.mark.gpus
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", FEATURES)
def test_several_gpus_give_the_bits_of_one(name: str, ranks: int, graphs: bool, root: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    compare(name, root, "cuda", tensor_parallel=ranks, graphs=graphs)
