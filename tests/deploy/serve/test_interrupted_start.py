"""A signal that comes while the driver connects to Ray."""

from __future__ import annotations

import signal
import sys

import pytest

from deploy import connection
from deploy.config import ServeConfig
from deploy.connection import RayConnection


def test_a_start_ends_without_ray_where_its_import_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: RayConnection, *_: object) -> None:
        monkeypatch.setitem(sys.modules, "ray", None)  # to import it fails
        raise KeyboardInterrupt

    monkeypatch.setattr(RayConnection, "_start", interrupted)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(KeyboardInterrupt):
        RayConnection(ServeConfig.model_validate({"engine": {"model": "demo"}}), lambda line: None)


@pytest.mark.parametrize(("code", "raised"), [(signal.SIGTERM, KeyboardInterrupt), (1, SystemExit)])
def test_rays_handler_of_sigterm_ends_a_start_as_ours_does(code: int, raised: type[BaseException]) -> None:
    before = signal.getsignal(signal.SIGTERM)

    def connect() -> None:
        with connection._our_signal_handlers():
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
            if code == signal.SIGTERM:
                signal.raise_signal(signal.SIGTERM)
            sys.exit(code)

    with pytest.raises(raised):
        connect()
    assert signal.getsignal(signal.SIGTERM) is before
