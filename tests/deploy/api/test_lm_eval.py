"""lm-evaluation-harness itself scores a small task through /v1/completions of the demo model, without a network."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from demo_server import demo_engine, served

from workers.config import DEMO_MODEL

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed"),
    pytest.mark.long,
    pytest.mark.timeout(300),
]

TASK = """
task: next_words
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{right}}}}"
target_delimiter: ""
metric_list:
  - metric: acc
"""
QUESTIONS = [
    {"context": "import", "choices": [" os", " banana", " 7"], "right": 0},
    {"context": "def add(a, b):\n    return a +", "choices": [" import", " b", " class"], "right": 1},
    {"context": "def copy(self)", "choices": [" os", "import", ":"], "right": 2},
    {"context": "class Empty:\n", "choices": ["    pass", "return", ")"], "right": 0},
    {"context": "import", "choices": [" banana", " 7", " os"], "right": 0},  # taken for wrong
]


async def test_a_task_is_scored_by_the_harness(tmp_path: Path) -> None:
    questions, tasks, results = (tmp_path / name for name in ("questions.jsonl", "tasks", "results"))
    questions.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    tasks.mkdir()
    (tasks / "next_words.yaml").write_text(TASK.format(questions=questions))
    async with demo_engine(3) as engine, served(engine) as url:
        model = f"model=demo,base_url={url}/v1/completions,tokenizer={DEMO_MODEL},num_concurrent=4,max_retries=1"
        program = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model),
            *("--tasks", "next_words", "--include_path", str(tasks), "--output_path", str(results)),
            env={**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        said, _ = await program.communicate()
    assert program.returncode == 0, said.decode()[-3000:]
    (found,) = results.rglob("*.json")
    scored = json.loads(found.read_text())["results"]["next_words"]
    assert scored["acc,none"] == pytest.approx(4 / 5)
