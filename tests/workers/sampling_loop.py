"""A speculative decode loop around a toy language model, and the chi-square statistic: what the sampling tests share.

Shape legend: S slots, W width, X drafts, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kernels.decode_state import accept_drafts
from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.step.sampling import SamplingState

CPU = torch.device("cpu")

DraftSource = Callable[[SamplingState, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(state, last token, position of the first draft, drafts so far [S, i]) -> draft [S]."""
Rule = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(target [S, W], draft [S, X]) -> accepted [S]."""


def exact_rule(target_SW: torch.Tensor, draft_SX: torch.Tensor) -> torch.Tensor:
    accepted_S = torch.empty(len(target_SW), dtype=torch.int64)
    accept_drafts(target_SW, draft_SX, accepted_S)
    return accepted_S


def drafts_of(table_VV: torch.Tensor, told: bool = True) -> DraftSource:
    """A draft layer with its own distribution, sampled with the request's parameters and noise. `told`: it knows this
    step's earlier drafts when it applies penalties."""

    def draft(
        state: SamplingState, last_S: torch.Tensor, position_S: torch.Tensor, drafted_SX: torch.Tensor
    ) -> torch.Tensor:
        before_S = drafted_SX[:, -1] if drafted_SX.shape[1] else last_S
        slot_S = torch.arange(len(last_S))
        return state.draft_tokens(table_VV[before_S], slot_S, position_S, drafted_SX if told else None)

    return draft


def random_drafts(vocab: int, seed: int = 0) -> DraftSource:
    """Drafts that know nothing of model and noise."""
    generator = torch.Generator().manual_seed(seed)
    return lambda _state, last_S, _position, _drafted: torch.randint(0, vocab, last_S.shape, generator=generator)


def likeliest_drafts(table_VV: torch.Tensor) -> DraftSource:
    """The most probable token of the target itself: a point mass that does not depend on the noise."""

    def draft(
        _state: SamplingState, last_S: torch.Tensor, _position: torch.Tensor, drafted_SX: torch.Tensor
    ) -> torch.Tensor:
        return table_VV[drafted_SX[:, -1] if drafted_SX.shape[1] else last_S].argmax(1)

    return draft


class Loop:
    """Decodes all slots side by side with a model whose logits are a row of `table_VV`, chosen by the last token."""

    def __init__(
        self,
        table_VV: torch.Tensor,
        params: Sequence[SamplingParams],
        prompts: Sequence[tuple[int, ...]],
        drafts: DraftSource,
        rule: Rule = exact_rule,
    ) -> None:
        self.table_VV, self.drafts, self.rule = table_VV, drafts, rule
        self.slots, self.vocab = len(params), table_VV.shape[1]
        self.state = SamplingState(self.slots, self.vocab, CPU)
        self.state.admit([Admission(slot, p, 0, prompts[slot]) for slot, p in enumerate(params)])
        self.last_S = torch.tensor([prompt[-1] for prompt in prompts])
        self.length_S = torch.tensor([len(prompt) - 1 for prompt in prompts])
        self.tokens: list[list[int]] = [[] for _ in params]
        self.offered = self.accepted = 0
        self.first_drafts: list[tuple[int, int, bool]] = []
        """(token before, first draft, whether it was accepted) of every row and step."""

    def run(self, count: int, width: int) -> list[list[int]]:
        """The first `count` tokens of every slot."""
        draft_SX = self._draft(width)
        while min(map(len, self.tokens)) < count:
            draft_SX = self._step(draft_SX)
        assert int(self.state.fault_1) == 0
        return [tokens[:count] for tokens in self.tokens]

    def _draft(self, width: int) -> torch.Tensor:
        drafted_SX = torch.empty(self.slots, 0, dtype=torch.int64)
        for index in range(width - 1):
            draft_S = self.drafts(self.state, self.last_S, self.length_S + index + 1, drafted_SX)
            drafted_SX = torch.cat((drafted_SX, draft_S.unsqueeze(1)), dim=1)
        return drafted_SX

    def _step(self, draft_SX: torch.Tensor) -> torch.Tensor:
        slots, width = self.slots, draft_SX.shape[1] + 1
        fed_SW = torch.cat((self.last_S.unsqueeze(1), draft_SX), dim=1)
        position_SW = self.length_S.unsqueeze(1) + torch.arange(1, width + 1)
        slot_S = torch.arange(slots)
        target_N = self.state.target_tokens(
            self.table_VV[fed_SW.flatten()], BatchLayout(width, slots), slot_S, fed_SW, position_SW.flatten()
        )
        target_SW = target_N.view(slots, width)
        accepted_S = self.rule(target_SW, draft_SX)
        # Accepted drafts, then the target's token: under the exact rule this is the target's tokens throughout.
        emitted_SW = torch.where(torch.arange(width) < accepted_S.unsqueeze(1), fed_SW.roll(-1, 1), target_SW)
        self.state.commit(slot_S, emitted_SW, accepted_S + 1)
        for slot, (row, accepted) in enumerate(zip(emitted_SW.tolist(), accepted_S.tolist(), strict=True)):
            self.tokens[slot] += row[: accepted + 1]
        if width > 1:
            first_accepted_S = (accepted_S > 0).tolist()
            self.first_drafts += zip(self.last_S.tolist(), draft_SX[:, 0].tolist(), first_accepted_S, strict=True)
        self.offered += draft_SX.numel()
        self.accepted += int(accepted_S.sum())
        self.last_S = emitted_SW.gather(1, accepted_S.unsqueeze(1)).squeeze(1)
        self.length_S = self.length_S + accepted_S + 1
        return self._draft(width)


def chi_square_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Survival probability of Pearson's statistic over the rows of two tables of counts, the row totals given. Cells
    that expect less than 5 are pooled within their row; an observation where nothing is expected gives 0."""
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    statistic, freedom = 0.0, 0
    for seen, mean in zip(observed.double(), expected.double(), strict=True):
        large = mean >= 5
        pooled = float(mean[~large].sum())
        cells = list(zip(seen[large].tolist(), mean[large].tolist(), strict=True))
        if pooled >= 5:
            cells.append((float(seen[~large].sum()), pooled))
        statistic += sum((o - e) ** 2 / e for o, e in cells)
        freedom += max(len(cells) - 1, 0)
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def transitions(tokens: Sequence[Sequence[int]], first: Sequence[int], vocab: int) -> torch.Tensor:
    """[V, V] counts of (token, the one after it)."""
    table = torch.zeros(vocab, vocab, dtype=torch.int64)
    for start, row in zip(first, tokens, strict=True):
        row_tensor = torch.tensor([start, *row])
        table.index_put_((row_tensor[:-1], row_tensor[1:]), torch.tensor(1), accumulate=True)
    return table
