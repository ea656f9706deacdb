"""Sampling state of a replica: which parameters every slot samples with, what it generated, and the calls a step makes.

Everything a token depends on lives in device tables (`kernels.sampling.SlotTables`), so work launched ahead of the
host uses the values of its own step. The host remembers one thing more, which kinds of work the tenant of each slot
needs, and only to leave work out: a row's token is the same whether or not other rows make the step do more.

Memory: 13 KB per slot, nearly all of it room for biases; with penalties also a count for every id, 4 bytes * slots *
vocabulary (256 slots * 129,280 ids: 126 MiB); and up to 64 MiB for log-probabilities (`workers.step.logprobs`). A
replica takes all of it by `allocate` before it sizes its cache; without that the counts come with the first request
with penalties.

Shape legend: S slots, R sampled rows, N logits rows, D decode rows, W width, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from kernels.runtime.dependent import launches_dependently
from kernels.sampling import (
    ALL_FEATURES,
    FLOORS,
    NEUTRAL_REAL,
    Feature,
    SampledRows,
    SampleWorkspace,
    SlotTables,
    TokenMasks,
    count_tokens,
    real_columns,
    sample_rows,
    sample_tokens,
)
from workers.memory.scratch import Scratch, on_device
from workers.protocol.plan import MAX_LOGIT_BIAS, MAX_STOP_IDS, Admission, BatchLayout, SamplingParams
from workers.protocol.request import TABLE
from workers.step.logprobs import Logprobs, Taken

_SEED_BITS = 64


class SamplingFault(RuntimeError):
    """Token ids outside the vocabulary where a step decided: the numbers of this replica are broken."""

    def __init__(self, ids: int, vocab: int) -> None:
        super().__init__(f"{ids} token ids outside the vocabulary of {vocab} in one step, whose tokens are void")


class SamplingState:
    """Parameters, penalty counts and faults of every slot. A padded row has the slot one past the last, or -1:
    it samples token 0 and counts nothing."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        if slots < 1 or vocab < 1:
            raise ValueError(f"sampling needs at least one slot and one token id, not {slots} and {vocab}")
        self.slots, self.vocab, self.device = slots, vocab, device
        # One row more than slots: index -1 finds neutral parameters there.
        self.tables = SlotTables.allocate(slots + 1, MAX_STOP_IDS, MAX_LOGIT_BIAS, device, _defaults())
        self._columns = real_columns()
        self.fault_1 = torch.zeros(1, dtype=torch.int64, device=device)
        """Ids that were none so far; `kernels.decode_state.accept_drafts` adds to it too. The first ends the replica
        (`SamplingFault`)."""
        self.invalid_drafts_1 = torch.zeros(1, dtype=torch.int64, device=device)
        """Drafts from logits that were no finite numbers. They are token 0, seldom accepted and never of harm."""
        self.dependent = launches_dependently(device)
        """Launch with programmatic dependent launch."""
        self._logprobs = Logprobs(vocab, device)
        self._asked = [-1] * slots
        self._named: list[tuple[int, ...]] = [()] * slots
        self._features = [Feature(0)] * slots
        self._reserved = False

    def allocate(self, logits_rows: int) -> None:
        """Take all memory that any request may need, for steps of up to so many logits rows."""
        self._allocate_counts()
        self._logprobs.allocate(logits_rows)

    def reserve(self) -> None:
        """Allocate the counts now and do the full work for every row from now on, as a captured graph needs it."""
        self._allocate_counts()
        self._reserved = True

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Give slots to new tenants. Nothing of the former tenant remains visible.

        Raises ValueError for a slot or a token id out of range and for more stop ids or biases than a slot holds;
        requests are checked where they enter, so this is a defect there. No slot changes then.
        """
        for admission in admissions:
            self._check(admission)
        if not admissions:
            return
        slots = [admission.slot for admission in admissions]
        for admission in admissions:
            self._features[admission.slot] = needed_features(admission.sampling, self.vocab)
            self._asked[admission.slot] = admission.sampling.logprobs
            self._named[admission.slot] = admission.sampling.logprob_token_ids
        sampling = [admission.sampling for admission in admissions]
        stops = [self._stop_ids(s) for s in sampling]
        tables, device = self.tables, self.device
        real = [[getattr(s, name) for name in self._columns] for s in sampling]
        whole = [
            (
                _signed(a.sampling.seed),
                a.sampling.top_k,
                a.sampling.min_tokens if stop and not a.grammar else 0,  # a grammar's masks see to it
                len(a.sampling.logit_bias),
                a.generated,
            )
            for a, stop in zip(admissions, stops, strict=True)
        ]
        slot_A = on_device(slots, torch.int64, device)
        tables.real_SF[slot_A] = on_device(real, torch.float32, device)
        tables.whole_SI[slot_A] = on_device(whole, torch.int64, device)
        # Rows without the feature are read, if at all, without effect: min_tokens is 0, biases are not.
        tables.bias_SB.index_fill_(0, slot_A, 0.0)
        for slot, params, stop in zip(slots, sampling, stops, strict=True):
            if stop:
                filled = [*stop, *[stop[0]] * (MAX_STOP_IDS - len(stop))]
                tables.stop_SK[slot] = on_device(filled, torch.int64, device)
            if params.logit_bias:
                ids, values = zip(*sorted(params.logit_bias, key=lambda entry: entry[0]), strict=True)
                tables.bias_id_SB[slot, : len(ids)] = on_device(ids, torch.int64, device)
                tables.bias_SB[slot, : len(ids)] = on_device(values, torch.float32, device)
        for admission in admissions:
            if admission.sampling.has_penalties:
                self._count_history(admission)

    def _live(self) -> list[torch.Tensor]:
        tables = [getattr(self.tables, field.name) for field in dataclasses.fields(self.tables)]
        return [*tables, self.fault_1, self.invalid_drafts_1]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the device that `kept` takes."""
        return sum(tensor.nbytes for tensor in self._live())

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Put all that is known of the slots back at the end of the block."""
        live = self._live()
        copies = [tensor.clone() for tensor in live]
        known = [*self._asked], [*self._named], [*self._features]
        try:
            yield
        finally:
            for tensor, copy in zip(live, copies, strict=True):
                tensor.copy_(copy)
            self._asked, self._named, self._features = known

    def target_tokens(
        self,
        logits_NV: torch.Tensor,
        layout: BatchLayout,
        slot_R: torch.Tensor,
        fed_DW: torch.Tensor,
        position_N: torch.Tensor,
        *,
        ahead: int = 0,
        out: torch.Tensor | None = None,
        nonfinite: torch.Tensor | None = None,
        scratch: Scratch | None = None,
        masks: TokenMasks | None = None,
    ) -> torch.Tensor:
        """int64 [N]: the token of every logits row of `layout`. `logits_NV` (any float dtype) is not changed.

        `fed_DW`: what the decode rows fed, the last token and the drafts; a row's position j samples as if its drafts
        before j had been generated. `position_N` + `ahead`: absolute position of the token that is sampled (one past
        the fed one). The result goes to `out` if given; on a GPU everything else comes from `scratch` if given, so
        that nothing is allocated. `nonfinite` (int64 [N]) gets 1 for rows without a finite maximum, whose token 0 means
        nothing, and 0 for others; without it `fault_1` counts them. `masks`: which ids rows may have.
        """
        draft_DX = fed_DW[:, 1:] if self._any(Feature.PENALTIES | Feature.MIN_TOKENS) else None
        rows = SampledRows(slot_R, position_N, ahead, layout.width, layout.decode_rows, draft_DX, masks=masks)
        return self._sample(logits_NV, rows, self.fault_1, out, nonfinite, scratch)

    def draft_tokens(
        self,
        logits_RV: torch.Tensor,
        slot_R: torch.Tensor,
        position_R: torch.Tensor,
        drafted_SX: torch.Tensor | None = None,
        *,
        out: torch.Tensor | None = None,
        scratch: Scratch | None = None,
    ) -> torch.Tensor:
        """int64 [R]: the draft of every sampled row from the draft layer's logits, with the parameters and the noise
        that will choose the target's token at `position_R`. `drafted_SX`: this step's drafts before it (all X of
        them), by slot, which penalties and min_tokens then count as generated. `out` and `scratch` as in
        `target_tokens`."""
        before = 0 if drafted_SX is None else drafted_SX.shape[1]
        rows = SampledRows(slot_R, position_R, draft=drafted_SX, by_slot=drafted_SX is not None, before=before)
        return self._sample(logits_RV, rows, self.invalid_drafts_1, out, None, scratch)

    def commit(self, slot_R: torch.Tensor, token_RW: torch.Tensor, count_R: torch.Tensor, more: int = 0) -> None:
        """The first `count_R` + `more` tokens of each row of `token_RW` were generated by their slots."""
        penalties = self._any(Feature.PENALTIES) or self._reserved
        count_tokens(
            self.tables,
            slot_R,
            token_RW,
            count_R,
            self.vocab,
            self.fault_1,
            penalties,
            more=more,
            dependent=self.dependent,
        )

    def logprobs(
        self, logits_NV: torch.Tensor, token_N: torch.Tensor, layout: BatchLayout, slots: Sequence[int]
    ) -> Taken | None:
        """Log-probabilities in the logits rows of those sampled rows, of these `slots`, whose tenants asked for them;
        None if nobody did. `token_N` (int64 [N]): the target's tokens."""
        asked = [row for row, slot in enumerate(slots) if self._asked[slot] >= 0]
        if not asked:
            return None
        most = max(self._asked[slots[row]] for row in asked)
        rows = [(row, n) for row in asked for n in layout.logits_rows_of(row)]
        named = [self._named[slots[row]] for row, _ in rows]
        return self._logprobs.take(logits_NV, token_N, [n for _, n in rows], most, named)

    @property
    def scorer(self) -> Logprobs:
        """Computes the log-probabilities of prompts' tokens."""
        return self._logprobs

    def _sample(
        self,
        logits_NV: torch.Tensor,
        rows: SampledRows,
        fault_1: torch.Tensor,
        out: torch.Tensor | None,
        nonfinite_N: torch.Tensor | None,
        scratch: Scratch | None,
    ) -> torch.Tensor:
        if self.device.type == "cpu":
            token_N = self._sample_in_groups(logits_NV, rows, fault_1, nonfinite_N)
            return token_N if out is None else out.copy_(token_N)
        scratch = scratch or Scratch(self.device)
        token_N = torch.empty_like(rows.position_N) if out is None else out
        with scratch.scope():
            workspace = SampleWorkspace.allocate(rows.logits_rows, self.vocab, scratch.empty)
            features = ALL_FEATURES if self._reserved else self._union()
            sample_rows(
                logits_NV,
                rows,
                self.tables,
                token_N,
                fault_1,
                features,
                workspace,
                nonfinite_N=nonfinite_N,
                # Masks come by a copy, behind which nothing can be launched dependently.
                dependent=self.dependent and rows.masks is None,
            )
        return token_N

    def _sample_in_groups(
        self, logits_NV: torch.Tensor, rows: SampledRows, fault_1: torch.Tensor, nonfinite_N: torch.Tensor | None
    ) -> torch.Tensor:
        slot_N, position_N, draft_NX, window_N = rows.expanded()
        token_N = torch.empty_like(slot_N)
        for features, members in self._groups(slot_N):
            if members is None:
                sample_tokens(
                    logits_NV,
                    slot_N,
                    position_N,
                    self.tables,
                    token_N,
                    fault_1,
                    features,
                    draft_NX,
                    window_N,
                    nonfinite_N=nonfinite_N,
                    masks=rows.masks,
                )
                continue
            row_M = torch.tensor(members, dtype=torch.int64)
            token_M = torch.empty_like(row_M)
            nonfinite_M = None if nonfinite_N is None else torch.empty_like(row_M)
            sample_tokens(
                logits_NV[row_M],
                slot_N[row_M],
                position_N[row_M],
                self.tables,
                token_M,
                fault_1,
                features,
                None if draft_NX is None else draft_NX[row_M],
                None if window_N is None else window_N[row_M],
                nonfinite_N=nonfinite_M,
                masks=None if rows.masks is None else rows.masks.of(row_M),
            )
            token_N[row_M] = token_M
            if nonfinite_N is not None and nonfinite_M is not None:
                nonfinite_N[row_M] = nonfinite_M
        return token_N

    def _groups(self, slot_N: torch.Tensor) -> list[tuple[Feature, list[int] | None]]:
        """Rows that need the same work, None for all of them. Only a CPU can look at the slots without waiting."""
        if self._reserved:
            return [(ALL_FEATURES, None)]
        rows_of: dict[Feature, list[int]] = {}
        for row, slot in enumerate(slot_N.tolist()):
            rows_of.setdefault(self._features[slot] if 0 <= slot < self.slots else Feature(0), []).append(row)
        if len(rows_of) == 1:
            return [(features, None) for features in rows_of]
        return list(rows_of.items())

    def _union(self) -> Feature:
        union = Feature(0)
        for features in set(self._features):
            union |= features
        return union

    def _any(self, features: Feature) -> bool:
        return self._reserved or bool(self._union() & features)

    def _check(self, admission: Admission) -> None:
        params = admission.sampling
        if not 0 <= admission.slot < self.slots:
            raise ValueError(f"slot {admission.slot} of {self.slots}")
        if len(params.logit_bias) > MAX_LOGIT_BIAS:
            raise ValueError(f"{len(params.logit_bias)} biased ids; at most {MAX_LOGIT_BIAS} are supported")
        if len(self._stop_ids(params)) > MAX_STOP_IDS:
            raise ValueError(f"{len(params.stop_ids)} stop ids; at most {MAX_STOP_IDS} are supported")
        biased = [token for token, _ in params.logit_bias]
        named = params.logprob_token_ids
        for what, ids in (("logit_bias", biased), ("logprob_token_ids", named), ("history", admission.history)):
            if ids and not 0 <= min(ids) <= max(ids) < self.vocab:
                raise ValueError(f"{what} names token ids outside the vocabulary of {self.vocab}")
        if not admission.generated >= 0 or (admission.history and admission.generated > len(admission.history)):
            raise ValueError(f"{admission.generated} generated tokens in a history of {len(admission.history)}")

    def _stop_ids(self, params: SamplingParams) -> list[int]:
        """Distinct stop ids that min_tokens has to mask. One outside the vocabulary cannot be sampled anyway."""
        if params.min_tokens <= 0:
            return []
        return sorted({token for token in params.stop_ids if 0 <= token < self.vocab})

    def _allocate_counts(self) -> None:
        if self.tables.seen_SV.shape[1] == 0:
            seen_SV = torch.zeros(self.slots + 1, self.vocab, dtype=torch.int32, device=self.device)
            self.tables = dataclasses.replace(self.tables, seen_SV=seen_SV)

    def _count_history(self, admission: Admission) -> None:
        self._allocate_counts()
        prompt = len(admission.history) - admission.generated
        # Each prompt id once, then every generated one: an even part counts the generated, the odd bit says prompt.
        ids = [*set(admission.history[:prompt]), *admission.history[prompt:]]
        weights = [1] * (len(ids) - admission.generated) + [2] * admission.generated
        id_2I = on_device([ids, weights], torch.int64, self.device)
        seen_V = self.tables.seen_SV[admission.slot].zero_()
        seen_V.index_add_(0, id_2I[0], id_2I[1].to(torch.int32))


def _defaults() -> dict[str, float]:
    """Values of parameters in the device tables that change nothing, but for those that the kernels know. ValueError
    for a parameter that nothing reads."""
    for row in TABLE:
        if row.name not in {*real_columns(), "top_k"}:
            raise ValueError(f"nothing in kernels/sampling reads the parameter {row.name}")
    return {row.name: row.default for row in TABLE if row.name not in NEUTRAL_REAL}


def needed_features(params: SamplingParams, vocab: int) -> Feature:
    """The work beyond an argmax that these parameters ask for."""
    features = Feature(0)
    if params.has_penalties:
        features |= Feature.PENALTIES
    if params.logit_bias:
        features |= Feature.BIAS
    if params.min_tokens > 0 and params.stop_ids:
        features |= Feature.MIN_TOKENS
    if params.temperature > 0:
        features |= Feature.NOISE
        if 0 < params.top_k < vocab:
            features |= Feature.TOP_K
        if params.top_p < 1:
            features |= Feature.TOP_P
        if any(getattr(params, row.name) != row.default for row in TABLE if row.name in FLOORS):
            features |= Feature.FLOOR
    return features


def _signed(seed: int) -> int:
    """The int64 with the same low 64 bits as `seed`."""
    low = seed & ((1 << _SEED_BITS) - 1)
    return low - (1 << _SEED_BITS) if low >> (_SEED_BITS - 1) else low
