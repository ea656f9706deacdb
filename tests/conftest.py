"""Puts this folder on the import path, so that tests can share helpers such as `tiny_models`."""

from collections.abc import Iterator

import pytest

from workers import launch


@pytest.fixture(scope="session", autouse=True)
def quickly_started_ranks() -> Iterator[None]:
    """Replicas of this process start their ranks as `rank_processes` does. Those of commands start them as always."""

    def start_method() -> object:
        from rank_processes import start_method

        return start_method()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_start_method", start_method)
        yield
