"""What the self-test of an engine has proven, and what its warm-up has measured, for the engine that takes its place:
the same steps of the same weights on the same device need neither all be proven again nor all be run before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from importlib import metadata
from typing import TypeVar

import msgspec
import torch

from kernels.runtime.ahead import still_compiled
from workers.config import EngineConfig
from workers.environment import driver_version
from workers.graphs.capture import Warmed
from workers.protocol.report import SelfTestReport
from workers.weights.kept import KeptWeights, device_identity

T = TypeVar("T")


class _Remembered:
    """A fact of an engine that a rank's weight keeper remembers, while it lives."""

    def __init__(self, kept: KeptWeights, config: EngineConfig, name: str, *more: object) -> None:
        """`kept`: by which all weights were asked for. `more`: of what else the fact depends."""
        self._kept = kept
        settings, *device = surroundings(config, kept.device)
        parts = kept.fingerprints, settings, *more, *device
        self._key = f"{name} {blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"

    def _recall(self, kind: type[T], good: Callable[[T], bool], otherwise: str) -> T | None:
        """Return what was noted; None where it is not `good`, or nothing is, on this rank or any other, and where kept
        weights were damaged: what damaged them may have done more. Collective. `otherwise`: what is done then, told
        where the weight keeper does not answer."""
        found: T | None = None
        try:
            text = self._kept.client.recall(self._key)
            found = None if text is None else msgspec.json.decode(text, type=kind)
        except (OSError, msgspec.MsgspecError) as error:
            self._kept.tell(f"{otherwise}: {error}")
        mine = found is not None and good(found) and not self._kept.damaged
        agreed = self._kept.group.minimum(torch.tensor([mine], dtype=torch.int64, device=self._kept.device))
        return found if agreed.item() else None

    def _note(self, value: object | None, otherwise: str) -> None:
        """Remember a value; None lets what was remembered be forgotten."""
        try:
            self._kept.client.note(self._key, None if value is None else msgspec.json.encode(value).decode())
        except OSError as error:
            self._kept.tell(f"{otherwise}: {error}")


class InheritedProof(_Remembered):
    """The report of a self-test."""

    def __init__(self, kept: KeptWeights, config: EngineConfig, context: int) -> None:
        """`kept`: by which all weights were asked for. `context`: tokens of the longest request that fits."""
        super().__init__(kept, config, "proof", context)

    def recall(self) -> SelfTestReport | None:
        """Return the report of an engine that had the same of everything, and passed; None without one, on this rank or
        any other, and where kept weights were damaged. Collective."""
        return self._recall(SelfTestReport, lambda report: report.passed, "every step is proven")

    def note(self, report: SelfTestReport) -> None:
        """Remember a report; one that did not pass lets what was remembered be forgotten."""
        self._note(report if report.passed else None, "the self-test will be repeated as a whole")


class Measured(msgspec.Struct, frozen=True):
    """What a warm-up has found, and the cache that was made after it."""

    warmed: Warmed
    pages: int
    """Of the rank's cache, the null page included."""
    context: int
    """Tokens of the longest request that fits: what graphs need of memory depends on it."""
    kernels: tuple[str, ...]
    """Folders of Triton's cache with all kernels that steps and self-test launch."""


class InheritedWarmUp(_Remembered):
    """What a warm-up has measured."""

    def __init__(self, kept: KeptWeights, config: EngineConfig) -> None:
        """`kept`: by which all weights were asked for."""
        super().__init__(kept, config, "warm-up")

    def recall(self) -> Measured | None:
        """Return what was found by an engine that had the same of everything, where its kernels are still in Triton's
        cache; None without it, on this rank or any other, where ranks remember different engines, as when one ended
        while it was noted, and where kept weights were damaged. Collective."""
        found = self._recall(Measured, lambda found: still_compiled(found.kernels), "all steps are warmed up")
        if found is None:  # on every rank
            return None
        sizes = torch.tensor([found.pages, found.context], dtype=torch.int64, device=self._kept.device)
        least, most = self._kept.group.minimum(torch.cat([sizes, -sizes])).chunk(2)
        return found if torch.equal(least, -most) else None  # they decide what all ranks do next

    def note(self, found: Measured) -> None:
        """Remember it, if all its kernels are known."""
        if found.kernels:
            self._note(found, "all steps will be warmed up again")


def surroundings(config: EngineConfig, device: torch.device, *without: str) -> tuple[str | None, ...]:
    """Return what decides, beside weights and code, what steps compute: settings, but for those `without`; the device
    by its own name; and the versions of its driver, CUDA and Triton."""
    settings = config.model_dump_json(exclude={"record_plans", "record_prompts", *without})
    return settings, device_identity(device), driver_version(), torch.version.cuda, _triton()


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
