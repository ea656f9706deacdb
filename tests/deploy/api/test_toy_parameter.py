"""A new sampling parameter is one row of a table and the function that computes it, here those of toy_parameter.py."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.sampling import gumbel_noise
from workers.protocol.request import sequence_seeds

ROOT = Path(__file__).parents[3]


def ran(*arguments: str, code: int = 0) -> str:
    """All that the program prints, on a wide terminal."""
    command = (sys.executable, "-m", "tests.deploy.api.toy_parameter", *arguments)
    environment = {**os.environ, "COLUMNS": "200"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr * bool(code)


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    return json.loads(ran("ask"))


def by_hand(asked: dict[str, Any], name: str, top_a: float, top_k: int = 0) -> list[int]:
    """Draw a token at every place by the rule, from the model's own probabilities and the noise of the request's
    seed."""
    drawn, seeds = [], torch.tensor(sequence_seeds(1234, tuple(asked["prompt"])))
    for index, place in enumerate(asked[name]["logprobs"]):
        chances = {int(token): math.exp(logprob) for token, logprob in place.items()}
        largest = max(chances.values())
        kept = [token for token, chance in chances.items() if chance >= top_a * largest**2]
        kept = sorted(kept, key=chances.__getitem__)[-top_k or None :]
        position = torch.tensor([len(asked["prompt"]) + index])
        [noise] = gumbel_noise(seeds, position, len(chances)).tolist()
        drawn.append(max(kept, key=lambda token: math.log(chances[token]) + noise[token]))
    return drawn


def test_tokens_are_drawn_from_what_the_parameter_keeps(asked: dict[str, Any]) -> None:
    assert asked["plain"]["ids"] == by_hand(asked, "plain", 0.0)
    assert asked["filtered"]["ids"] == by_hand(asked, "filtered", 1.0)
    assert asked["filtered"]["ids"] != by_hand(asked, "filtered", 0.0)  # the filter decided at least once
    assert asked["with_top_k"]["ids"] == by_hand(asked, "with_top_k", 0.5, 3)


def test_out_of_range_is_refused_with_the_range(asked: dict[str, Any]) -> None:
    error = asked["too_large"]["error"]
    assert (error["param"], error["code"]) == ("top_a", "invalid_value")
    assert error["message"] == "top_a: input should be less than or equal to 1"


def test_what_the_body_has_is_supported(asked: dict[str, Any]) -> None:
    assert len(asked["beside_unknown"]["choices"][0]["token_ids"]) == 24  # `unsupported.py` names it


def test_the_description_of_the_api_has_it(asked: dict[str, Any]) -> None:
    described = asked["of_chats"]["properties"]["top_a"]
    assert described["default"] == 0.0
    assert described["description"].startswith("Keep tokens at least as probable as this times")
    assert {"type": "number", "minimum": 0.0, "maximum": 1.0} in described["anyOf"]


def test_the_command_line_has_it() -> None:
    (line,) = (line for line in ran("generate", "--help").splitlines() if "--top-a" in line)
    assert re.search(r"\[0.0<=x<=1.0\] +Keep tokens at least as probable as", line)
    refused = ran("generate", "--prompt", "x", "--top-a", "2", code=2)
    assert "'--top-a': Input should be less than or equal to 1" in refused


def test_the_engine_refuses_what_it_does_not_take() -> None:
    code = (
        "from tests.deploy.api import toy_parameter; from workers.protocol.request import TABLE; "
        "print(TABLE[-1].out_of_range(1.5))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "top_a must be between 0 and 1, not 1.5\n"


def test_a_model_folder_can_say_what_holds_for_requests_that_leave_it_out(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_a": 0.25, "typical_p": 0.9}')
    code = (
        "import sys; from pathlib import Path; from tests.deploy.api import toy_parameter; "
        "from deploy.api.job.bodies import CompletionBody; "
        "from deploy.api.job.defaults import read_defaults; from deploy.api.job.job import with_defaults; "
        "defaults = read_defaults(Path(sys.argv[1])); bodies = [CompletionBody(model='x', prompt='y', **more) "
        "for more in ({}, {'top_a': 0.5})]; "
        "print(defaults, [with_defaults(body, defaults, 9).top_a for body in bodies])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "{'top_a': 0.25} [0.25, 0.5]\n"


def test_the_documentation_has_it() -> None:
    assert ran("page").splitlines()[-1] == (
        "| `top_a` | 0 | 0 ... 1 | yes | "
        "Keep tokens at least as probable as this times the largest probability squared. |"
    )
