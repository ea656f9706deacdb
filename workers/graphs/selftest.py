"""The proof that a replay computes what eager computes, on random state with poisoned padding.

For every captured step: slots, page tables, caches and drafts are random; what no row may touch is NaN (null page,
entries past a row's length), huge (page ids past its pages) or random (slots without a row). The step runs eagerly and
as a replay from the same state, and both must agree bit for bit in tokens, accepted counts, logits, cache writes and
slot state, and must have changed nothing else. Against a mistake that both share, the logits are compared with those
of the same tokens fed as a prefill chunk, which takes another path through attention and knows nothing of buckets.

Run before a replica serves: it overwrites slots and cache. All ranks run it together, from equal seeds.

Shape legend: R rows, W width, S slots, P pages, N logits rows, V vocabulary, C cached features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch

from kernels.page import NULL_PAGE, PAGE_TOKENS, pages_for
from workers.batch import Batch, PrefillBatch
from workers.decode_step import DecodeStep
from workers.plan import Admission, BatchLayout, GraphKey, PageGrant, SamplingParams
from workers.step import StepOutput, StepParts

HUGE_PAGE = 2147480000
"""A page id no pool has; adding a few to it still fits int32."""

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest norm of the difference from the prefill path, as a share of the logits' norm. The two forms of attention
round differently; a token that sees one entry too many or too few is off by far more."""

ATTEMPTS = 4
"""States on which the comparison with the prefill path is tried. Rounding may turn a router's choice over, which moves
a whole row of logits: that happens to a row now and then, a mistake happens to every row in every state."""


@dataclass(frozen=True)
class Candidate:
    """A step under test: `step` runs eagerly, `replay` is what will serve."""

    step: DecodeStep
    replay: Callable[[], StepOutput]


@dataclass(frozen=True)
class BucketReport:
    """The verdict on one graph."""

    key: GraphKey
    rows: int
    """Rows that were live; the others were padding."""
    accepted: int
    """Drafts that stood, all rows together."""
    logits_error: float
    """Relative norm of the difference from the prefill path: the median over rows, of the worst position."""
    seconds: float
    problems: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """Nothing differed."""
        return not self.problems


@dataclass(frozen=True)
class _Row:
    slot: int
    length: int
    pages: tuple[int, ...]


class _Memory:
    """Copies of all that a step may change: slot state, sampling tables, and the pages in play."""

    def __init__(self, parts: StepParts, pages: Sequence[int]) -> None:
        self._live = [getattr(parts.state.tensors, field.name) for field in fields(parts.state.tensors)]
        if parts.sampling is not None:
            tables = parts.sampling.tables
            self._live += [getattr(tables, field.name) for field in fields(tables)] + [parts.sampling.fault_1]
        self._pages_P = torch.tensor(pages, dtype=torch.int64, device=parts.device)
        self._cache = parts.cache.layers
        self.tensors = [tensor.clone() for tensor in self._live]
        self.layers = [layer[self._pages_P] for layer in self._cache]

    def restore(self) -> None:
        for live, kept in zip(self._live, self.tensors, strict=True):
            live.copy_(kept)
        for layer, kept in zip(self._cache, self.layers, strict=True):
            layer[self._pages_P] = kept

    def differs(self, other: _Memory) -> list[str]:
        """What differs from another copy of the same pages, bit for bit; the null page (first of `pages`) may."""
        names = ["length", "last token", "drafts", "page table", *["sampling tables"] * len(self.tensors)]
        found = [name for name, a, b in zip(names, self.tensors, other.tensors, strict=False) if not _same_bits(a, b)]
        found += [
            f"cache of layer {index}"
            for index, (a, b) in enumerate(zip(self.layers, other.layers, strict=True))
            if not _same_bits(a[1:], b[1:])
        ]
        return sorted(set(found))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


class SelfTest:
    """Tests candidates on one rank's parts, one after the other."""

    def __init__(self, parts: StepParts, seed: int = 0) -> None:
        self._parts = parts
        self._random = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def run(self, candidates: Sequence[Candidate], progress: Callable[[str], None] | None = None) -> list[BucketReport]:
        """One report a candidate, in order. Slots and cache are scrubbed afterwards."""
        reports = []
        try:
            for candidate in candidates:
                reports.append(self._bucket(candidate))
                if progress is not None and not reports[-1].passed:
                    progress(f"self-test: {reports[-1].key}: {'; '.join(reports[-1].problems)}")
        finally:
            self._scrub()
        return reports

    def _bucket(self, candidate: Candidate) -> BucketReport:
        begin, step = time.perf_counter(), candidate.step
        key = step.key
        problems: list[str] = []
        bound = TOLERANCE[self._parts.cache.layers[0].dtype]
        error = torch.inf
        for _ in range(ATTEMPTS):
            rows = self._rows(key)
            problems += self._fill(rows)
            step.slot_R.fill_(-1)
            step.slot_R[: len(rows)] = torch.tensor([row.slot for row in rows], dtype=torch.int64)
            self._plausible_drafts(step, rows)
            pages = [NULL_PAGE, *sorted(page for row in rows for page in row.pages)]
            before = _Memory(self._parts, pages)
            error = min(error, self._distance_from_prefill(step, rows))
            before.restore()
            if error <= bound:
                break
        else:
            problems.append(f"logits are {error:.1e} away from the prefill path, more than {bound:.0e}")
        eager_decided, eager_logits = self._outcome(step.run())
        eager = _Memory(self._parts, pages)
        before.restore()
        replay_decided, replay_logits = self._outcome(candidate.replay())
        replay = _Memory(self._parts, pages)
        live = len(rows) * key.width
        count = step.layout.logits_rows
        if not torch.equal(eager_decided[:live], replay_decided[:live]):
            problems.append("target tokens differ")
        accepted = eager_decided[count : count + len(rows)]
        if not torch.equal(accepted, replay_decided[count : count + len(rows)]):
            problems.append("accepted counts differ")
        if int(replay_decided[-1]) or int(eager_decided[-1]):
            problems.append("logits or ids were out of range")
        if not _same_bits(eager_logits[:live], replay_logits[:live]):
            problems.append("logits differ")
        problems += [f"{what} differs" for what in eager.differs(replay)]
        problems += self._foreign_changes(rows, key, before, replay)
        return BucketReport(
            key, len(rows), int(accepted.sum()), error, time.perf_counter() - begin, tuple(dict.fromkeys(problems))
        )

    def _outcome(self, output: StepOutput) -> tuple[torch.Tensor, torch.Tensor]:
        assert output.logits_NV is not None
        return output.decided_N.clone(), output.logits_NV.clone()

    def _randint(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self._random))

    def _rows(self, key: GraphKey) -> list[_Row]:
        """As many live rows as slots and pages allow, one short of the bucket at times, with random lengths: short
        ones, those around a page's end, and long ones."""
        state, width = self._parts.state, self._parts.width
        overshoot = 2 * width
        free = torch.randperm(self._parts.cache.pages - 1, generator=self._random) + 1
        slots = torch.randperm(state.slots, generator=self._random).tolist()
        wanted = max(1, key.rows - self._randint(0, 1))
        rows: list[_Row] = []
        used = 0
        most = min(min(state.pages_per_row, 8) * PAGE_TOKENS, self._parts.model.max_positions) - overshoot
        for slot in slots[:wanted]:
            kind = self._randint(0, 3)
            length = (1, 1 + self._randint(0, 5), PAGE_TOKENS - self._randint(0, width), self._randint(1, most))[kind]
            length = max(1, min(length, most))
            need = pages_for(length + overshoot)
            if used + need > len(free):
                length, need = 1, 1
                if used + need > len(free):
                    break
            rows.append(_Row(slot, length, tuple(free[used : used + need].tolist())))
            used += need
        if not rows:
            raise RuntimeError("the self-test needs a pool of at least 2 pages, the null page included")
        return rows

    def _fill(self, rows: Sequence[_Row]) -> list[str]:
        """Random state for the rows, poison for all else; says so if a newcomer's table keeps a former page."""
        parts, state = self._parts, self._parts.state
        tensors, vocab = state.tensors, parts.model.config.vocab_size
        # Slots without a row hold what a former tenant left, so that a step that runs them by mistake shows.
        tensors.length_S.copy_(torch.randint(1, PAGE_TOKENS // 2, tensors.length_S.shape, generator=self._random))
        for tensor in (tensors.last_S, tensors.draft_SK):
            tensor.copy_(torch.randint(0, vocab, tensor.shape, generator=self._random))
        tensors.page_SP.zero_()
        for row in rows:
            tensors.page_SP[row.slot] = HUGE_PAGE
        admissions = [Admission(row.slot, self._sampling()) for row in rows]
        state.admit(admissions)
        state.grant([PageGrant(row.slot, 0, row.pages) for row in rows])
        if parts.sampling is not None:
            parts.sampling.admit(admissions)
        problems = []
        for row in rows:
            tail_P = tensors.page_SP[row.slot, len(row.pages) :]
            if bool((tail_P != NULL_PAGE).any()):
                problems.append("a newcomer's page table keeps former pages")
            tail_P.fill_(HUGE_PAGE)
            tensors.length_S[row.slot] = row.length
            for layer in parts.cache.layers:
                layer[list(row.pages)] = self._entries(row, layer)
        for layer in parts.cache.layers:
            layer[NULL_PAGE] = torch.nan
        return problems

    def _entries(self, row: _Row, layer: torch.Tensor) -> torch.Tensor:
        """Random latents up to the row's length, NaN behind; the draft layer's cache reaches one entry further."""
        entries = torch.randn(len(row.pages) * PAGE_TOKENS, layer.shape[-1], generator=self._random)
        draft = self._parts.width > 1 and layer is self._parts.cache.layers[-1]
        entries[row.length + draft :] = torch.nan
        return entries.view(len(row.pages), PAGE_TOKENS, -1).to(layer.device, layer.dtype)

    def _sampling(self) -> SamplingParams:
        temperature = 0.7 * self._randint(0, 1)
        return SamplingParams(100, temperature=temperature, seed=self._randint(0, 2**40))

    def _plausible_drafts(self, step: DecodeStep, rows: Sequence[_Row]) -> None:
        """Let some drafts be what the target will choose, so that acceptance is tested at every count."""
        state = self._parts.state.tensors
        pages = [NULL_PAGE, *(page for row in rows for page in row.pages)]
        reach = torch.randint(0, step.key.width, (len(rows),), generator=self._random).tolist()
        for index in range(step.key.width - 1):
            before = _Memory(self._parts, pages)
            target_RW = step.run().decided_N[: step.layout.logits_rows].view(step.key.rows, -1).clone()
            before.restore()
            for number, row in enumerate(rows):
                if reach[number] > index:
                    state.draft_SK[row.slot, index] = target_RW[number, index]

    def _distance_from_prefill(self, step: DecodeStep, rows: Sequence[_Row]) -> float:
        """Relative error of the step's logits from those of the same tokens fed as prefill chunks: the median over
        rows, of the worst position."""
        parts, width = self._parts, step.key.width
        state = parts.state.tensors
        slot_R = torch.tensor([row.slot for row in rows], dtype=torch.int64, device=parts.device)
        token_RW = torch.cat([state.last_S[slot_R].unsqueeze(1), state.draft_SK[slot_R, : width - 1]], dim=1)
        position_RW = state.length_S[slot_R].unsqueeze(1) + torch.arange(width, device=parts.device)
        token_T, position_T, slot_T = token_RW.flatten(), position_RW.flatten(), slot_R.repeat_interleave(width)
        page_NP = state.page_SP[slot_R]
        batch = Batch(
            layout=BatchLayout(1, 0, (width,) * len(rows), (True,) * len(rows)),
            position_T=position_T,
            cache_slot_T=parts.state.cache_slots(slot_T, position_T),
            decode=None,
            prefill=PrefillBatch(tuple(row.length for row in rows), (width,) * len(rows), page_NP),
        )
        before = _Memory(parts, [NULL_PAGE, *(page for row in rows for page in row.pages)])
        want_NV = parts.model.logits(parts.model.forward(token_T, batch, parts.cache)).clone()
        before.restore()
        got_NV = self._outcome(step.run())[1][: len(rows) * width]
        error_N = (got_NV - want_NV).norm(dim=-1) / want_NV.norm(dim=-1)
        # NaN must not pass for small.
        error_RW = torch.nan_to_num(error_N, nan=torch.inf).view(len(rows), width)
        return float(error_RW.median(dim=0).values.max())

    def _foreign_changes(self, rows: Sequence[_Row], key: GraphKey, before: _Memory, after: _Memory) -> list[str]:
        """Slots without a row must be as before, and of the pages only the entries a step may write have changed."""
        problems = []
        state = self._parts.state
        others = sorted(set(range(state.slots + 1)) - {row.slot for row in rows})
        for old, new in zip(before.tensors[:4], after.tensors[:4], strict=True):
            if not _same_bits(old[others], new[others]):
                problems.append("a slot without a row changed")
        place = {page: index + 1 for index, page in enumerate(sorted(p for row in rows for p in row.pages))}
        for index, (old, new) in enumerate(zip(before.layers, after.layers, strict=True)):
            draft = self._parts.width > 1 and index == len(before.layers) - 1
            kept = torch.ones(old.shape[0], PAGE_TOKENS, dtype=torch.bool)
            kept[0] = False
            for row in rows:
                last = row.length + key.width + (max(key.drafts, 1) if draft else 0)
                for position in range(row.length + draft, last):
                    kept[place[row.pages[position // PAGE_TOKENS]], position % PAGE_TOKENS] = False
            kept = kept.to(old.device)
            if not _same_bits(old[kept], new[kept]):
                problems.append(f"cache of layer {index} changed outside the rows' own entries")
        return problems

    def _scrub(self) -> None:
        """Leave nothing of the test behind: not a NaN, not a page id, not a parameter."""
        parts = self._parts
        tensors = parts.state.tensors
        for tensor in (tensors.length_S, tensors.last_S, tensors.draft_SK, tensors.page_SP):
            tensor.zero_()
        for layer in parts.cache.layers:
            layer.zero_()
        if parts.sampling is not None:
            greedy = SamplingParams(1, temperature=0.0)
            parts.sampling.admit([Admission(slot, greedy) for slot in range(parts.state.slots)])
            parts.sampling.fault_1.zero_()
