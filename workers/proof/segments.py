"""The proof that replayed segments compute what eager ones compute: a random mixed step in every token bucket.

Decode rows, chunks that end their prompt, chunks that do not, with cached context and suppressed writes, fill the
bucket all but a few tokens, as far as pages allow. The step runs eagerly in fresh memory of the bucket's size, and as a
replay in memory that was poison before; what no row may read (the null page, entries past a row's, the draft layer's
entry 0) is NaN. Both must agree bit for bit in tokens, accepted counts, logits, cache and slot state, and must have
changed nothing that is not theirs. Against a mistake that both share, the logits are compared with those of the same
step without padding.

Shape legend: P pages in play, K = 64 entries a page, S slots, N logits rows, V vocabulary, C cached features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.page import NULL_PAGE, PAGE_TOKENS, pages_for
from kernels.repeat import nothing_repeated
from workers.memory.scratch import Scratch
from workers.proof.decode_steps import ATTEMPTS, tolerance
from workers.proof.scene import HUGE_PAGE, differ, scrub, slot_tensors
from workers.protocol.plan import Admission, PageGrant, PrefillRow, SamplingParams, StepPlan
from workers.protocol.report import BucketReport
from workers.step.mixed import MixedStep
from workers.step.parts import StepOutput, StepParts
from workers.step.stage import Stage

MOST_DECODE_ROWS = 6
MOST_CONTEXT = 3 * PAGE_TOKENS
POISON = 0xFF
"""A float filled with it is NaN, an id -1."""


@dataclass(frozen=True)
class _Row:
    """A row of the plan: entries below `length` are cached, the step writes those from `write_from` to `end`."""

    slot: int
    length: int
    write_from: int
    end: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class _Outcome:
    decided_N: Tensor
    logits_NV: Tensor
    slots: list[Tensor]
    cache: list[Tensor]


class SegmentProof:
    """Tests the stages of one rank, one after the other. All ranks do it together, from equal seeds."""

    def __init__(self, parts: StepParts, seed: int = 0) -> None:
        self._parts = parts
        self._host = torch.Generator().manual_seed(seed)
        self._noise = torch.Generator(parts.device).manual_seed(seed)

    @torch.inference_mode()
    def run(self, stages: Sequence[Stage], progress: Callable[[str], None] | None = None) -> list[BucketReport]:
        """One report a stage, in order. Rows and their pages are scrubbed afterwards."""
        reports: list[BucketReport] = []
        for stage in stages:
            reports.append(self._bucket(stage))
            if progress is not None and not reports[-1].passed:
                progress(f"self-test: {reports[-1]}: {'; '.join(reports[-1].problems)}")
        return reports

    def _bucket(self, stage: Stage) -> BucketReport:
        begin, parts = time.perf_counter(), self._parts
        bound, least = tolerance(parts.cache), torch.inf
        problems: list[str] = []
        for _ in range(ATTEMPTS):
            plan, rows = self._plan(stage.tokens)
            scene = _Scene(parts, rows, self._host, self._noise)
            try:
                with nothing_repeated():  # what is repeated is to be proven
                    eager = scene.outcome(plan, self._fresh(stage.tokens))
                    exact = scene.outcome(plan, self._fresh(plan.layout.tokens))
                stage.fill(POISON)
                problems += scene.problems(plan, eager, scene.outcome(plan, stage))
            except IndexError as oops:
                # A CPU notices what would read or write anywhere on a GPU.
                problems.append(f"indexed out of bounds: {oops}")
                break
            finally:
                scene.scrub()
            error_N = (eager.logits_NV - exact.logits_NV).norm(dim=-1) / exact.logits_NV.norm(dim=-1)
            # Whether to try another state is one decision for all ranks. NaN must not pass for small.
            error = float(parts.group.broadcast(torch.nan_to_num(error_N, nan=torch.inf).median()))
            least = min(least, error)
            if least <= bound:
                break
        else:
            problems.append(f"logits are {least:.1e} away from the step without padding, more than {bound:.0e}")
        return BucketReport(
            kind="mixed",
            bucket=f"{stage.tokens} tokens",
            seconds=time.perf_counter() - begin,
            problems=tuple(dict.fromkeys(problems)),
            drafts=plan.drafts,
            rows=len(rows),
            logits_error=least,
        )

    def _fresh(self, tokens: int) -> Stage:
        device = self._parts.device
        return Stage(self._parts, tokens, Scratch(device), Scratch(device))

    def _number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=self._host))

    def _plan(self, bucket: int) -> tuple[StepPlan, list[_Row]]:
        """A step of nearly `bucket` tokens, fewer where slots, pages or positions do not suffice."""
        parts, width = self._parts, self._parts.width
        longest = min(parts.model.max_positions, parts.state.pages_per_row * PAGE_TOKENS) - 2 * width
        free = (torch.randperm(parts.cache.pages - 1, generator=self._host) + 1).tolist()
        slots = torch.randperm(parts.state.slots, generator=self._host).tolist()
        left = bucket - self._number(0, bucket // 16)
        rows: list[_Row] = []
        prefill: list[PrefillRow] = []

        def take(length: int, write_from: int, end: int) -> _Row:
            need = pages_for(end + 2 * width)
            row = _Row(slots.pop(), length, write_from, end, tuple(free[:need]))
            del free[:need]
            rows.append(row)
            return row

        for _ in range(self._number(0, min(MOST_DECODE_ROWS, parts.state.slots - 1, (left - 1) // width))):
            length = self._number(1, min(MOST_CONTEXT, longest - width))
            # A page is left for the prefill row that every mixed step has.
            if pages_for(length + 3 * width) < len(free):
                take(length, length, length + width)
                left -= width
        decode = tuple(row.slot for row in rows)
        while left > 0 and slots and free:
            start = self._number(0, 1) * self._number(0, min(MOST_CONTEXT, longest - 1))
            room = min(longest, len(free) * PAGE_TOKENS - 2 * width)
            if start >= room:
                start = 0
            # The last slot takes all that is left, and a chunk is long enough to fill a large bucket with few rows.
            count = min(left, room - start, left if len(slots) == 1 else self._number(1, max(left, 1)))
            if count < 1:
                break
            final = not prefill or bool(self._number(0, 1))
            suppressed = min(self._number(0, 1), start)
            row = take(start + suppressed, start + suppressed, start + count)
            tokens = torch.randint(0, parts.model.config.vocab_size, (count,), generator=self._host).tolist()
            prefill.append(PrefillRow(row.slot, start, tuple(tokens), row.write_from, final, -1 if final else 1))
            left -= count
        if not prefill:
            raise RuntimeError("the self-test needs a pool of at least 2 pages, the null page included")
        return StepPlan(1, width, width - 1, decode, tuple(prefill)), rows


class _Scene:
    """Rows in slots and cache, with copies of all that a step may change."""

    def __init__(self, parts: StepParts, rows: Sequence[_Row], host: torch.Generator, noise: torch.Generator) -> None:
        self._parts, self._rows, device = parts, rows, parts.device
        nobody = [(NULL_PAGE, 0, -1, -1, -1)]
        entries = nobody + [
            (page, PAGE_TOKENS * index, row.length, row.write_from, row.end)
            for row in rows
            for index, page in enumerate(row.pages)
        ]
        page_P, begin_P, length_P, from_P, end_P = torch.tensor(entries, dtype=torch.int64).to(device).unbind(1)
        position_PK = begin_P.unsqueeze(1) + torch.arange(PAGE_TOKENS, device=device)
        self._page_P = page_P
        live_P1, length_P1 = (length_P >= 0).unsqueeze(1), length_P.unsqueeze(1)
        poison_PK = (position_PK >= length_P1) | ~live_P1
        own_PK = (position_PK >= from_P.unsqueeze(1)) & (position_PK < end_P.unsqueeze(1))
        self._own = [own_PK] * len(parts.cache.layers)
        poisons = [poison_PK] * len(parts.cache.layers)
        if parts.width > 1:
            # The draft layer's entries lie one further, suppression does not reach it, and its drafts follow the row's.
            poisons[-1] = (position_PK > length_P1) | (position_PK == 0) | ~live_P1
            self._own[-1] = (position_PK >= from_P.unsqueeze(1)) & (position_PK < end_P.unsqueeze(1) + parts.width)
        for layer, poison in zip(parts.cache.layers, poisons, strict=True):
            content_PKC = torch.empty(len(page_P), *layer.shape[1:], dtype=layer.dtype, device=device)
            layer.index_copy_(
                0, page_P, content_PKC.normal_(generator=noise).masked_fill_(poison.unsqueeze(-1), torch.nan)
            )
        self._fill_slots(host)
        self._live = slot_tensors(parts)
        self._kept = [tensor.clone() for tensor in self._live]
        self._contents = [layer.index_select(0, page_P) for layer in parts.cache.layers]

    def _fill_slots(self, host: torch.Generator) -> None:
        parts, state = self._parts, self._parts.state.tensors
        vocab = parts.model.config.vocab_size
        for tensor in (state.last_S, state.draft_SK):
            tensor.copy_(torch.randint(0, vocab, tensor.shape, generator=host))
        admissions = [
            Admission(row.slot, SamplingParams(100, temperature=2.0 * (index % 2), seed=index))
            for index, row in enumerate(self._rows)
        ]
        parts.state.admit(admissions)
        parts.state.grant([PageGrant(row.slot, 0, row.pages) for row in self._rows])
        if parts.sampling is not None:
            parts.sampling.admit(admissions)
        for row in self._rows:
            state.length_S[row.slot] = row.length
            state.page_SP[row.slot, len(row.pages) :] = HUGE_PAGE

    def outcome(self, plan: StepPlan, stage: Stage) -> _Outcome:
        """What the step leaves when it runs in `stage`; everything is as before afterwards."""
        output: StepOutput = MixedStep(self._parts).run(plan, stage)
        assert output.logits_NV is not None
        layers = self._parts.cache.layers
        found = _Outcome(
            output.decided_N.clone(),
            output.logits_NV.clone(),
            [tensor.clone() for tensor in self._live],
            [layer.index_select(0, self._page_P) for layer in layers],
        )
        for live, kept in zip(self._live, self._kept, strict=True):
            live.copy_(kept)
        for layer, content_PKC in zip(layers, self._contents, strict=True):
            layer.index_copy_(0, self._page_P, content_PKC)
        return found

    def problems(self, plan: StepPlan, eager: _Outcome, replay: _Outcome) -> list[str]:
        """What differs between the two, and what either should not have changed."""
        eager_F, replay_F = (outcome.decided_N[plan.layout.fault_slice] != 0 for outcome in (eager, replay))
        found = [
            ("decisions differ", differ(eager.decided_N, replay.decided_N)),
            ("logits differ", differ(eager.logits_NV, replay.logits_NV)),
            ("logits or ids were out of range", eager_F.any() | replay_F.any()),
        ]
        found += [("slot state differs", differ(a, b)) for a, b in zip(eager.slots, replay.slots, strict=True)]
        used = {*plan.decode_slots, *(row.slot for row in plan.prefill if row.final)}
        others = [slot for slot in range(self._parts.state.slots) if slot not in used]
        for kept, now in zip(self._kept, replay.slots, strict=True):
            if others and kept.shape[0] == self._parts.state.slots + 1:
                found.append(("a slot that was not sampled changed", differ(kept[others], now[others])))
        for layer, (before, a, b) in enumerate(zip(self._contents, eager.cache, replay.cache, strict=True)):
            # The null page, first of all, is for everybody to write.
            found.append((f"cache of layer {layer} differs", differ(a[1:], b[1:])))
            kept_PK1 = ~self._own[layer][1:].unsqueeze(-1)
            outside = differ(before[1:].where(kept_PK1, 0), b[1:].where(kept_PK1, 0))
            found.append((f"cache of layer {layer} changed outside the rows' own entries", outside))
        # One wait for all of them.
        told = torch.stack([wrong.view(()) for _, wrong in found]).tolist()
        return list(dict.fromkeys(text for (text, _), wrong in zip(found, told, strict=True) if wrong))

    def scrub(self) -> None:
        """Leave nothing of the scene behind."""
        scrub(self._parts, self._page_P)
