"""What a start on this machine's GPU has room for, beside what was said of it without one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_checkpoints import FP8_NAMES, quantise
from tiny_models import write_tiny

from workers.config import EngineConfig
from workers.rank.memory_plan import memory_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 2048, "moe_intermediate_size": 512}
SIZES |= {"num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 65536}
SIZES |= {"num_hidden_layers": 8, "num_key_value_heads": 16, "qk_nope_head_dim": 128, "v_head_dim": 128}
INDEXER = {"q_lora_rank": 256, "index_n_heads": 16, "index_head_dim": 128, "index_topk": 2048}
START = """
import json, sys
import torch
from workers.config import EngineConfig
from workers.parallel.group import TensorParallel
from workers.rank.rank import Rank
pages = Rank(EngineConfig(**json.loads(sys.argv[1])), TensorParallel(), torch.device("cuda")).ready.pages
print(pages, torch.cuda.get_device_properties(0).total_memory)
"""


@pytest.mark.parametrize(
    ("kind", "form", "settings"),
    [
        ("v2", "", {"width": 1}),
        ("v3", "fp8", {"kv_cache_dtype": "fp8"}),
        ("v32", "fp8", {"kv_cache_dtype": "fp8", "width": 2}),
    ],
)
def test_a_start_has_a_little_more_room_than_was_said(
    kind: str, form: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Whoever is told that a context fits must not be disappointed, nor be kept from much that would fit."""
    write_tiny(tmp_path, kind, **SIZES, **(INDEXER if kind == "v32" else {}))
    if form:
        quantise(tmp_path, form, FP8_NAMES)
    wanted = {"model": str(tmp_path), "max_rows": 512, "token_budget": 2048, "selftest": False, **settings}
    command = [sys.executable, "-c", START, json.dumps(wanted)]
    # All that is asked of the GPU is asked by that process: a context of this one would take room there.
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    pages, total = map(int, done.stdout.split()[-2:])
    plan = memory_plan(EngineConfig(**wanted), total)
    assert plan.rows < 512  # else there is room for all, whatever is said
    assert plan.pages <= pages <= 1.03 * plan.pages, (pages, plan)
