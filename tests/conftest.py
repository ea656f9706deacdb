"""Puts this folder on the import path, so that tests can share helpers such as `tiny_models`."""

from collections.abc import Iterator

import pytest

from workers.processes import launch


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
