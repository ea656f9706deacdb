import ctypes
from importlib import metadata
from types import SimpleNamespace

import pytest

from workers.environment import EnvironmentProblem, check_environment, visible_gpus


def test_this_environment_is_sound() -> None:
    check_environment()


def test_a_distribution_named_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.13.0")
    with pytest.raises(EnvironmentProblem, match="pip uninstall kernels"):
        check_environment()


@pytest.mark.parametrize(
    ("count", "visible", "seen"),
    [
        *((4, None, 4), (4, "0,3", 2), (4, "2, 0", 2), (4, "", 0), (1, "0,1", 1), (0, None, 0)),
        *((4, "GPU-1f", 1), (4, "GPU-1f,GPU-2e", 2), (4, "MIG-1f,MIG-2e", 1)),
        *(
            (4, "-1", 0),
            (4, "NoDevFiles", 0),
            (4, "1,-1,2", 1),
            (4, "0,7,1", 1),
            (4, "0,0", 0),
            (4, "GPU-1f,GPU-1f", 0),
        ),
    ],
)
def test_gpus_that_are_visible(monkeypatch: pytest.MonkeyPatch, count: int, visible: str | None, seen: int) -> None:
    def device_count(into: object) -> int:
        into._obj.value = count  # type: ignore[attr-defined]
        return 0

    nvml = SimpleNamespace(nvmlInit_v2=lambda: 0, nvmlDeviceGetCount_v2=device_count, nvmlShutdown=lambda: 0)
    monkeypatch.setattr(ctypes, "CDLL", {"libnvidia-ml.so.1": nvml}.__getitem__)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus() == seen


def test_without_a_driver_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 999))
    assert visible_gpus() == 0

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert visible_gpus() == 0
