"""Whether there is room for a rank's weights, before any is read."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from workers.parallel.group import Group


def check_memory(bytes_wanted: int, group: Group, device: torch.device) -> None:
    """MemoryError when this rank's weights do not fit the free memory. Collective: call it on every rank."""
    if device.type == "cuda":
        free, where = torch.cuda.mem_get_info(device)[0], f"GPU {device.index or 0}"
    else:
        # Ranks on CPUs share one memory.
        free, where, bytes_wanted = _free_host_bytes(), "this machine", bytes_wanted * group.mesh.world.size
    group.minimum(torch.zeros(1, device=device))  # nobody begins to load before all have looked
    if bytes_wanted > free:
        raise MemoryError(
            f"the weights need {bytes_wanted / 2**30:.2f} GiB, but {where} has {free / 2**30:.2f} GiB free: "
            "use more ranks (tensor_parallel), a smaller dtype or a smaller model"
        )


def _free_host_bytes() -> int:
    free: int = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The page cache gives way; what is shared without a file, which counts as such, does not.
        cached = int(statistics["file"]) - int(statistics["shmem"])
        used = int((group / "memory.current").read_text()) - cached
        return min(free, int((group / "memory.max").read_text()) - used)
    except (OSError, ValueError, KeyError):  # no control group, or no limit ("max")
        return free
