"""The proof that a replay computes what eager computes, on random state with poisoned padding.

For every captured step: slots, page tables, caches and drafts are random, and what no row may touch is poison (see
`fixture`). The step runs eagerly and as a replay from the same state, and both must agree bit for bit in tokens,
accepted counts, logits, cache writes and slot state, and must have changed nothing else. Against a mistake that both
share, the logits are compared with a reference. On a CPU that is the plain forward pass (`workers.models.deepseek`,
`workers.models.deepseek_v4`), which shares nothing with the step but weights and cache. On a GPU, and where index keys
are cached in INT8, it is the prefill path: the same tokens fed as a prefill chunk, which takes another path through
attention and knows nothing of buckets. Both sides of that comparison run with nothing rounded to FP8: a number that
differs a little may become another one of FP8, and so logits would differ by a third where nothing is wrong. And the
reference takes the experts that the step has chosen: of many experts some choice turns over on the least difference,
and all behind it with it. The choices are compared by themselves. So is what indexers have selected, where attention is
sparse.

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

from kernels.page import PAGE_TOKENS, pages_for
from kernels.runtime.repeat import nothing_repeated
from workers.cache.spec import Fp8LatentSpec, IndexSpec, Int8IndexSpec
from workers.memory.scratch import Scratch
from workers.models.batch import Batch, PrefillBatch
from workers.models.choices import Recorded, Taken
from workers.models.deepseek_v4_model import CompressedModel
from workers.models.feed_forward import MixtureOfExperts
from workers.models.selecting import pages_to_select
from workers.proof.fixture_pool import FixturePool, FreePages
from workers.proof.masks import RandomMasks
from workers.proof.plain import plain_logits
from workers.proof.rows import Row
from workers.proof.step_fixture import Outcome, StepFixture
from workers.protocol.plan import BatchLayout, GraphKey
from workers.protocol.report import BucketReport, StepTime
from workers.step.decode import DecodeStep
from workers.step.parts import StepOutput, StepParts

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest norm of the difference from the reference, as a share of the logits' norm. The two forms of attention
round differently; a token that sees one entry too many or too few is off by far more."""
FP8_CACHE = 2
"""Times as large it may be where latents are cached in FP8: one that comes out differently in its last bits may be
rounded to the next code, which is another number by up to an eighth. Of the demo model in bfloat16 the median distance
is 9e-3 then, and 6e-3 with a cache in bfloat16."""
AGREED = 0.5
"""Least share of a layer's choices of experts in which two passes must agree. Rounding turns a few hundredths over, or
a token's groups; experts that are chosen by mistake agree by chance alone, a few hundredths of them."""
LAYERS = 27
"""Number of layers up to which `TOLERANCE` holds; with more it grows in proportion, as the difference does."""

ATTEMPTS = 4
"""States on which the comparison with the reference is tried. Noise carries a row, or a choice of experts, past its
bound now and then; a mistake does so to every row in every state."""

LEAST_PREFILLED = 16
"""Tokens that the prefill path is fed at least; copies of the rows make up for it. The smallest bucket of tokens: with
fewer it would launch kernels that no replica needs, and compile them for this alone."""

TIMED = 2
"""Replays of each step that are timed, for who chooses among widths."""
MOST_PAGES = {"cuda": 8, "cpu": 3}
"""Pages of the longest row: on a GPU attention deals long rows out to many workers, on a CPU they are only slow."""

PROGRESS_PERIOD_S = 2.0


def tolerance(parts: StepParts) -> float:
    """Return the tolerance for passes of this model, on its cache, with nothing rounded to FP8 but what the cache
    keeps."""
    cache = parts.cache
    coarse = FP8_CACHE if isinstance(cache.specs[0], Fp8LatentSpec) else 1
    layers = sum(not isinstance(spec, IndexSpec | Int8IndexSpec) for spec in cache.specs)
    return coarse * TOLERANCE[parts.model.norm_E.dtype] * max(1.0, layers / LAYERS)


def quantizes_activations(parts: StepParts, tokens: int) -> bool:
    """Whether an eager pass of so many tokens may compute something else than with nothing rounded to FP8."""
    model = parts.model
    return model.paths.quantizes_activations(tokens, model.norm_E.dtype, parts.device)


def mixtures(parts: StepParts) -> int:
    """Layers of the target in which tokens choose experts."""
    if isinstance(parts.model, CompressedModel):
        return len(parts.model.blocks)
    return sum(isinstance(layer.feed_forward, MixtureOfExperts) for layer in parts.model.layers)


def selecting(parts: StepParts) -> int:
    """Layers of the target in which positions are selected."""
    if isinstance(parts.model, CompressedModel):
        return sum(block.attention.indexer is not None for block in parts.model.blocks)
    return sum(getattr(layer.attention, "indexer", None) is not None for layer in parts.model.layers)


def shared(parts: StepParts, taken: Taken) -> float:
    """Return the share of a layer's choices in which two passes agree; the same number on all ranks."""
    return float(parts.group.broadcast(torch.tensor(taken.agreement, device=parts.device)))


def differences(error: float, agreed: float, bound: float, what: str, other: str) -> list[str]:
    """Return the differences between two runs that agreed in no state: errors of `what` above the bound, and too few
    agreeing tokens."""
    found = []
    if error > bound:
        found.append(f"{what} are {error:.1e} away from {other}, more than {bound:.0e}")
    if agreed < AGREED:
        found.append(f"tokens agree with {other} in {agreed:.0%} of what they choose, less than {AGREED:.0%}")
    return found or [f"{what} or choices differ from {other} in every state"]


@dataclass(frozen=True)
class Candidate:
    """A step under test: `step` runs eagerly, `replay` is what will serve."""

    step: DecodeStep
    replay: Callable[[], StepOutput]
    masks: RandomMasks | None = None
    """Masks under which both steps sample, where the step is split; `replay` puts them in place itself."""

    def eager(self, step: DecodeStep) -> StepOutput:
        """Run a step of the same shape eagerly, under the same masks."""
        return step.run() if self.masks is None else step.run(self.masks.in_place)


def _before_an_entry_ends(length: int, most: int, tokens: int, behind: int) -> int:
    """The next length, of at most `most`, behind which `behind` tokens end an entry of so many tokens; `length` where
    there is none."""
    end = -(-(length + behind) // tokens) * tokens - behind
    if end > most:
        end -= tokens
    return end if end > 0 else length


def most_pages(parts: StepParts, rows: int) -> int:
    """Return the pages that a step of so many rows has in its proof, where the pool has them."""
    return rows * MOST_PAGES[parts.device.type] + pages_to_select(parts.model.config, parts.width) + 1


def timed_runs(device: torch.device) -> int:
    """Return the number of times that a step is timed. On a CPU it is 0, because steps are eager there and the first to
    launch some size prepares it: the scheduler measures those itself."""
    return TIMED if device.type == "cuda" else 0


def _seconds(candidate: Candidate, fixture: StepFixture) -> float:
    """Return the seconds of a replay: the least of some; 0 where none is timed. The fixture is at its beginning, and is
    so again."""
    device = candidate.step.parts.device
    if not timed_runs(device):
        return 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    times: list[float] = []
    for _ in range(timed_runs(device)):
        begin.record()
        candidate.replay()
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e-3 * begin.elapsed_time(end))
        fixture.restore()
    return min(times)


class SelfTest:
    """Tests candidates on one rank's parts, one after the other."""

    def __init__(
        self, parts: StepParts, seed: int = 0, *, plain: bool | None = None, granted: Sequence[int] | None = None
    ) -> None:
        """`plain`: whether the reference is the plain forward pass; None: on a CPU, unless index keys are in INT8.
        `granted`: see `FixturePool`."""
        self._parts, self._most_pages = parts, MOST_PAGES[parts.device.type]
        coded = any(isinstance(spec, Int8IndexSpec) for spec in parts.cache.specs)
        self._plain = parts.device.type == "cpu" and not coded if plain is None else plain
        self._fixture_pool = FixturePool(parts, seed, most_pages(parts, parts.state.slots), granted)

    @torch.inference_mode()
    def run(self, candidates: Sequence[Candidate], progress: Callable[[str], None] | None = None) -> list[BucketReport]:
        """Prove the candidates; returns one report per candidate, in order. Slots and cache are zero_filled
        afterwards."""
        reports: list[BucketReport] = []
        said = time.perf_counter()
        try:
            for candidate in candidates:
                reports.append(self._bucket(candidate))
                if progress is not None and time.perf_counter() - said > PROGRESS_PERIOD_S:
                    said = time.perf_counter()
                    progress(f"self-test: {len(reports)} of {len(candidates)}")
        finally:
            self._fixture_pool.clear()
        return reports

    def fixture(self, key: GraphKey) -> StepFixture:
        """New random rows for a bucket, written to slots and cache."""
        former, free = self._fixture_pool.pages()
        return self._fixture_pool.fixture(self._rows(key, free), former)

    def _rows(self, key: GraphKey, free: FreePages) -> list[Row]:
        """Draw as many live rows as slots and pages allow, one short of the bucket at times, with random lengths: short
        ones, those around a page's end, and long ones. Where attention is sparse the first is so long that it does not
        attend to everything, unless the step is a dense one: there all rows are short enough for that. Where an entry
        stands for several tokens, all of them have equally many before it ends: a position of the step at which one
        ends is that of most rows."""
        state, width, number = self._parts.state, self._parts.width, self._fixture_pool.number
        overshoot = 2 * width
        slots = self._fixture_pool.order(state.slots)
        longest = min(state.pages_per_row * PAGE_TOKENS, self._parts.model.max_positions) - overshoot
        if key.dense:
            longest = min(longest, self._parts.dense_pages * PAGE_TOKENS - overshoot)
        most = min(self._most_pages * PAGE_TOKENS - overshoot, longest)
        sizes = sorted({spec.tokens_of_entry for spec in self._parts.model.cache} - {1})
        # One ends within the step, and not with its first token; in a step of one token with that or the next one.
        behind = 0 if not sizes else number(2, key.width) if key.width > 1 else number(1, 2)
        rows: list[Row] = []
        for slot in slots[: max(1, key.rows - number(0, 1))]:
            kind = number(0, 3)
            length = (1, 1 + number(0, 5), PAGE_TOKENS - number(0, width), number(1, most))[kind]
            length = max(1, min(length, most))
            if sizes:
                length = _before_an_entry_ends(length, most, sizes[-1 if kind else 0], behind)
            beyond = 0
            if not rows:
                # A dense one's last page is nearly full.
                beyond = longest - number(0, width) if key.dense else self._fixture_pool.beyond_selection(longest)
            if beyond and free.fits(pages_for(beyond + overshoot)):
                length = beyond if not sizes else _before_an_entry_ends(beyond, beyond, sizes[0], behind)
            need = pages_for(length + overshoot)
            if not free.fits(need):
                length, need = 1, 1
                if not free.fits(need):
                    break
            rows.append(Row(slot, length, length, length + key.width, key.width, key.drafts, free.take(need)))
        return rows

    def _bucket(self, candidate: Candidate) -> BucketReport:
        begin, key = time.perf_counter(), candidate.step.key
        rows, accepted, step_seconds, error = None, None, 0.0, torch.inf
        problems: list[str] = []
        try:
            fixture, eager, error, problems = self._eager(candidate)
            # A step's time is that of any rows.
            timed = candidate.masks is None and not key.dense
            step_seconds = _seconds(candidate, fixture) if timed else 0.0
            replay = fixture.outcome(candidate.replay())
            problems += fixture.problems(eager, replay)
            rows = len(fixture.rows)
            accepted = int(eager.decided_N[eager.layout.accepted_slice][:rows].sum())
        except IndexError as oops:
            # A CPU notices what would read or write anywhere on a GPU.
            problems.append(f"indexed out of bounds: {oops}")
        return BucketReport(
            kind="dense" if key.dense else "decode" if candidate.masks is None else "masked",
            bucket=f"{key.rows} x {key.width}",
            seconds=time.perf_counter() - begin,
            problems=tuple(dict.fromkeys(problems)),
            drafts=key.drafts,
            rows=rows,
            accepted=accepted,
            logits_error=error,
            step_time=StepTime(key.rows, key.width, step_seconds) if step_seconds else None,
        )

    def _eager(self, candidate: Candidate) -> tuple[StepFixture, Outcome, float, list[str]]:
        """A fixture at its beginning, what the eager step makes of it, how far that is from the reference, and what is
        wrong with that."""
        step, bound = candidate.step, tolerance(self._parts)
        problems: list[str] = []
        least, most_agreed = torch.inf, 0.0
        for _ in range(ATTEMPTS):
            fixture = self.fixture(step.key)
            if candidate.masks is not None:
                candidate.masks.draw(step.layout.logits_rows)
            step.slot_R.fill_(-1)
            step.slot_R[: len(fixture.rows)] = fixture.slot_R
            self._plausible_drafts(candidate, fixture)
            paths, recorded = self._parts.model.paths, Recorded()
            with nothing_repeated(), paths.choosing(recorded):  # what is repeated is the graph's, and to be proven
                eager = fixture.outcome(candidate.eager(step))
            fixture.restore()
            with paths.without_w8a8():
                exact_NV, recorded = self._without_w8a8(fixture, candidate, eager.logits_NV, recorded)
                error, agreed = self._distance_from_reference(fixture, step.key, exact_NV, recorded)
            fixture.restore()
            least, most_agreed = min(least, error), max(most_agreed, agreed)
            if error <= bound and agreed >= AGREED:
                break
        else:
            reference = "the plain forward pass" if self._plain else "the prefill path"
            problems += differences(least, most_agreed, bound, "logits", reference)
        return fixture, eager, least, problems

    def _without_w8a8(
        self, fixture: StepFixture, candidate: Candidate, eager_NV: Tensor, recorded: Recorded
    ) -> tuple[Tensor, Recorded]:
        """Logits of the eager step with nothing rounded, in fresh memory, and its choices of experts; those that it has
        where it rounds nothing. The fixture is at its beginning, and is so again."""
        step = candidate.step
        if not quantizes_activations(self._parts, step.key.rows * step.key.width):
            return eager_NV, recorded
        again, recorded = DecodeStep(self._parts, step.key, Scratch(self._parts.device)), Recorded()
        again.slot_R.copy_(step.slot_R)
        with nothing_repeated(), self._parts.model.paths.choosing(recorded):
            logits_NV = candidate.eager(again).logits_NV
        fixture.restore()
        assert logits_NV is not None
        return logits_NV, recorded

    def _plausible_drafts(self, candidate: Candidate, fixture: StepFixture) -> None:
        """Let some drafts be what the target will choose, so that acceptance is tested at every count. The replay
        says what that is, because it is fast; a wrong one fails whatever it is fed."""
        step, width = candidate.step, candidate.step.key.width
        reach_R = torch.tensor([self._fixture_pool.number(0, width - 1) for _ in fixture.rows])
        reach, reach_R = int(reach_R.max()), reach_R.to(self._parts.device)
        for index in range(reach):
            output = candidate.replay()
            target_RW = output.decided_N[step.layout.target_slice].view(-1, width)[: len(fixture.rows)]
            fixture.propose(index, target_RW[:, index], reach_R > index)
            fixture.restore()

    def _distance_from_reference(
        self, fixture: StepFixture, key: GraphKey, got_NV: Tensor, recorded: Recorded
    ) -> tuple[float, float]:
        """Relative error of a step's logits from those of the reference, which takes its experts: the median over rows,
        of the worst position. And in how many of the choices both agree."""
        parts, own, width = self._parts, len(fixture.rows), key.width
        taken = Taken(recorded, mixtures(parts), own * width, 0 if key.dense else selecting(parts))
        state, slot_R = parts.state.tensors, fixture.slot_R
        token_RW = torch.cat([state.last_S[slot_R].unsqueeze(1), state.draft_SK[slot_R, : width - 1]], dim=1)
        position_RW = state.length_S[slot_R].unsqueeze(1) + torch.arange(width, device=parts.device)
        if self._plain:
            want_NV = plain_logits(parts.model, token_RW, fixture, taken)
        else:
            want_NV = self._prefilled(token_RW, position_RW, fixture, taken)
        error_N = (got_NV[: own * width] - want_NV).norm(dim=-1) / want_NV.norm(dim=-1)
        # NaN must not pass for small.
        error_RW = torch.nan_to_num(error_N, nan=torch.inf).view(own, width)
        # Whether to try another state is one decision for all ranks.
        return float(parts.group.broadcast(error_RW.median(dim=0).values.max())), shared(parts, taken)

    def _prefilled(self, token_RW: Tensor, position_RW: Tensor, fixture: StepFixture, taken: Taken) -> Tensor:
        """Logits of the prefill path, [R W, vocabulary]."""
        parts, (own, width) = self._parts, token_RW.shape
        # Of a slot's ring there are no copies, so its row has none.
        repeats = 1 if parts.cache.rings else -(-LEAST_PREFILLED // (own * width))
        slot_R, rows = fixture.slot_R.repeat(repeats), [*fixture.rows] * repeats
        token_T, position_T = (each_RW.repeat(repeats, 1).flatten() for each_RW in (token_RW, position_RW))
        cache_slot_T = parts.state.cache_slots(slot_R.repeat_interleave(width), position_T)
        cache_slot_T[own * width :] = 0  # one of a row's copies is written, the others go to the null page
        counts = (width,) * len(rows)
        batch = Batch(
            layout=BatchLayout(1, 0, counts, (True,) * len(rows)),
            position_T=position_T,
            cache_slot_T=cache_slot_T,
            decode=None,
            prefill=PrefillBatch(
                tuple(row.start for row in rows),
                counts,
                parts.state.tensors.page_SP[slot_R],
                tuple(row.slot for row in rows),
            ),
        )
        with nothing_repeated(), parts.model.paths.choosing(taken):
            return parts.model.logits(parts.model.forward(token_T, batch, parts.cache)[: own * width])
