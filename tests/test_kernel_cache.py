"""Compiled kernels that travel arrive as they were."""

from __future__ import annotations

import json
from pathlib import Path

import kernel_cache
import pytest


def test_what_is_packed_is_unpacked(tmp_path: Path) -> None:
    source, folder, into = (tmp_path / name for name in ("source", "folder", "into"))
    files = {
        f"KEY{n}/{name}": bytes((n * i * 37 >> 3) & 255 for i in range(5000))
        for n in range(3)
        for name in ("kernel.cubin", "kernel.json", "__grp__kernel.json", "kernel.ttir", "kernel.ptx")
    }
    for name, data in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(data)
    names = ("kernel.cubin", "kernel.json", "kernel.ttir", "kernel.ptx")
    for n in range(3):
        group = {"child_paths": {name: str(source / f"KEY{n}" / name) for name in names}}
        (source / f"KEY{n}/__grp__kernel.json").write_text(json.dumps(group))
    for _ in range(2):  # the second time in place of the first
        assert kernel_cache.pack(source, folder, part_bytes=1000) == 9
    sizes = [part.stat().st_size for part in sorted(folder.iterdir())]
    assert len(sizes) > 1
    assert {*sizes[:-1]} == {1000}
    assert 0 < sizes[-1] <= 1000
    (into / "KEY0").mkdir(parents=True)
    assert kernel_cache.unpack(folder, into) == 9
    kept = {name: data for name, data in files.items() if name.endswith(("l.cubin", "l.json")) and "__" not in name}
    found = {str(path.relative_to(into)): path.read_bytes() for path in into.rglob("*.*")}
    for n in range(3):
        listed = json.loads(found.pop(f"KEY{n}/__grp__kernel.json"))["child_paths"]
        assert listed == {name: str(into / f"KEY{n}" / name) for name in ("kernel.cubin", "kernel.json")}
    assert found == kept


def test_nothing_to_unpack(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no kernels"):
        kernel_cache.unpack(tmp_path, tmp_path / "cache")
