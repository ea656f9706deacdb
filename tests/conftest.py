"""Puts this folder on the import path, so that tests can share helpers such as `tiny_models`."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typing_extensions import override

from tests.support.gpu_files import needs_gpu_by_name
from tests.support.hanging import pytest_configure, pytest_runtest_protocol
from workers.processes import launch

__all__ = ["pytest_configure", "pytest_runtest_protocol"]
"""Hooks that stand elsewhere."""


@cache
def has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Pass over files all of whose tests need a GPU, where there is none."""
    return True if needs_gpu_by_name(collection_path) and not has_gpu() else None


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal out files. All those that start Ray clusters go to the same worker, because two starts at a time take longer
    than one after the other."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        @override
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "clusters" if starts_clusters(file) else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


@cache
def starts_clusters(file: str) -> bool:
    """Whether a test of the file, whose path is relative to the project, starts a Ray cluster."""
    return "pytest.mark.cluster" in (Path(__file__).parent.parent / file).read_text()


@cache
def soaked_cases() -> frozenset[str]:
    """The cases that `soaked_cases.txt` lists, and the functions that it lists with all of their cases."""
    lines = Path(__file__).with_name("soaked_cases.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Listed cases have the mark `soak`."""
    if not soaked_cases().isdisjoint((item.nodeid, item.nodeid.split("[")[0])):
        item.add_marker(pytest.mark.soak)


@pytest.fixture(scope="session", autouse=True)
def quickly_started_ranks() -> Iterator[None]:
    """Replicas of this process start their ranks as `rank_processes` does. Those of commands start them as always."""

    def start_method() -> object:
        from rank_processes import start_method

        return start_method()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_start_method", start_method)
        yield


@pytest.fixture(autouse=True)
def memory_given_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Other processes test on the same GPU, and some tests need a good part of its memory for a moment."""
    yield
    if request.node.get_closest_marker("gpu"):
        import torch

        torch.cuda.empty_cache()
