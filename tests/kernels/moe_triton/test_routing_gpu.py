"""Routing on a GPU: eager, captured, and replayed on other logits."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from routing_case import MODELS, Routing

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("tokens", [1, 64, 5000])
@pytest.mark.parametrize("model", MODELS)
def test_eager(model: str, tokens: int, ties: bool) -> None:
    case = Routing(tokens, **MODELS[model], ties=ties, device="cuda")
    case.run()
    case.check()


@pytest.mark.parametrize("dependent", [False, True])
@pytest.mark.parametrize("parts", [0, 16])
@pytest.mark.parametrize("model", MODELS)
def test_replayed_on_other_logits(model: str, parts: int, dependent: bool) -> None:
    case, other = (Routing(40, **MODELS[model], shared=1, device="cuda", seed=seed, parts=parts) for seed in (0, 1))
    graph = capture(lambda: case.run(dependent))
    case.inputs = other.inputs
    check_replays(graph, case.refill, [case.tensors["id"], case.tensors["weight"]])
    case.check()
