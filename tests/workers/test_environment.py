from importlib import metadata

import pytest

from workers.environment import EnvironmentProblem, check_environment


def test_this_environment_is_sound() -> None:
    check_environment()


def test_a_distribution_named_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.0")
    with pytest.raises(EnvironmentProblem, match="pip uninstall kernels"):
        check_environment()
