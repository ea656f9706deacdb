"""The proof that a replay computes what eager computes, on random state with poisoned padding.

For every captured step: slots, page tables, caches and drafts are random; what no row may touch is NaN (null page,
entries past a row's length), huge (page ids past its pages) or a former tenant's (slots without a row). The step runs
eagerly and as a replay from the same state, and both must agree bit for bit in tokens, accepted counts, logits, cache
writes and slot state, and must have changed nothing else. Against a mistake that both share, the logits are compared
with those of the same tokens fed as a prefill chunk, which takes another path through attention and knows nothing of
buckets.

Where nothing is captured, an eager step is its own candidate: a second run from the same state is what must agree.

Run before a replica serves: it overwrites slots and cache. All ranks run it together, from equal seeds.

Shape legend: R rows, W width, N logits rows, L layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.repeat import nothing_repeated
from workers.cache.paged import PagedCache
from workers.models.batch import Batch, PrefillBatch
from workers.proof.scene import Ground, Outcome, Scene, differ
from workers.protocol.plan import BatchLayout
from workers.protocol.report import BucketReport
from workers.step.decode import DecodeStep
from workers.step.parts import StepOutput, StepParts

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest norm of the difference from the prefill path, as a share of the logits' norm. The two forms of attention
round differently; a token that sees one entry too many or too few is off by far more."""
LAYERS = 27
"""Up to so many layers `TOLERANCE` holds; with more it grows in proportion, as the difference does."""

ATTEMPTS = 4
"""States on which the comparison with the prefill path is tried. Rounding may turn a router's choice over, which moves
a whole row of logits: that happens to a row now and then, a mistake happens to every row in every state."""

LEAST_PREFILLED = 16
"""Tokens that the prefill path is fed at least; copies of the rows make up for it. The smallest bucket of tokens: with
fewer it would launch kernels that no replica needs, and compile them for this alone."""

PROGRESS_PERIOD_S = 2.0


def tolerance(cache: PagedCache) -> float:
    """For the model whose latents these are."""
    return TOLERANCE[cache.layers[0].dtype] * max(1.0, len(cache.layers) / LAYERS)


@dataclass(frozen=True)
class Candidate:
    """A step under test: `step` runs eagerly, `replay` is what will serve."""

    step: DecodeStep
    replay: Callable[[], StepOutput]


class SelfTest:
    """Tests candidates on one rank's parts, one after the other."""

    def __init__(self, parts: StepParts, seed: int = 0) -> None:
        self._parts = parts
        self._ground = Ground(parts, seed)

    @torch.inference_mode()
    def run(self, candidates: Sequence[Candidate], progress: Callable[[str], None] | None = None) -> list[BucketReport]:
        """One report a candidate, in order. Slots and cache are scrubbed afterwards."""
        reports: list[BucketReport] = []
        said = time.perf_counter()
        try:
            for candidate in candidates:
                reports.append(self._bucket(candidate))
                if progress is not None and time.perf_counter() - said > PROGRESS_PERIOD_S:
                    said = time.perf_counter()
                    progress(f"self-test: {len(reports)} of {len(candidates)}")
        finally:
            self._ground.scrub()
        return reports

    def _bucket(self, candidate: Candidate) -> BucketReport:
        begin, key = time.perf_counter(), candidate.step.key
        rows, accepted, error = None, None, torch.inf
        problems: list[str] = []
        try:
            scene, eager, error, problems = self._eager(candidate)
            replay = scene.outcome(candidate.replay())
            problems += _problems(scene, eager, replay)
            rows = len(scene.rows)
            accepted = int(eager.decided_N[candidate.step.layout.accepted_slice][:rows].sum())
        except IndexError as oops:
            # A CPU notices what would read or write anywhere on a GPU.
            problems.append(f"indexed out of bounds: {oops}")
        return BucketReport(
            kind="decode",
            bucket=f"{key.rows} x {key.width}",
            seconds=time.perf_counter() - begin,
            problems=tuple(dict.fromkeys(problems)),
            drafts=key.drafts,
            rows=rows,
            accepted=accepted,
            logits_error=error,
        )

    def _eager(self, candidate: Candidate) -> tuple[Scene, Outcome, float, list[str]]:
        """A scene at its beginning, what the eager step makes of it, how far that is from the prefill path, and what
        is wrong with that."""
        step, bound = candidate.step, tolerance(self._parts.cache)
        problems: list[str] = []
        least = torch.inf
        for _ in range(ATTEMPTS):
            scene = self._ground.scene(step.key)
            if bool(scene.stale):
                problems.append("a newcomer's page table keeps former pages")
            step.slot_R.fill_(-1)
            step.slot_R[: len(scene.rows)] = scene.slot_R
            self._plausible_drafts(candidate, scene)
            with nothing_repeated():  # what is repeated is the graph's, and to be proven
                eager = scene.outcome(step.run())
            scene.restore()
            error = self._distance_from_prefill(scene, eager.logits_NV)
            scene.restore()
            least = min(least, error)
            if least <= bound:
                break
        else:
            problems.append(f"logits are {least:.1e} away from the prefill path, more than {bound:.0e}")
        return scene, eager, least, problems

    def _plausible_drafts(self, candidate: Candidate, scene: Scene) -> None:
        """Let some drafts be what the target will choose, so that acceptance is tested at every count. The replay
        says what that is, because it is fast; a wrong one fails whatever it is fed."""
        step, width = candidate.step, scene.key.width
        reach_R = torch.tensor([self._ground.number(0, width - 1) for _ in scene.rows])
        reach, reach_R = int(reach_R.max()), reach_R.to(self._parts.device)
        for index in range(reach):
            output = candidate.replay()
            target_RW = output.decided_N[step.layout.target_slice].view(-1, width)[: len(scene.rows)]
            scene.propose(index, target_RW[:, index], reach_R > index)
            scene.restore()

    def _distance_from_prefill(self, scene: Scene, got_NV: Tensor) -> float:
        """Relative error of a step's logits from those of the same tokens fed as prefill chunks: the median over rows,
        of the worst position."""
        parts, width, own = self._parts, scene.key.width, len(scene.rows)
        repeats = -(-LEAST_PREFILLED // (own * width))
        state, slot_R, rows = parts.state.tensors, scene.slot_R.repeat(repeats), [*scene.rows] * repeats
        token_RW = torch.cat([state.last_S[slot_R].unsqueeze(1), state.draft_SK[slot_R, : width - 1]], dim=1)
        position_RW = state.length_S[slot_R].unsqueeze(1) + torch.arange(width, device=parts.device)
        token_T, position_T, slot_T = token_RW.flatten(), position_RW.flatten(), slot_R.repeat_interleave(width)
        cache_slot_T = parts.state.cache_slots(slot_T, position_T)
        cache_slot_T[own * width :] = 0  # one of a row's copies is written, the others go to the null page
        counts = (width,) * len(rows)
        batch = Batch(
            layout=BatchLayout(1, 0, counts, (True,) * len(rows)),
            position_T=position_T,
            cache_slot_T=cache_slot_T,
            decode=None,
            prefill=PrefillBatch(tuple(row.length for row in rows), counts, state.page_SP[slot_R]),
        )
        want_NV = parts.model.logits(parts.model.forward(token_T, batch, parts.cache)[: own * width])
        error_N = (got_NV[: own * width] - want_NV).norm(dim=-1) / want_NV.norm(dim=-1)
        # NaN must not pass for small.
        error_RW = torch.nan_to_num(error_N, nan=torch.inf).view(own, width)
        # Whether to try another state is one decision for all ranks.
        return float(parts.group.broadcast(error_RW.median(dim=0).values.max()))


def _problems(scene: Scene, eager: Outcome, replay: Outcome) -> list[str]:
    """What differs between the two runs, and what either should not have changed."""
    layout = BatchLayout(scene.key.width, scene.key.rows)
    rows, live = len(scene.rows), len(scene.rows) * layout.width
    eager_R, replay_R = eager.decided_N[layout.accepted_slice][:rows], replay.decided_N[layout.accepted_slice][:rows]
    eager_F, replay_F = (outcome.decided_N[layout.fault_slice] != 0 for outcome in (eager, replay))
    found = [
        ("target tokens differ", differ(eager.decided_N[:live], replay.decided_N[:live])),
        ("accepted counts differ", differ(eager_R, replay_R)),
        ("logits or ids were out of range", eager_F.any() | replay_F.any()),
        ("logits differ", differ(eager.logits_NV[:live], replay.logits_NV[:live])),
        ("a slot without a row changed", eager.foreign | replay.foreign),
    ]
    found += [
        (f"{name} differs", differ(a, b))
        for name, a, b in zip(scene.slot_names, eager.slots, replay.slots, strict=True)
    ]
    for layer, (a, b) in enumerate(zip(eager.own, replay.own, strict=True)):
        found.append((f"cache of layer {layer} differs", differ(a, b)))
    outside_L = eager.outside_L | replay.outside_L
    for layer in range(len(outside_L)):
        found.append((f"cache of layer {layer} changed outside the rows' own entries", outside_L[layer]))
    # One wait for all of them.
    told = torch.stack([wrong.view(()) for _, wrong in found]).tolist()
    return [text for (text, _), wrong in zip(found, told, strict=True) if wrong]
