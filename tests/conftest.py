"""Puts this folder on the import path, so that tests can share helpers such as `tiny_models`."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.gpu_files import needs_gpu_by_name
from workers.processes import launch


@cache
def has_gpu() -> bool:
    """Whether torch finds a CUDA device."""
    import torch

    return torch.cuda.is_available()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a GPU, files are passed over all of whose tests need one."""
    return True if needs_gpu_by_name(collection_path) and not has_gpu() else None


@cache
def soaked_cases() -> frozenset[str]:
    """The cases that `soaked_cases.txt` lists."""
    lines = Path(__file__).with_name("soaked_cases.txt").read_text().splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def pytest_itemcollected(item: pytest.Item) -> None:
    """Listed cases have the mark `soak`."""
    if item.nodeid in soaked_cases():
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
