"""Room on this machine's GPU after a start, beside what was said of it without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from planned_starts import STARTS

from workers.config import EngineConfig
from workers.fit.memory_plan import memory_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
START = """
import json, sys
import torch
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.rank.rank import Rank
pages = Rank(EngineConfig(**json.loads(sys.argv[1])), Group(), torch.device("cuda")).ready.pages
print(pages, torch.cuda.get_device_properties(0).total_memory)
"""


@pytest.mark.parametrize("name", STARTS)
def test_a_start_has_a_little_more_room_than_was_said(name: str, tmp_path: Path) -> None:
    """Whoever is told that a context fits must not be disappointed, nor be kept from much that would fit."""
    wanted = STARTS[name].write(tmp_path)
    command = [sys.executable, "-c", START, json.dumps(wanted)]
    # All that is asked of the GPU is asked by that process: a context of this one would take room there.
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    pages, total = map(int, done.stdout.split()[-2:])
    plan = memory_plan(EngineConfig(**wanted), total)
    assert plan.rows < 512  # else there is room for all, whatever is said
    assert plan.pages <= pages <= 1.03 * plan.pages, (pages, plan)
