"""Imports of a rank while it starts and runs: torch's compiler alone would take it seconds, and is never used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tiny_models import write_tiny

CONSTRAINED = """
import sys
import torch
from harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.grammar import Grammar
from workers.protocol.plan import SamplingParams

settings = {"max_rows": 2, "token_budget": 64, "max_context": 128, "cache_pages": 9, "selftest": False}
engine = InlineEngine(EngineConfig(model="demo", **settings), torch.device("cpu"))
engine.replica.grammars.prepare()
engine.add("one", [3, 14, 15], SamplingParams(max_tokens=12, grammar=Grammar("choice", '["yes"]'), stop_ids=(1,)))
assert engine.run()["one"].finish == "stop", engine.finished
print([name for name in sys.argv[1:] if name in sys.modules])
"""

HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "transformers", "ray")
PROGRAM = """
import sys
from workers.rank.libraries import load_libraries
load_libraries()
import torch
from harness import InlineEngine
from kernels.runtime.repeat import Layers, _noting
from workers.config import EngineConfig
from workers.graphs.guard import capture_guard
from workers.protocol.plan import SamplingParams

device, model, *heavy = sys.argv[1:]
own = [[torch.zeros(8)], [torch.zeros(8)]]
with _noting(Layers(own)) as noted, capture_guard(torch.device("cpu")):
    own[0][0].add_(1)
assert len(noted) == 1
settings = {"max_rows": 2, "token_budget": 64, "max_context": 128, "cache_pages": 9}
engine = InlineEngine(EngineConfig(model=model, **settings), torch.device(device))
engine.add("one", [3, 14, 15], SamplingParams(max_tokens=4))
assert len(engine.run()["one"].tokens) == 4
engine.runner.close()
print([name for name in heavy if name in sys.modules])
"""


COLLECTIONS = """
import gc
collections = []
gc.callbacks.append(lambda phase, info: collections.append(phase))
from workers.rank.libraries import load_libraries
before = gc.get_freeze_count(), len(collections)
load_libraries()
import torch, workers.rank.worker_process
print(before[0], len(collections) - before[1], gc.isenabled(), gc.is_tracked(vars(torch)))
print(any(one is vars(torch) for one in gc.get_objects()))
cycle = [object()]
cycle.append(cycle)
del cycle
print(gc.collect())
"""


def run(program: str, *arguments: str) -> str:
    here = Path(__file__).parents[1]
    path = os.pathsep.join([str(here), str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.long
def test_a_rank_does_not_import_torchs_compiler() -> None:
    assert run(PROGRAM, "cpu", "demo", *HEAVY) == "[]"


@pytest.mark.long
def test_a_rank_does_not_either_where_rows_of_a_checkpoint_change_places(tmp_path: Path) -> None:
    """Rows of Hy4's indexers change places within a head, and are roped in other pairs."""
    assert run(PROGRAM, "cpu", str(write_tiny(tmp_path, "hyv4")), *HEAVY) == "[]"


@pytest.mark.long
def test_a_rank_with_grammars_does_not_either() -> None:
    """A rank with a GPU reads the vocabulary while it starts."""
    assert run(CONSTRAINED, *HEAVY) == "[]"


@pytest.mark.long
def test_what_a_rank_imports_is_not_searched_for_garbage_and_all_else_is() -> None:
    imports, searched, found = run(COLLECTIONS).splitlines()
    assert imports == "0 0 True True"
    assert searched == "False"
    assert int(found) >= 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_rank_with_graphs_does_not_either() -> None:
    assert run(PROGRAM, "cuda", "demo", *HEAVY) == "[]"
