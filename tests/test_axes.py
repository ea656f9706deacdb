"""Whoever asks how many ranks there are names the axis that it means, see `workers.parallel.mesh`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_COUNTS = {"rank", "size", "world_size", "get_rank", "get_world_size"}
_WITHOUT_AXIS = {"group", "_group", "mesh", "_mesh", "dist"}
"""Names of what has ranks along several axes, and of torch.distributed, which knows none."""

SAYS_THE_SETTING = {
    "workers/config.py": "makes the mesh of it",
    "workers/fit/settings.py": "tells the user which values work",
    "workers/fit/smallest_change.py": "proposes another value",
    "deploy/serve/capacity.py": "tells the user what its value takes",
    "deploy/cli/fit.py": "prints it",
}
"""Files that may read the setting `tensor_parallel`, and why: all others ask a mesh what they mean by it."""


def _named(node: ast.expr) -> str:
    """The last name of an expression: `group` of `parts.group` and of `self.group()`."""
    if isinstance(node, ast.Call):
        return _named(node.func)
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def bare(source: str) -> Iterator[tuple[int, str]]:
    """Line and name of every count of ranks that is read without an axis, and of every reading of the setting."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            bare_count = node.attr in _COUNTS and _named(node.value) in _WITHOUT_AXIS
            if bare_count or node.attr == "tensor_parallel":
                yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and _named(node.func) == "getattr" and len(node.args) > 1:
            target, name = node.args[:2]
            if isinstance(name, ast.Constant) and name.value in _COUNTS and _named(target) in _WITHOUT_AXIS:
                yield node.lineno, str(name.value)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name in _COUNTS)


@pytest.mark.parametrize("package", ["kernels", "workers", "deploy", "bench"])
def test_ranks_are_counted_along_an_axis(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = []
    for file in files:
        name = str(file.relative_to(ROOT))
        found += [
            f"{name}:{line} reads {what}"
            for line, what in bare(file.read_text())
            if not (what == "tensor_parallel" and (name in SAYS_THE_SETTING or package == "bench"))
        ]
    assert not found


def test_every_exception_is_used() -> None:
    for name in SAYS_THE_SETTING:
        assert "tensor_parallel" in {what for _, what in bare((ROOT / name).read_text())}, name


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("count = config.num_heads // source.group.size", ["size"]),
        ("if not group.rank:\n    pass", ["rank"]),
        ("share = self._group.size", ["size"]),
        ("ranks = model.group.mesh.size", ["size"]),
        ("ranks = getattr(group, 'size')", ["size"]),
        ("import torch.distributed as dist\nranks = dist.get_world_size()", ["get_world_size"]),
        ("from torch.distributed import get_rank", ["get_rank"]),
        ("ranks = config.engine.tensor_parallel", ["tensor_parallel"]),
        ("ranks = parts.group.mesh.world.size + mesh.heads.rank", []),
        ("size = match.group(1).size", ["size"]),
        ("settings = dict(tensor_parallel=2)", []),
        ("sequence.rank = tensor.size", []),
    ],
)
def test_a_bare_count_is_seen(source: str, seen: list[str]) -> None:
    assert [what for _, what in bare(source)] == seen
