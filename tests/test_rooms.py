"""Imports point one way: from each package, and each room of it, to those below. The scheduler needs no torch."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

PACKAGES = ("kernels", "workers", "deploy")
"""Packages from the ground up."""

ROOMS = {
    "workers": (
        ("unimported",),
        ("environment", "memory", "parallel", "vocabulary"),
        ("weights",),
        ("model_folder",),
        ("config", "quantization"),
        ("protocol",),
        ("channel", "cache", "grammar", "scheduler"),
        ("models", "tiers"),
        ("drafters", "step"),
        ("families",),
        ("graphs",),
        ("fit", "proof"),
        ("rank",),
        ("recording",),
        ("processes",),
    ),
    "deploy": (
        ("mistakes", "text", "page"),
        ("parsing",),
        ("config",),
        ("cluster", "loadtest"),
        ("routing",),
        ("observability",),
        ("api",),
        ("serve",),
        ("cli",),
    ),
    "deploy.api": (
        ("http",),
        ("limits",),
        ("job",),
        ("generation",),
        ("openai", "anthropic", "responses", "status"),
        ("app",),
    ),
}
"""Floors from the ground up, of a package or of a room in one; a room knows those on lower floors, none beside it."""

NEVER_BELOW = {"workers.scheduler": {"workers.protocol", "workers.scheduler"}}
"""Rooms that know less than their floor would let them."""


def modules() -> dict[str, Path]:
    """Every module of the installed packages by its dotted name."""
    found = {}
    for package in PACKAGES:
        for file in sorted((ROOT / package).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


MODULES = modules()


def imports(source: str, known: dict[str, Path] = MODULES) -> Iterator[str]:
    """The modules, of those known and of the folders beside the packages, that a file imports, for its types, too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            own = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in known else node.module for name in own]
        else:
            continue
        for name in names:
            if name in known or name.split(".")[0] in {"tests", "bench", "assets"}:
                yield name


def room_of(module: str, package: str) -> str:
    """The room of a package that a module lies in; empty where it lies in none."""
    return module[len(package) + 1 :].split(".")[0] if module.startswith(f"{package}.") else ""


def wrong(module: str, imported: str) -> bool:
    """Whether this arrow points upwards, or to a room beside."""
    package, target = module.split(".")[0], imported.split(".")[0]
    if target not in PACKAGES or PACKAGES.index(target) > PACKAGES.index(package):
        return True
    room, other = (f"{package}.{room_of(name, package)}" for name in (module, imported))
    if room in NEVER_BELOW and target == package and other not in NEVER_BELOW[room]:
        return True
    for parent, storeys in ROOMS.items():
        floors = {name: floor for floor, names in enumerate(storeys) for name in names}
        here, there = room_of(module, parent), room_of(imported, parent)
        if here and there and here != there and floors[there] >= floors[here]:
            return True
    return False


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downwards(package: str) -> None:
    own = {name: file for name, file in MODULES.items() if name.split(".")[0] == package}
    assert own
    assert not [(name, to) for name, file in own.items() for to in imports(file.read_text()) if wrong(name, to)]


@pytest.mark.parametrize("package", ROOMS)
def test_every_room_has_a_floor(package: str) -> None:
    there = {room_of(name, package) for name in MODULES} - {""}
    assert there == {room for rooms in ROOMS[package] for room in rooms}


def test_names_that_are_imported_are_there() -> None:
    """Names are looked for also in the programs under bench and in what only a GPU runs, which no type checker
    reads."""
    missing = []
    for file in (*(ROOT / "bench").rglob("*.py"), *(ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in PACKAGES:
                module = importlib.import_module(node.module or "")
                names = (alias.name for alias in node.names if f"{node.module}.{alias.name}" not in MODULES)
                missing += [(file.name, node.module, name) for name in names if not hasattr(module, name)]
    assert not missing


def test_no_file_imports_itself_in_a_circle() -> None:
    graph = {name: set(imports(file.read_text())) - {name} for name, file in MODULES.items()}
    # Importing a module runs its packages' __init__ first; one that names its own files again is no circle.
    for name, targets in graph.items():
        graph[name] = {to for to in targets if not name.startswith(f"{to}.") and not to.startswith(f"{name}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' -> '.join(reversed(error.args[1]))}")


@pytest.mark.parametrize(
    ("module", "source", "seen"),
    [
        ("workers.config", "def f():\n    from deploy.serve.app import build\n    import os", True),
        ("workers.memory.scratch", "from workers.step.parts import StepParts", True),
        ("workers.scheduler.rows", "from workers.memory.scratch import Scratch", True),
        ("workers.weights.source", "from workers.channel import sockets", True),
        ("kernels.page", "import tests.support.hopper", True),
        ("workers.step.parts", "from workers.models.batch import Batch", False),
        ("workers.step.parts", "from workers.step import sampling", False),
        ("deploy.routing.router", "from deploy.api.http.errors import ApiError", True),
        ("deploy.api.job.job", "from deploy.api.generation.choice import Choice", True),
        ("deploy.api.anthropic.routes", "from deploy.api.openai.format import usage", True),
        ("deploy.api.status", "from deploy.api.app import create_app", True),
        ("deploy.api.anthropic.routes", "from deploy.api.job.job import chat_job", False),
        ("deploy.api.openai.routes", "from deploy.api.openai.format import usage", False),
        ("deploy.serve.replica", "from deploy.api.limits.keys import KeyRing", False),
    ],
)
def test_a_wrong_arrow_is_seen(module: str, source: str, seen: bool) -> None:
    (target,) = imports(source)
    assert wrong(module, target) == seen


@pytest.mark.parametrize(
    "module", ["parallel.mesh", "protocol.plan", "protocol.messages", "scheduler", "processes.scheduler_process"]
)
def test_the_scheduler_imports_no_torch_and_no_ray(module: str) -> None:
    code = f"import sys, workers.{module}; sys.exit(bool({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_kernels_package_is_light_and_versioned() -> None:
    # transformers probes for a package called `kernels` and reads its version.
    code = "import sys, kernels; assert kernels.__version__; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_a_foreign_kernels_distribution_would_be_noticed() -> None:
    import kernels

    assert Path(kernels.__file__).resolve().parent == ROOT / "kernels"
