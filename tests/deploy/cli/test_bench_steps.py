"""The benchmarks of many commands run such as there are, with options that they know; what they do needs GPUs."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from itertools import chain
from pathlib import Path

import pytest

pytestmark = pytest.mark.soak


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "bench"))
    import steps

    return steps


def test_every_option_is_known(bench, command) -> None:
    import families
    import one_gpu
    import several_gpus
    import shards

    said, said_by, folder = {}, {}, Path("/folder")
    lists = several_gpus.any_model_steps(4, "v2-lite", folder), several_gpus.whole_model_steps(8, "v3", folder)
    asked = families.options().parse_args(["--tensor-parallel", "2"])
    of_families = [step for shape in families.SHOWN for step in families.steps_of(shape, folder, asked)]
    of_shards = shards.http_steps(folder, 2, shards.options().parse_args([]))
    for step in chain(*lists, one_gpu.engine_steps(folder), of_families, of_shards):
        for words in (step.server, *step.commands):
            if words[:3] == bench.LATENTSERVE:
                path = words[3:5] if words[3] == "bench" else words[3:4]
                text = said.setdefault(path, command(*path, "--help").out)
                for option in filter(lambda word: word.startswith("--"), words):
                    assert option[:14] in text  # narrow tables cut the rest
            elif words:
                assert (bench.ROOT / words[1]).exists()
                text = said_by.setdefault(words[1], (bench.ROOT / words[1]).read_text())
                for option in filter(lambda word: word.startswith("--"), words):
                    # Of a switch with two settings the program names one.
                    assert f'"{option}"' in text or f'"--{option.removeprefix("--no-")}"' in text
    assert set(said) == {("selftest",), ("bench", "latency"), ("generate",), ("bench", "http"), ("serve",), ("fit",)}
    files = several_gpus._files().split(",")
    assert len(files) >= 3
    assert all((bench.ROOT / file).exists() for file in files)


def python(bench, text: str, **how: object):
    return bench.Step("one", ((sys.executable, "-c", text),), **how)


def test_a_step_that_fails_or_hangs_is_told_and_ended(bench, tmp_path: Path) -> None:
    assert bench.run_step(python(bench, "print('done')"), tmp_path)[0]
    assert "done" in (tmp_path / "one.txt").read_text()
    assert not bench.run_step(python(bench, "import sys; print('no'); sys.exit(3)"), tmp_path)[0]
    assert "exit status 3" in (tmp_path / "one.txt").read_text()
    begin = time.monotonic()
    hangs = bench.Step("one", (("sh", "-c", "echo so far >&2; exec sleep 600"),), limit_s=2.0)
    assert not bench.run_step(hangs, tmp_path)[0]
    assert time.monotonic() - begin < 300
    assert "so far" in (tmp_path / "one.txt").read_text()
    server = (sys.executable, "-c", "import sys; sys.exit(1)")
    assert not bench.run_step(python(bench, "", server=server), tmp_path)[0]
    assert "the server ended" in (tmp_path / "one.txt").read_text()


def given(out: Path) -> argparse.Namespace:
    return argparse.Namespace(out=out, patience=1.0)


@pytest.mark.parametrize(("other", "passed"), [("[1, 2]", True), ("[1, 3]", False), ("none", False)])
def test_tokens_have_to_be_equal(bench, tmp_path: Path, other: str, passed: bool) -> None:
    def step(name: str, tokens: str, **how: str):
        return bench.Step(name, ((sys.executable, "-c", f"print('{{\"token_ids\": {tokens}}}')"),), **how)

    with pytest.raises(SystemExit) as exit_:
        bench.run_steps([step("one", "[1, 2]"), step("two", other, tokens_of="one")], given(tmp_path))
    assert (exit_.value.code == 0) == passed


def test_steps_that_take_a_part_of_the_gpus_run_side_by_side(
    bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    (tmp_path / "met").mkdir()
    said = f"""
import os, pathlib, sys, time
print(time.monotonic())
met = pathlib.Path({str(tmp_path / "met")!r})
(met / sys.argv[1]).touch()
until = time.monotonic() + 120
while sys.argv[1] in "bc" and len(list(met.glob("[bc]"))) < 2:  # each of the two ends only if the other has begun
    assert time.monotonic() < until
    time.sleep(0.01)
print(time.monotonic(), os.environ["CUDA_VISIBLE_DEVICES"])
"""
    counts = {"a": 0, "b": 1, "c": 2, "d": 2, "e": 0, "f": 1}
    steps = [bench.Step(name, ((sys.executable, "-c", said, name),), gpus=count) for name, count in counts.items()]
    with pytest.raises(SystemExit) as exit_:
        bench.run_steps(steps, given(tmp_path))
    assert exit_.value.code == 0
    printed = {name: (tmp_path / f"{name}.txt").read_text().split() for name in counts}
    began, ended, seen = ({name: told[i] for name, told in printed.items()} for i in range(3))
    assert {name: len(gpus.split(",")) for name, gpus in seen.items()} == {n: c or 4 for n, c in counts.items()}

    def beside(one: str, other: str) -> bool:
        return max(float(began[one]), float(began[other])) < min(float(ended[one]), float(ended[other]))

    assert not set(seen["b"].split(",")) & set(seen["c"].split(","))
    assert not any(beside(whole, name) for whole in "ae" for name in counts if name != whole)
    assert float(began["d"]) > float(ended["b"]) or float(began["d"]) > float(ended["c"])


def test_an_interrupt_ends_what_runs(bench, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    hangs = f"import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    text = f"""
import argparse, pathlib, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # where tests run in the background it is ignored
sys.path.insert(0, {str(bench.ROOT / "bench")!r})
import steps
command = (sys.executable, "-c", {hangs!r})
all = [steps.Step("one", (command, command)), steps.Step("two", (command,))]
steps.run_steps(all, argparse.Namespace(out=pathlib.Path({str(tmp_path)!r}), patience=1.0))
"""
    program = subprocess.Popen([sys.executable, "-c", text], env={**os.environ, "CUDA_VISIBLE_DEVICES": "0"})
    until = time.monotonic() + 60
    while not (told.exists() and told.read_text()):
        assert time.monotonic() < until
        time.sleep(0.05)
    program.send_signal(signal.SIGINT)
    assert program.wait(60) != 0
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


def test_ranks_share_a_model_that_is_nowhere(bench, tmp_path: Path) -> None:
    """Processes that others start find its weights, and two ranks the same ones as one."""
    import generated
    from shapes import V3_SLICE

    sizes = {"vocab_size": 8192, "hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "q_lora_rank": 32, "kv_lora_rank": 32, "n_group": 1}
    sizes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 8, "topk_group": 1}
    generated.write_folder(V3_SLICE | sizes, generated.FP8_BLOCKS, tmp_path / "model", size=1 << 17)
    words = (*bench.LATENTSERVE, "generate", "--model", str(tmp_path / "model"), "--prompt-ids", "3,14,15")
    words += ("--max-tokens", "6", "--ignore-eos", "--temperature", "0", "--device", "cpu", "--invariant", "--json")
    for ranks in ("1", "2"):
        step = bench.Step(ranks, ((*words, "--tensor-parallel", ranks),), 240.0, generated=True)
        assert bench.run_step(step, tmp_path)[0], (tmp_path / f"{ranks}.txt").read_text()
        assert "of weights loaded" in (tmp_path / f"{ranks}.txt").read_text()
    assert bench.same_tokens(tmp_path, "1", "2")
    assert not list(tmp_path.rglob("*.safetensors"))
