"""Docstrings stand alone: none only points at another, or goes on from the name above it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGINNINGS = ("See ", "Of ", "As above", "The same as above")
"""Words with which no docstring begins: a method that overrides another says `@override` and has none."""


def pointing(source: str) -> list[str]:
    """Functions and classes whose docstring begins so, in a file."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds))
    return [node.name for node in nodes if (ast.get_docstring(node) or "").startswith(BEGINNINGS)]


def test_docstrings_stand_alone() -> None:
    files = [file for room in ("deploy", "workers", "kernels", "bench") for file in sorted((ROOT / room).rglob("*.py"))]
    assert len(files) > 100
    assert {str(file): found for file in files if (found := pointing(file.read_text()))} == {}


def test_one_that_does_not_is_found() -> None:
    methods = '    def push(self):\n        """See `Parser`."""\n    def end(self):\n        """End it."""\n'
    assert pointing("class A:\n" + methods) == ["push"]
