"""Whether this very engine has been proven before on this device, by a process that has ended.

A replica with `graphs_at_start: auto` serves with few graphs where that is so, and else proves all of them first.
Nothing else follows from it: such an engine proves every graph again, each before it is used.

The note is a file in Triton's cache, beside the kernels that it speaks of: whoever removes them removes it. An engine
takes its note away when it begins to capture, and writes it anew once every graph was captured and has passed. So the
start after one that failed, died or was ended on its way there proves everything before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Final

import torch

import kernels
import workers
from kernels.runtime.ahead import cache_folder
from workers.config import EngineConfig
from workers.parallel.group import Group
from workers.protocol.report import SelfTestReport
from workers.rank.inherited_proof import surroundings

FOLDER: Final = "latentserve-proven"
"""In Triton's cache."""


class ProvenBefore:
    """The note of one rank."""

    def __init__(
        self,
        config: EngineConfig,
        group: Group,
        device: torch.device,
        root: bytes,
        context: int,
        tell: Callable[[str], None] | None = None,
    ) -> None:
        """`root`: of what the model caches (`workers.rank.root.cache_root`), which has weights, config and versions in
        it. `context`: tokens of the longest request that fits. `tell` gets a line where the note cannot be had."""
        self._group, self._device, self._tell = group, device, tell or (lambda line: None)
        self._file: Path | None = None
        world, settings = group.mesh.world, surroundings(config, device, "graphs_at_start", "selftest_buckets")
        if (folder := cache_folder()) is None:
            return
        try:
            code = source_code()
        except OSError as error:  # a file that went meanwhile, or a link that leads nowhere
            self._tell(f"all graphs are captured before this replica serves: its code cannot be read: {error}")
            return
        parts = root, context, world.rank, world.size, code, *settings
        self._file = folder / FOLDER / blake2b(repr(parts).encode(), digest_size=16).hexdigest()

    def take(self) -> bool:
        """Take the note away; return whether all ranks had theirs. Collective."""
        had = False
        if self._file is not None:
            try:
                self._file.unlink()
                had = True
            except FileNotFoundError:
                pass
            except OSError as error:
                self._tell(f"all graphs are captured before this replica serves: a note cannot be read: {error}")
        agreed = self._group.minimum(torch.tensor([had], dtype=torch.int64, device=self._device))
        return bool(agreed.item())

    def note(self, report: SelfTestReport) -> None:
        """Note that every graph was captured and has passed; a report that did not pass leaves no note."""
        if self._file is None:
            return
        try:
            if not report.passed:
                self._file.unlink(missing_ok=True)
                return
            self._file.parent.mkdir(parents=True, exist_ok=True)
            beside = self._file.with_name(f"{self._file.name}.new")  # one engine serves on a device
            beside.write_text(f"{report.summary()}\n")
            beside.replace(self._file)
        except OSError as error:
            self._tell(f"the next start captures all graphs before it serves: no note can be left: {error}")


def source_code() -> str:
    """Return a hash of the source code that computes: versions do not tell a working copy from the one before. OSError
    where it cannot be read."""
    found = blake2b(digest_size=16)
    for package in (kernels, workers):
        root = Path(package.__path__[0])
        for file in sorted(root.rglob("*.py")):
            found.update(f"{file.relative_to(root)} {file.stat().st_size}\n".encode())
            found.update(file.read_bytes())
    return found.hexdigest()
