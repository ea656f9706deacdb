"""A rank's graphs while they come portion by portion: the first before it is ready, the others between its steps."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Protocol

import torch

from kernels.page import pages_for
from workers.graphs.portions import Portion
from workers.parallel.group import Group, PeerLost
from workers.proof import decode_steps, segments
from workers.proof.prove import GraphProof
from workers.protocol.captures import CapturePortion, PortionCaptured
from workers.protocol.report import SelfTestReport, StepTime
from workers.rank.runner import Runner


class SelfTestFailedError(RuntimeError):
    """Some step does not compute what it should; the text is for the user."""


class CaptureFailedError(RuntimeError):
    """Graphs could not be captured, or not be proven, while an engine served; the text is for the user."""


class Notes(Protocol):
    """Where it is noted what a self-test has found, for an engine after this one."""

    def note(self, report: SelfTestReport) -> None:
        """Remember a report of all steps; one that did not pass lets what was remembered be forgotten."""


class Captures:
    """Captures what is left of a runner's graphs, and proves it before it is used."""

    def __init__(
        self,
        runner: Runner,
        group: Group,
        proof: GraphProof | None,
        notes: Sequence[Notes] = (),
        progress: Callable[[str], None] | None = None,
        on_selftest: Callable[[SelfTestReport], None] | None = None,
    ) -> None:
        """`proof`: which has proven what is captured so far; None where nothing is proven. `notes`: where a report is
        noted once it has all graphs, or one that failed. `on_selftest`: see `Rank`."""
        assert runner.graphs is not None
        self._runner, self._graphs, self._group = runner, runner.graphs, group
        self._proof, self._notes = proof, tuple(notes)
        self._progress, self._on_selftest = progress, on_selftest
        self._begin = time.perf_counter()
        self._seconds = 0.0

    @property
    def pages(self) -> tuple[tuple[int, int], ...]:
        """Pages that the proof of each portion that is left takes, and the fewest that will do."""
        return tuple(map(self._pages, self._graphs.left))

    def _pages(self, portion: Portion) -> tuple[int, int]:
        if self._proof is None or not self._proof.overwrites(portion):
            return 0, 0  # pages that were granted all the same would go unzeroed to whoever has them next
        parts = self._runner.parts
        rows, tokens = min(portion.rows, parts.state.slots), portion.tokens
        most = max(decode_steps.most_pages(parts, rows), segments.most_pages(parts, tokens) if tokens else 0)
        return most, max(rows, pages_for(tokens)) + 2

    def capture(self, message: CapturePortion) -> PortionCaptured:
        """Capture the next portion and prove it, before any step can take it. None may be under way. All ranks
        together. Raises SelfTestFailedError, on rank 0 after it has told what failed; PeerLost where another rank is
        gone; and CaptureFailedError for whatever else goes wrong, which no stream has asked for."""
        try:
            return self._capture(message)
        except (SelfTestFailedError, PeerLost):
            raise
        except Exception as error:
            raise CaptureFailedError(
                f"graphs could not be captured while the replica served: {type(error).__name__}: {error}; with "
                "--graphs-at-start all a replica's first engine captures them all before it serves, or does not start"
            ) from error

    @torch.inference_mode()
    def _capture(self, message: CapturePortion) -> PortionCaptured:
        begin, rank = time.perf_counter(), self._group.mesh.world.rank
        portion = self._graphs.capture()
        proof = self._proof
        if proof is not None and proof.tests(portion) and not self._passes(proof, portion, message.pages):
            tell(proof.report(), self._group, self._notes, self._progress, self._on_selftest)
        if self._runner.device.type == "cuda":
            torch.cuda.synchronize(self._runner.device)
        self._graphs.stats.portions_left = len(self._graphs.left)
        seconds = time.perf_counter() - begin
        self._seconds += seconds
        times: tuple[StepTime, ...] = ()
        if not self._graphs.left:
            if self._progress is not None:
                waited = time.perf_counter() - self._begin
                self._progress(f"{self._graphs.summary()}; that took {self._seconds:.1f} of {waited:.1f} s of serving")
            times = step_times(self.report())
            gc.collect()
            gc.freeze()  # as after a start
        return PortionCaptured(rank, message.number, seconds, times if rank == 0 else ())

    def _passes(self, proof: GraphProof, portion: Portion, pages: Sequence[int]) -> bool:
        """Prove a portion on these pages alone, and leave slots, their rings and all other pages as they were."""
        parts = self._runner.parts
        with ExitStack() as kept:
            kept.enter_context(parts.state.kept())
            kept.enter_context(parts.cache.kept())
            if parts.sampling is not None:
                kept.enter_context(parts.sampling.kept())
            return proof.prove(portion, pages)

    def report(self) -> SelfTestReport | None:
        """Report what was proven; None where nothing is. Raises SelfTestFailedError where that did not pass."""
        if self._proof is None:
            return None
        report = self._proof.report()
        notes = () if report.passed and self._graphs.left else self._notes
        return tell(report, self._group, notes, self._progress, self._on_selftest)


def bytes_of_copies(runner: Runner) -> int:
    """Return the bytes of the device that a proof while rows run takes for copies of the slots (`Captures`)."""
    parts, sampling = runner.parts, runner.parts.sampling
    return parts.state.kept_bytes + parts.cache.kept_bytes + (0 if sampling is None else sampling.kept_bytes)


def tell(
    report: SelfTestReport,
    group: Group,
    notes: Sequence[Notes],
    progress: Callable[[str], None] | None,
    on_selftest: Callable[[SelfTestReport], None] | None,
) -> SelfTestReport:
    """Tell what a self-test has found, on rank 0, and note it for an engine after this one. Return the report; raises
    SelfTestFailedError on rank 0 where it did not pass."""
    for place in notes:
        place.note(report)
    if not group.mesh.world.first:
        return report
    if progress is not None:
        progress(f"self-test: {report.summary()}")
    if on_selftest is not None:
        on_selftest(report)
    if not report.passed:
        raise SelfTestFailedError(report.cause())
    return report


def step_times(report: SelfTestReport | None) -> tuple[StepTime, ...]:
    """Return the times of the steps that draft as many tokens as the next step of their width feeds."""
    if report is None:
        return ()
    steps = [(bucket.drafts, bucket.step_time) for bucket in report.buckets]
    return tuple(time for drafts, time in steps if time is not None and drafts == time.width - 1)
