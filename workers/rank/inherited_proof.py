"""What the self-test of an engine has proven, for the engine that takes its place: the same steps of the same weights
on the same device need not all be proven again."""

from __future__ import annotations

from hashlib import blake2b
from importlib import metadata

import msgspec
import torch

from workers.config import EngineConfig
from workers.environment import driver_version
from workers.protocol.report import SelfTestReport
from workers.weights.kept import KeptWeights, device_identity


class InheritedProof:
    """The report that a rank's weight keeper remembers, while it lives."""

    def __init__(self, kept: KeptWeights, config: EngineConfig, context: int) -> None:
        """`kept`: by which all weights were asked for. `context`: tokens of the longest request that fits."""
        self._kept = kept
        settings = config.model_dump_json(exclude={"record_plans", "record_prompts"})
        device = device_identity(kept.device), driver_version(), torch.version.cuda, _triton()
        parts = kept.fingerprints, settings, context, *device
        self._key = f"proof {blake2b(repr(parts).encode(), digest_size=16).hexdigest()}"

    def recall(self) -> SelfTestReport | None:
        """Return the report of an engine that had the same of everything, and passed; None without one, on this rank or
        any other, and where kept weights were damaged: what damaged them may have done more. Collective."""
        found: SelfTestReport | None = None
        try:
            text = self._kept.client.recall(self._key)
            found = None if text is None else msgspec.json.decode(text, type=SelfTestReport)
        except OSError as error:
            self._kept.tell(f"every step is proven: {error}")
        good = found is not None and found.passed and not self._kept.damaged
        agreed = self._kept.group.minimum(torch.tensor([good], dtype=torch.int64, device=self._kept.device))
        return found if agreed.item() else None

    def note(self, report: SelfTestReport) -> None:
        """Remember a report; one that did not pass lets what was remembered be forgotten."""
        try:
            self._kept.client.note(self._key, msgspec.json.encode(report).decode() if report.passed else None)
        except OSError as error:
            self._kept.tell(f"the self-test will be repeated as a whole: {error}")


def _triton() -> str:
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""
