"""Patience of clients that give no timeout of their own: httpx's five seconds are soon over on a busy machine."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> Iterator[None]:
    from httpx._config import DEFAULT_TIMEOUT_CONFIG

    with pytest.MonkeyPatch.context() as patch:
        for name in ("connect", "read", "write", "pool"):
            patch.setattr(DEFAULT_TIMEOUT_CONFIG, name, 60.0)
        yield
