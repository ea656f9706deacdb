"""The self-test of a whole replica: which steps are tested, and what all ranks found together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

from workers.graphs.graph_runner import GraphRunner
from workers.graphs.portions import Portion
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.masks import RandomMasks
from workers.proof.segments import SegmentProof
from workers.proof.tails import prove_tails
from workers.protocol.plan import GraphKey, TokenKey
from workers.protocol.report import BucketReport, SelfTestReport
from workers.step.decode import DecodeStep
from workers.step.masks import StepMasks
from workers.step.parts import StepParts

Key = TypeVar("Key", GraphKey, TokenKey)


def prove(
    parts: StepParts,
    graphs: GraphRunner | None,
    every_bucket: bool = False,
    progress: Callable[[str], None] | None = None,
    masks: StepMasks | None = None,
    inherited: SelfTestReport | None = None,
    granted: Sequence[int] | None = None,
) -> SelfTestReport:
    """Test every graph that is captured, the segments of a token bucket together; without `graphs` eager steps of the
    decode buckets, of which `every_bucket` asks for all. All ranks do it together, and all return what any of them
    found. `masks`: where those of split steps were captured, on rank 0. `inherited`: the report of an engine before
    this one, which had the same of everything that decides what steps compute: of each kind only the first and the last
    are tested again then, and for the others that report stands. `granted`: see `FixturePool`."""
    if graphs is not None:
        proof = GraphProof(parts, graphs, progress, masks, inherited)
        proof.prove(graphs.there, granted)
        return proof.report()
    began, begin = time.time(), time.perf_counter()
    eager = "no CUDA graphs on this device" if parts.device.type == "cpu" else "CUDA graphs are switched off"
    graph_keys = list(parts.buckets(parts.state.slots))
    keys = (
        graph_keys
        if every_bucket
        else list(dict.fromkeys([graph_keys[0], graph_keys[len(graph_keys) // 2], graph_keys[-1]]))
    )
    scratch = Scratch(parts.device)
    chosen = keys if inherited is None else [*keys[:1], *keys[1:][-1:]]  # the largest and the smallest
    steps = [DecodeStep(parts, key, scratch) for key in chosen]
    found = SelfTest(parts, granted=granted).run([Candidate(step, step.run) for step in steps], progress)
    report = _report(parts, None, _of_all_ranks(found, parts), inherited, began, time.perf_counter() - begin)
    return msgspec.structs.replace(report, eager=eager, left_out=len(graph_keys) - len(keys))


class GraphProof:
    """The self-test of a rank's graphs, portion by portion."""

    def __init__(
        self,
        parts: StepParts,
        graphs: GraphRunner,
        progress: Callable[[str], None] | None = None,
        masks: StepMasks | None = None,
        inherited: SelfTestReport | None = None,
    ) -> None:
        self._parts, self._graphs, self._progress = parts, graphs, progress
        self._masks, self._inherited = RandomMasks(masks), inherited
        self._began, self._seconds = time.time(), 0.0
        self._found: dict[tuple[str, GraphKey | TokenKey], BucketReport] = {}

    def prove(self, portion: Portion, granted: Sequence[int] | None = None) -> bool:
        """Test the graphs of a portion, which is captured; where a report is inherited only those that are first or
        last of their kind. Return whether all passed. All ranks together. `granted`: see `FixturePool`."""
        begin, parts, graphs, progress = time.perf_counter(), self._parts, self._graphs, self._progress
        steps = self._chosen("step", [key for key in portion.steps if not key.dense])
        steps += self._chosen("step", [key for key in portion.steps if key.dense])
        split = self._chosen("split", portion.split_steps)
        stages, tails = self._chosen("stage", portion.stages), self._chosen("tail", portion.tails)
        candidates = [Candidate(one.step, one.replay) for one in map(graphs.step_of, steps)]
        candidates += [
            Candidate(one.step, partial(one.replay, self._masks.in_place), self._masks)
            for one in map(graphs.split_step_of, split)
        ]
        found: list[BucketReport] = []
        if candidates:
            found += SelfTest(parts, granted=granted).run(candidates, progress)
        if stages:
            found += SegmentProof(parts, granted=granted).run([graphs.stage_of(key) for key in stages], progress)
        if tails:
            found += prove_tails(parts, [graphs.tail_of(key) for key in tails], progress)
        if found:
            # The memory of eager steps, which serving does not need.
            torch.cuda.empty_cache()
            found = list(_of_all_ranks(found, parts))
        names: list[tuple[str, GraphKey | TokenKey]] = [("step", key) for key in steps]
        names += [("split", key) for key in split]
        names += [("stage", key) for key in stages]
        names += [("tail", key) for key in tails]
        self._found |= zip(names, found, strict=True)
        self._seconds += time.perf_counter() - begin
        return all(bucket.passed for bucket in found)

    def tests(self, portion: Portion) -> bool:
        """Whether any graph of a portion is to be tested."""
        return self.overwrites(portion) or bool(self._chosen("tail", portion.tails))

    def overwrites(self, portion: Portion) -> bool:
        """Whether testing a portion overwrites pages, all that are granted: that of tails touches none."""
        steps = self._chosen("step", portion.steps) or self._chosen("split", portion.split_steps)
        return bool(steps or self._chosen("stage", portion.stages))

    def _chosen(self, kind: str, keys: Sequence[Key]) -> list[Key]:
        """Keys of the graphs of a kind that are to be tested."""
        ends = self._graphs.keys.ends()
        return [key for key in keys if self._inherited is None or (kind, key) in ends]

    def report(self) -> SelfTestReport:
        """Return the report of all that was tested so far, in the order of the buckets."""
        keys = self._graphs.keys
        order: list[tuple[str, GraphKey | TokenKey]] = [("step", key) for key in keys.steps if not key.dense]
        order += [("step", key) for key in keys.steps if key.dense]
        order += [("split", key) for key in keys.split_steps]
        order += [("stage", key) for key in keys.stages]
        order += [("tail", key) for key in keys.tails]
        proven = tuple(self._found[name] for name in order if name in self._found)
        return _report(self._parts, self._graphs, proven, self._inherited, self._began, self._seconds)


def _report(
    parts: StepParts,
    graphs: GraphRunner | None,
    proven: tuple[BucketReport, ...],
    inherited: SelfTestReport | None,
    began: float,
    seconds: float,
) -> SelfTestReport:
    buckets = proven if inherited is None else _with(inherited, proven)
    return SelfTestReport(
        device=torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else parts.device.type,
        ranks=parts.group.mesh.world.size,
        eager="",
        graphs=0 if graphs is None else graphs.count,
        graph_bytes=0 if graphs is None else graphs.stats.bytes,
        capture_seconds=0.0 if graphs is None else graphs.stats.capture_seconds,
        began=began,
        seconds=seconds,
        buckets=buckets,
        left_out=0 if graphs is None or inherited is not None else sum(portion.buckets for portion in graphs.left),
        inherited=len(buckets) - len(proven),
    )


def _with(inherited: SelfTestReport, proven: Sequence[BucketReport]) -> tuple[BucketReport, ...]:
    """The inherited reports, those of what was proven anew in the places of the old ones."""
    anew = {str(bucket): bucket for bucket in proven}
    kept = [anew.pop(str(bucket), bucket) for bucket in inherited.buckets]
    return (*kept, *anew.values())


def _of_all_ranks(buckets: Sequence[BucketReport], parts: StepParts) -> tuple[BucketReport, ...]:
    """One rank's reports with the problems of every rank; which ranks have a problem is said unless all have it."""
    own = msgspec.msgpack.encode([bucket.problems for bucket in buckets])
    payloads = parts.group.gather_bytes(own, parts.device)
    of_ranks = [msgspec.msgpack.decode(payload, type=list[list[str]]) for payload in payloads]
    merged = []
    for bucket, *found in zip(buckets, *of_ranks, strict=True):
        texts = []
        for problem in dict.fromkeys(text for problems in found for text in problems):
            ranks = [str(rank) for rank, problems in enumerate(found) if problem in problems]
            texts.append(problem if len(ranks) == len(found) else f"rank {', '.join(ranks)}: {problem}")
        merged.append(msgspec.structs.replace(bucket, problems=tuple(texts)))
    return tuple(merged)
