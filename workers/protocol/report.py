"""The report of a self-test, as it travels from rank 0 to the front, and as people and programs read it. No torch
here."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from typing_extensions import override


class StepTime(msgspec.Struct, frozen=True, array_like=True):
    """Time of a step that was proven."""

    rows: int
    """Decode rows."""
    width: int
    """Tokens that each fed; it drafted one less."""
    seconds: float
    prompt_tokens: int = 0
    """Fed beside them, in a mixed step."""


class BucketReport(msgspec.Struct, frozen=True, array_like=True):
    """The verdict on one graph, or on one eager step where there are no graphs."""

    kind: str
    """Kind of the step: a `decode` step, a `dense` one of short rows where attention is otherwise sparse, a `masked`
    one that is split, a `mixed` step, or the `tail` of mixed steps."""
    bucket: str
    """Shape of the bucket, such as `16 x 3`: rows x tokens of a row."""
    seconds: float
    problems: tuple[str, ...] = ()
    """Problems found, on any rank; empty if there are none."""
    drafts: int | None = None
    """Drafts it makes for the next step; None where that says nothing, here and below."""
    rows: int | None = None
    """Rows, or tokens of a logits-only tail, that were live; the others were padding."""
    accepted: int | None = None
    """Drafts that were accepted, all rows together."""
    logits_error: float | None = None
    """Relative norm of the difference from the reference, or from the same without padding: the median over rows, of
    the worst position. Of a tail's hidden states, over its tokens."""
    step_time: StepTime | None = None
    """Time of a decode step, or of a mixed one with decode rows, on the random rows of its proof."""

    @property
    def passed(self) -> bool:
        """Whether nothing differed."""
        return not self.problems

    @override
    def __str__(self) -> str:
        drafts = f", {self.drafts} drafts" if self.drafts is not None else ""
        return f"{self.kind} {self.bucket}{drafts}"


class SelfTestReport(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The self-test of one replica, all ranks together."""

    device: str
    """Device that rank 0 ran on."""
    ranks: int
    eager: str
    """Reason why eager steps were checked instead of graphs; empty where graphs were."""
    graphs: int
    """Captured graphs."""
    graph_bytes: int
    """Device memory that graphs and their scratch take, on rank 0."""
    capture_seconds: float
    began: float
    """Unix time, seconds."""
    seconds: float
    buckets: tuple[BucketReport, ...]
    left_out: int = 0
    """Buckets that were not checked, or are not yet: graphs that are captured while the engine serves are checked
    before they are used."""
    inherited: int = 0
    """Buckets, of those reported, that an engine before this one proved with the same weights, settings, device and
    versions. They are not checked again."""

    @property
    def failed(self) -> tuple[BucketReport, ...]:
        """Buckets that did not pass."""
        return tuple(bucket for bucket in self.buckets if not bucket.passed)

    @property
    def passed(self) -> bool:
        """Every bucket that was checked passed."""
        return not self.failed

    def summary(self) -> str:
        """Return one line for people."""
        checked, good = len(self.buckets) - self.inherited, len(self.buckets) - self.inherited - len(self.failed)
        if self.inherited:
            what = "eager steps passed" if self.eager else "graphs compute what eager computes"
            return (
                f"{good} of {checked} {what} ({self.seconds:.1f} s); {self.inherited} others did before the engine was "
                "started again"
            )
        if not self.eager:
            follow = f"; {self.left_out} follow while it serves" if self.left_out else ""
            return f"{good} of {checked} graphs compute what eager computes ({self.seconds:.1f} s){follow}"
        shapes = ", ".join(bucket.bucket for bucket in self.buckets)
        left_out = f", the smallest, a middle and the largest of {checked + self.left_out} ({shapes})"
        return (
            f"{self.eager}: {checked} eager steps were checked{left_out if self.left_out else ''}, {good} passed "
            f"({self.seconds:.1f} s)"
        )

    def cause(self) -> str:
        """Reason why the replica must not serve; empty if it may."""
        if self.passed:
            return ""
        first, what = self.failed[0], "eager steps" if self.eager else "graphs"
        return (
            f"self-test failed for {len(self.failed)} of {len(self.buckets) - self.inherited} {what}, the first being "
            f"{first}: {'; '.join(first.problems)}"
        )

    def to_json(self) -> dict[str, Any]:
        """The object that the endpoint and the command answer with."""
        buckets = [{"passed": bucket.passed, **msgspec.structs.asdict(bucket)} for bucket in self.buckets]
        for bucket in buckets:
            step_time = bucket.pop("step_time")
            bucket["step_seconds"] = None if step_time is None else step_time.seconds
        for bucket in buckets:
            if bucket["logits_error"] is not None and not math.isfinite(bucket["logits_error"]):
                bucket["logits_error"] = None  # JSON has no infinity; the problems say it
        return {"passed": self.passed, "summary": self.summary(), **msgspec.structs.asdict(self), "buckets": buckets}
