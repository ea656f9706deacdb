"""The self-test of a whole replica: which steps are tested, and what all ranks found together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec
import torch

from workers.graphs.capture import GraphRunner
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import Candidate, SelfTest
from workers.proof.masks import RandomMasks
from workers.proof.segments import SegmentProof
from workers.proof.tails import prove_tails
from workers.protocol.report import BucketReport, SelfTestReport
from workers.step.decode import DecodeStep
from workers.step.masks import StepMasks
from workers.step.parts import StepParts

T = TypeVar("T")


def prove(
    parts: StepParts,
    graphs: GraphRunner | None,
    every_bucket: bool = False,
    progress: Callable[[str], None] | None = None,
    masks: StepMasks | None = None,
    inherited: SelfTestReport | None = None,
) -> SelfTestReport:
    """Test every graph, the segments of a token bucket together; without `graphs` eager steps of the decode buckets, of
    which `every_bucket` asks for all. All ranks do it together, and all return what any of them found. `masks`: where
    those of split steps were captured, on rank 0. `inherited`: the report of an engine before this one, which had the
    same of everything that decides what steps compute: of each kind only the first and the last are tested again then,
    and for the others that report stands."""
    chosen = _all if inherited is None else _ends
    began, begin = time.time(), time.perf_counter()
    eager, left_out = "", 0
    if graphs is not None:
        captured, drawn = graphs.all(), RandomMasks(masks)
        steps = [*chosen([one for one in captured if not one.step.key.dense])]
        steps += chosen([one for one in captured if one.step.key.dense])
        candidates = [Candidate(one.step, one.replay) for one in steps]
        candidates += [
            Candidate(split.step, partial(split.replay, drawn.in_place), drawn)
            for split in chosen(graphs.split_steps())
        ]
    else:
        eager = "no CUDA graphs on this device" if parts.device.type == "cpu" else "CUDA graphs are switched off"
        graph_keys = list(parts.buckets(parts.state.slots))
        keys = (
            graph_keys
            if every_bucket
            else list(dict.fromkeys([graph_keys[0], graph_keys[len(graph_keys) // 2], graph_keys[-1]]))
        )
        left_out = len(graph_keys) - len(keys)
        scratch = Scratch(parts.device)
        eager_steps = [DecodeStep(parts, key, scratch) for key in chosen(keys)]
        candidates = [Candidate(step, step.run) for step in eager_steps]
    found = SelfTest(parts).run(candidates, progress)
    if graphs is not None:
        found += SegmentProof(parts).run(chosen(graphs.stages()), progress)
        found += prove_tails(parts, chosen(graphs.tails()), progress)
        # The memory of eager steps, which serving does not need.
        torch.cuda.empty_cache()
    proven = _of_all_ranks(found, parts)
    buckets = proven if inherited is None else _with(inherited, proven)
    return SelfTestReport(
        device=torch.cuda.get_device_name(parts.device) if parts.device.type == "cuda" else parts.device.type,
        ranks=parts.group.mesh.world.size,
        eager=eager,
        graphs=0 if graphs is None else graphs.count,
        graph_bytes=0 if graphs is None else graphs.stats.bytes,
        capture_seconds=0.0 if graphs is None else graphs.stats.capture_seconds,
        began=began,
        seconds=time.perf_counter() - begin,
        buckets=buckets,
        left_out=left_out,
        inherited=len(buckets) - len(proven),
    )


def _all(items: Sequence[T]) -> Sequence[T]:
    return items


def _ends(items: Sequence[T]) -> Sequence[T]:
    """The first and the last, which are the largest and the smallest."""
    return [*items[:1], *items[1:][-1:]]


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
