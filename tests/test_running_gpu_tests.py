"""The runner of the GPU tests: which files it finds, and which GPUs each sees. Its tests' tests need no GPU."""

from __future__ import annotations

import os
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path
from threading import Event, Thread
from types import ModuleType, SimpleNamespace

import pytest

# In pieces: this file is none that it should find.
ONE, SEVERAL, ALONE = "pytest.mark." + "gpu", "pytest.mark." + "gpus", "pytest.mark." + "alone"
ROOT = Path(__file__).parents[1]


@pytest.fixture
def runner() -> ModuleType:
    from tests import gpu_tests

    return gpu_tests


def write(folder: Path, name: str, markers: str, body: str) -> None:
    file = folder / "tests" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"import os, time\nfrom pathlib import Path\nimport pytest\n\n{markers}\ndef test():\n{body}")


def visible(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def test_files_side_by_side_have_a_gpu_each(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each of two waits for the other to have begun; one that needs several sees what the program sees."""
    say = f"    Path('{tmp_path}', '{{0}}').write_text(os.environ['CUDA_VISIBLE_DEVICES'])\n"
    wait = f"    while not Path('{tmp_path}', '{{0}}').exists(): time.sleep(0.01)\n"
    write(tmp_path, "test_a.py", f"@{ONE}", say.format("a") + wait.format("b"))
    write(tmp_path, "test_b.py", f"@{ONE}", say.format("b") + wait.format("a"))
    write(tmp_path, "test_c.py", f"@{ONE}\n@{SEVERAL}", say.format("c"))
    write(tmp_path, "test_d.py", "", "    raise AssertionError('needs no GPU')\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=1 << 37))
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "--jobs", "3", "--timeout", "60"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-12, 5")
    with pytest.raises(SystemExit) as exited:
        runner.main()
    *lines, last = capsys.readouterr().out.splitlines()
    assert not exited.value.code, lines
    assert sorted(line.split()[3] for line in lines) == ["tests/test_a.py", "tests/test_b.py", "tests/test_c.py"]
    assert last == "all passed on 2 GPUs: 3 passed, 0 failed, 0 skipped"
    assert {visible(tmp_path, "a"), visible(tmp_path, "b")} == {"GPU-12", "5"}
    assert visible(tmp_path, "c") == "GPU-12, 5"


def test_the_gpu_with_the_fewest_files_is_next(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write(tmp_path, "test_one.py", f"@{ONE}", "    pass\n")
    write(tmp_path, "test_several.py", f"@{ONE}\n@{SEVERAL}", "    pass\n")
    gpus = runner.Gpus(2, 3)

    def lent(name: str = "test_one.py") -> str | None:
        contexts.append(gpus.for_file(tmp_path / "tests" / name))
        environment = contexts[-1].__enter__()
        assert {**environment, "CUDA_VISIBLE_DEVICES": ""} == {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        return environment.get("CUDA_VISIBLE_DEVICES")

    contexts: list = []
    assert [lent() for _ in range(3)] == ["0", "1", "0"]
    assert lent("test_several.py") is None
    contexts[0].__exit__(None, None, None)
    contexts[2].__exit__(None, None, None)
    assert [lent() for _ in range(2)] == ["0", "0"]


def test_files_wait_for_each_others_memory(runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 2)
    size = {0: 139 << 30, 1: 79 << 30}
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=size[gpu]))
    assert [runner.files_at_once(workers) for workers in (1, 4, 100)] == [26, 6, 1]
    write(tmp_path, "test_one.py", f"@{ONE}", "    pass\n")
    write(tmp_path, "test_several.py", f"@{ONE}\n@{SEVERAL}", "    pass\n")
    gpus, ran = runner.Gpus(2, 1), list[str]()

    def run(name: str) -> None:
        with gpus.for_file(tmp_path / "tests" / name):
            ran.append(name)

    with gpus.for_file(tmp_path / "tests" / "test_one.py") as first:
        several = Thread(target=run, args=("test_several.py",), daemon=True)
        several.start()
        run("test_one.py")  # on the other GPU
        with gpus.for_file(tmp_path / "tests" / "test_one.py") as second:
            assert {first[runner.VISIBLE], second[runner.VISIBLE]} == set(gpus._files)
            third = Thread(target=run, args=("test_one.py",), daemon=True)
            third.start()
            third.join(0.05)
            assert ran == ["test_one.py"]
        third.join(60)
        several.join(0.05)
        assert ran == ["test_one.py"] * 2
    several.join(60)
    assert ran[2:] == ["test_several.py"]


def test_a_file_without_memory_runs_again_alone(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, and only for that: what fails then has failed, and so has what failed for another cause."""
    causes = {"test_a.py": ["OutOfMemoryError", ""], "test_b.py": ["AssertionError"], "test_c.py": ["OutOfMemoryError"]}
    for name in causes:
        write(tmp_path, name, f"@{ONE}", "    pass\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=1 << 37))
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "--jobs", "3"])
    began = list[str]()

    def run_in(environment: dict[str, str], path: Path, *_: object) -> tuple[str, str, float]:
        began.append(path.name)
        left = causes[path.name]
        cause = left.pop(0) if len(left) > 1 else left[0]
        return ("FAILED", f"1 failed\nE   {cause}", 0.0) if cause else ("ok", "1 passed", 0.0)

    monkeypatch.setattr(runner, "run_in", run_in)
    with pytest.raises(SystemExit) as exited:
        runner.main()
    assert exited.value.code
    assert sorted(began[:3]) == sorted(causes)
    assert sorted(began[3:]) == ["test_a.py", "test_c.py"]
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == "2 files failed on 1 GPU: 1 passed, 2 failed, 0 skipped"
    assert sum("found too little memory" in line for line in printed) == 2


def test_files_that_measure_run_when_all_others_have_ended(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, markers in {"test_a.py": f"@{ONE}\n@{ALONE}", "test_b.py": f"@{ONE}", "test_c.py": f"@{ONE}"}.items():
        write(tmp_path, name, markers, "    pass\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=1 << 37))
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "--jobs", "3", "--workers", "4"])
    began, running = list[tuple[str, int]](), Counter[str]()

    def run_in(environment: dict[str, str], path: Path, timeout_s: float, workers: int) -> tuple[str, str, float]:
        assert not running["test_a.py"]
        assert path.name != "test_a.py" or not running.total()
        running[path.name] += 1
        began.append((path.name, workers))
        time.sleep(0.2)
        running[path.name] -= 1
        return "ok", "1 passed", 0.0

    monkeypatch.setattr(runner, "run_in", run_in)
    with pytest.raises(SystemExit) as exited:
        runner.main()
    assert not exited.value.code
    assert sorted(began[:2]) == [("test_b.py", 4), ("test_c.py", 4)]
    assert began[2:] == [("test_a.py", 1)]


def test_files_that_wait_do_not_begin_after_an_interrupt(
    runner: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("test_a.py", "test_b.py"):
        write(tmp_path, name, f"@{ONE}", "    pass\n")
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setattr(runner.torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(runner.torch.cuda, "get_device_properties", lambda gpu: SimpleNamespace(total_memory=1))
    monkeypatch.setattr("sys.argv", ["gpu_tests.py", "--jobs", "2"])
    began, ended = list[Path](), Event()

    def run_in(environment: dict[str, str], path: Path, *_: object) -> tuple[str, str, float]:
        began.append(path)
        ended.wait(60)
        return "FAILED", "killed", 0.0

    def interrupted(running: dict[Future[object], str]) -> None:
        while not began or not all(file.running() for file in running):
            time.sleep(0.01)
        raise KeyboardInterrupt

    def closing(gpus: object) -> None:
        close(gpus)
        ended.set()  # as of a file that was killed

    close = runner.Gpus.close
    monkeypatch.setattr(runner.Gpus, "close", closing)
    monkeypatch.setattr(runner, "run_in", run_in)
    monkeypatch.setattr(runner, "as_completed", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.main()
    assert len(began) == 1


def test_the_files_here(runner: ModuleType) -> None:
    """Files that ask how many GPUs there are have the marker of several, and this file has none."""
    files = runner.gpu_test_files()
    assert Path(__file__) not in files
    assert len(files) > 10
    several = [path for path in files if runner.has_marker(path, "gpus")]
    assert several == [path for path in files if "device_count()" in path.read_text()]
    assert several
