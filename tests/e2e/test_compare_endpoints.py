"""`latentserve bench compare` of two applications that run side by side."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest
from served_application import ROOT, Server

pytestmark = [pytest.mark.cluster, pytest.mark.soak]

ROUNDS, REQUESTS, INPUT, OUTPUT = 3, 8, 32, 24


def config(name: str, width: int) -> dict:
    return {
        "engine": {"model": "demo", "width": width, "max_rows": 8, "token_budget": 256, "max_context": 512},
        "api": {"served_model_names": [name]},
        "name": name,
        "port": 0,
        "ingress": "direct",
    }


def test_two_demo_endpoints_are_compared(launch: Callable[..., Server]) -> None:
    plain, drafting = launch(config("plain", 1)), launch(config("drafting", 4))  # which start side by side
    plain.wait()
    drafting.wait()
    ran = subprocess.run(
        [
            *(sys.executable, "-c", "from deploy.cli import main; main()", "bench", "compare"),
            *(plain.url, drafting.url, "--requests", str(REQUESTS), "--concurrency", "2", "--rounds", str(ROUNDS)),
            *("--input", str(INPUT), "--output", str(OUTPUT), "--slo-ttft", "60000", "--json"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0
    said = json.loads(ran.stdout)
    for side, name, server in (("first", "plain", plain), ("second", "drafting", drafting)):
        found = said[side]
        assert (found["model"], found["url"], found["errors"]) == (name, server.url, {})
        assert (found["requests"], found["finished"]) == (ROUNDS * REQUESTS, ROUNDS * REQUESTS)
        assert found["prompt_tokens"] == ROUNDS * REQUESTS * INPUT
        assert found["generated_tokens"] == ROUNDS * REQUESTS * OUTPUT
        assert found["goodput"]["share"] == 1
    first, second, over = said["first"], said["second"], said["second_over_first"]
    assert second["tokens_per_event"] > first["tokens_per_event"] >= 1, "accepted drafts come with what follows them"
    for name in ("ttft", "itl", "tpot"):
        ratio = second[f"{name}_ms"]["mean"] / first[f"{name}_ms"]["mean"]
        assert over[f"{name}_mean_ms"] == pytest.approx(ratio, rel=0.01)
    assert over["output_tokens_per_s"] == pytest.approx(
        second["output_tokens_per_s"] / first["output_tokens_per_s"], 0.01
    )
