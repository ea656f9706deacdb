"""Facts about the installation and the machine that are needed before anything else starts."""

from __future__ import annotations

import ctypes
import os
from importlib import metadata
from itertools import takewhile


class EnvironmentProblem(RuntimeError):
    """The installation cannot run latentserve; the message says what to do."""


def check_environment() -> None:
    """Raises EnvironmentProblem if another distribution claims one of our package names.

    The Hugging Face package `kernels` installs an import package of the same name: whichever was installed last would
    win, and transformers probes for it.
    """
    try:
        found = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        return
    raise EnvironmentProblem(
        f"the distribution `kernels` {found} is installed and hides latentserve's package of the same name; "
        "run `pip uninstall kernels`, then reinstall latentserve"
    )


def visible_gpus() -> int:
    """NVIDIA GPUs of this machine, those that CUDA_VISIBLE_DEVICES hides left out; 0 where there is no driver.

    CUDA reads that list up to the first name of no device (-1 is often written to hide all), shows none where one comes
    twice, and of parts of GPUs (MIG) one to a process.

    The driver's library is asked. Torch and Ray know, too, but take seconds to import, and Ray reads its settings from
    the environment when it is imported: before `serve` has set them.
    """
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return 0
    nvml.nvmlShutdown()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count.value
    names = [name.strip() for name in visible.split(",")]
    shown = list(takewhile(lambda name: _names_gpu(name, count.value), names))
    if len(set(shown)) < len(shown):
        return 0
    most = 1 if visible.strip().startswith("MIG-") else count.value
    return min(most, len(shown))


def driver_version() -> str:
    """Version of NVIDIA's driver; empty where there is none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(80)
    if nvml.nvmlInit_v2() or nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text))):
        return ""
    nvml.nvmlShutdown()
    return text.value.decode()


def _names_gpu(name: str, count: int) -> bool:
    return name.startswith(("GPU-", "MIG-")) or (name.isdecimal() and int(name) < count)
