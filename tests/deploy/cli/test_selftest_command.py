"""`latentserve selftest`: what it starts, prints and returns."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from deploy.mistakes import CommandFailure
from workers.protocol.report import BucketReport, SelfTestReport

GOOD = BucketReport("decode", "64 x 3", 0.5, drafts=2, rows=63, accepted=71, logits_error=3e-3)
BAD = BucketReport("decode", "1 x 1", 0.25, ("logits differ", "rank 1: [cache] of layer 3 differs"), drafts=0)


def report_of(*buckets: BucketReport, eager: str = "") -> SelfTestReport:
    graphs = 0 if eager else len(buckets)
    return SelfTestReport("NVIDIA H200", 2, eager, graphs, 100 << 20, 2.5, 1e9, 0.75, buckets)


@pytest.fixture
def found(monkeypatch):
    """Prepare the report that the engine's self-test gives and a failure that ends its start; keep the settings asked
    for."""

    @asynccontextmanager
    async def engine_of(config, quiet, on_selftest):
        found.configs = [config]
        os.write(1, b"noise of a child\n")
        if found.report is not None:
            on_selftest(found.report)
        if found.failure or (found.report is not None and not found.report.passed):
            raise CommandFailure(found.failure or "self-test failed")
        yield None

    monkeypatch.setattr("deploy.cli.local.engine_of", engine_of)
    monkeypatch.setenv("COLUMNS", "100")
    found = SimpleNamespace(report=report_of(GOOD), failure="", configs=[])
    return found


def test_a_table_and_exit_code_0(found, command):
    ran = command("selftest", "--model", "demo")
    assert ran.code == 0
    assert "self-test of demo, 2 ranks, NVIDIA H200" in ran.out
    (row,) = [line.split() for line in ran.out.splitlines() if "64 x 3" in line]
    assert row == ["decode", "64", "x", "3", "2", "63", "71", "3.0e-03", "0.500", "passed"]
    assert "1 graphs: 100 MiB, captured in 2.5 s" in ran.out
    assert ran.out.rstrip().endswith("1 of 1 graphs compute what eager computes (0.8 s)")
    assert "noise" not in ran.out


def test_a_failed_bucket_has_a_line_a_problem_and_exit_code_1(found, command):
    found.report = report_of(GOOD, BAD)
    ran = command("selftest", "--model", "demo")
    assert ran.code == 1
    (row,) = [line.split() for line in ran.out.splitlines() if "1 x 1 " in line]
    assert row == ["decode", "1", "x", "1", "0", "-", "-", "-", "0.250", "FAILED"]
    assert "decode 1 x 1, 0 drafts: logits differ\n" in ran.out
    assert "decode 1 x 1, 0 drafts: rank 1: [cache] of layer 3 differs\n" in ran.out


def test_a_device_without_graphs_is_named_plainly(found, command):
    found.report = report_of(GOOD, eager="no CUDA graphs on this device")
    ran = command("selftest", "--model", "demo")
    assert "no CUDA graphs on this device: 1 eager steps were checked, 1 passed" in ran.out
    assert "MiB" not in ran.out


@pytest.mark.parametrize("bucket", [GOOD, BAD])
def test_json_is_one_object(found, command, bucket):
    found.report = report_of(bucket)
    ran = command("selftest", "--model", "demo", "--json")
    assert ran.code == (0 if bucket is GOOD else 1)
    assert ran.json == json.loads(json.dumps({"model": "demo", **found.report.to_json()}))


def test_an_engine_that_fails_for_another_reason_is_no_pass(found, command):
    for report in (None, report_of(GOOD)):
        found.report, found.failure = report, "rank 0 died"
        ran = command("selftest", "--model", "demo")
        assert (ran.code, ran.out) == (1, "")
        assert "error: rank 0 died" in ran.err


def test_flags_replace_the_settings_file_and_every_bucket_is_asked_for(found, command, tmp_path, model_folder):
    file = tmp_path / "serve.yaml"
    file.write_text(f"engine: {{model: {model_folder}, width: 5, max_rows: 3, selftest: false}}\nport: 9000\n")
    flags = ["--width", "2", "--dtype", "float16", "--kv-cache-dtype", "fp8", "--activations", "bf16"]
    assert command("selftest", "--config", str(file), *flags).code == 0
    (config,) = found.configs
    assert (config.model, config.width, config.max_rows, config.dtype) == (model_folder, 2, 3, "float16")
    assert config.kv_cache_dtype == "fp8"
    assert config.activations == "bf16"
    assert (config.selftest, config.selftest_buckets) == (True, "all")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--model", "/nowhere"), "has no config.json"),
        (("--config", "/nowhere.yaml"), "cannot read"),
        (("--dtype", "int3"), "--dtype: Input should be 'auto'"),
        (("--max-rows", "1000", "--width", "3"), "token_budget"),
    ],
)
def test_mistakes_exit_2(found, command, args, said):
    ran = command("selftest", *args)
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err


@pytest.mark.long
def test_the_demo_model_passes_in_processes_of_its_own():
    ran = subprocess.run(
        [sys.executable, "-c", "from deploy.cli import main; main()", "selftest", "--max-rows", "2", "--json", "-q"],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    report = json.loads(ran.stdout)
    assert (ran.returncode, report["passed"], report["ranks"], len(report["buckets"])) == (0, True, 2, 14)
    assert report["eager"] == "no CUDA graphs on this device"
