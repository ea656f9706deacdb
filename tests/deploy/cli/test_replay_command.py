"""`latentserve replay`: what it runs, prints and refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kernels import __version__
from tests.tiny_models import write_tiny
from tests.workers.recorded_plans import VOCAB, recorded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("v3"), "v3", seed=3, num_hidden_layers=2, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = tmp_path_factory.mktemp("recorded") / "plans.bin"
    recorded(folder, name, record_prompts=True)
    return name


def test_nothing_differs(file, command):
    ran = command("replay", str(file))
    assert (ran.code, ran.err) == (0, "")
    steps = int(ran.out.split()[0])
    assert ran.out == f"{steps} steps: all as recorded\n"
    report = command("replay", str(file), "--json").json
    assert (report["steps"], report["recorded"], report["difference"]) == (steps, steps, "")


def test_a_file_without_prompts_says_that_only_failures_show(folder, tmp_path, command):
    recorded(folder, tmp_path / "plans")
    ran = command("replay", str(tmp_path / "plans"))
    assert ran.code == 0
    assert "random tokens stand for them" in ran.err
    assert "none failed" in ran.out
    assert command("replay", str(tmp_path / "plans"), "--quiet").err == ""


def test_the_first_difference_is_told_and_exit_code_1(file, folder, tmp_path, command):
    """Here of a model with the same settings and other weights."""
    other = write_tiny(tmp_path / "other", "v3", seed=4, num_hidden_layers=2, vocab_size=VOCAB)
    ran = command("replay", str(file), "--model", str(other))
    assert ran.code == 1
    assert ran.out.startswith("step ")
    assert "recorded" in ran.out
    assert "replayed" in ran.out


def test_a_model_that_was_moved_is_named(file, folder, tmp_path, command):
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    assert command("replay", str(file), "--model", str(moved)).code == 0


def test_a_step_that_fails_is_named(file, command, monkeypatch):
    from workers.rank.runner import Runner

    honest = Runner.execute

    def failing(self, plan):
        if plan.step == 3:
            raise RuntimeError("an illegal memory access")
        return honest(self, plan)

    monkeypatch.setattr(Runner, "execute", failing)
    ran = command("replay", str(file))
    assert ran.code == 1
    assert ran.out == "step 3 failed: RuntimeError: an illegal memory access\n"


def test_another_model_is_refused(file, command):
    ran = command("replay", str(file), "--model", "demo")
    assert ran.code == 2
    assert "another model than the recorded one" in ran.err
    assert "--model" in ran.err


def test_a_model_that_is_not_there_is_named(file, tmp_path, command):
    ran = command("replay", str(file), "--model", str(tmp_path / "gone"))
    assert ran.code == 2
    assert "--model says where" in ran.err


def test_another_version_is_refused_unless_it_is_asked_for(file, tmp_path, command):
    data = file.read_bytes()
    at = data.index(__version__.encode())
    other = tmp_path / "other"
    other.write_bytes(data[:at] + b"9" + data[at + 1 :])
    ran = command("replay", str(other))
    assert ran.code == 2
    assert f"recorded by latentserve 9{__version__[1:]}" in ran.err
    assert "--any-version" in ran.err
    assert command("replay", str(other), "--any-version").code == 0


def test_a_file_that_was_cut_off_is_replayed_as_far_as_it_goes(file, tmp_path, command):
    cut = tmp_path / "cut"
    cut.write_bytes(file.read_bytes()[:-3])
    ran = command("replay", str(cut))
    assert ran.code == 0
    assert "the file was cut off" in ran.err


@pytest.mark.parametrize("content", [None, b"", b"something else"])
def test_what_is_no_recording_is_refused(tmp_path, command, content):
    name = tmp_path / "plans"
    if content is not None:
        name.write_bytes(content)
    ran = command("replay", str(name))
    assert ran.code == 2
    assert str(name) in ran.err


def test_generate_and_serve_pass_the_flags_on(engine, command, tmp_path, model_folder):
    file = tmp_path / "plans"
    ran = command("generate", "--model", model_folder, "--prompt-ids", "3", "--record-plans", str(file))
    assert ran.code == 0, ran.err
    assert engine.configs[0].record_plans == str(file)
    assert not engine.configs[0].record_prompts
    wrong = command("generate", "--model", model_folder, "--prompt-ids", "3", "--record-prompts")
    assert wrong.code == 2
    assert "--record-plans" in wrong.err or "record_plans" in wrong.err
