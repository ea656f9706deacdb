"""Imports point downwards only: deploy -> workers -> kernels; and the scheduler's side stays free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {"kernels": {"kernels"}, "workers": {"workers", "kernels"}, "deploy": {"deploy", "workers", "kernels"}}
ROOMS = set(ALLOWED) | {"tests", "bench", "assets"}


def imported_rooms(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.split(".")[0])
    return names & ROOMS


@pytest.mark.parametrize("room", ALLOWED)
def test_imports_point_downwards(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    wrong = {str(f.relative_to(ROOT)): bad for f in files if (bad := imported_rooms(f.read_text()) - ALLOWED[room])}
    assert not wrong


def test_an_upward_import_is_seen() -> None:
    assert imported_rooms("def f():\n    from deploy.app import build\n    import os") == {"deploy"}


@pytest.mark.parametrize("module", ["plan", "messages", "scheduler", "scheduler_process"])
def test_the_scheduler_imports_no_torch_and_no_ray(module: str) -> None:
    code = f"import sys, workers.{module}; sys.exit(bool({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_kernels_package_is_light_and_versioned() -> None:
    # transformers probes for a package called `kernels` and reads its version.
    code = "import sys, kernels; assert kernels.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)


def test_a_foreign_kernels_distribution_would_be_noticed() -> None:
    import kernels

    assert Path(kernels.__file__).resolve().parent == ROOT / "kernels"
