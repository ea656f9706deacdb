"""Names of the test files that need a GPU."""

from pathlib import Path


def needs_gpu_by_name(file: Path) -> bool:
    """Whether a file's name says that all its tests need a GPU; `test_lanes.py` holds files to that."""
    return file.name.endswith("_gpu.py") or file.name.startswith("test_gpu_")
