"""Random rows with every mix of sampling parameters, their tokens by the reference on a CPU, and by the kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kernels.sampling import (
    ALL_FEATURES,
    Feature,
    SampledRows,
    SampleWorkspace,
    SlotTables,
    TokenMasks,
    launch,
    mask_words,
)
from kernels.sampling import tables as column

STOPS, BIASES = 4, 8
GREEDY, PLAIN, FILTERED, ALL = "greedy", "plain", "filtered", "all"


def neutral_tables(slots: int, vocab: int, stops: int = STOPS, biases: int = BIASES) -> SlotTables:
    """Tables of so many slots and the one of nobody."""
    tables = SlotTables.allocate(slots + 1, stops, biases, torch.device("cpu"))
    return SlotTables(**{**vars(tables), "seen_SV": torch.zeros(slots + 1, vocab, dtype=torch.int32)})


def random_tables(slots: int, vocab: int, seed: int, kind: str = ALL) -> SlotTables:
    """Each parameter on for some slots and off for others, independently of each other."""
    generator = torch.Generator().manual_seed(seed)
    tables = neutral_tables(slots, vocab)

    def some(share: float) -> Tensor:
        return torch.rand(slots, generator=generator) < share

    def between(low: float, high: float) -> Tensor:
        return torch.rand(slots, generator=generator) * (high - low) + low

    real, whole = tables.real_SF[:slots], tables.whole_SI[:slots]
    whole[:, column.SEED] = torch.randint(-(2**62), 2**62, (slots,), generator=generator)
    if kind == GREEDY:
        return tables
    real[:, column.TEMPERATURE] = torch.where(some(0.2 if kind == ALL else 0), 0.0, between(0.3, 2.0))
    if kind != PLAIN:
        real[:, column.TOP_P] = torch.where(some(0.5), 1.0, between(0.05, 0.999))
        real[:, column.MIN_P] = torch.where(some(0.6), 0.0, between(1e-4, 0.3))
        least = torch.full((slots,), vocab + 5.0)
        top_k = torch.exp(between(0.0, 1.0) * least.log()).long()
        whole[:, column.TOP_K] = torch.where(some(0.4), 0, top_k)
    if kind != ALL:
        return tables
    real[:, column.REPETITION] = torch.where(some(0.5), 1.0, between(0.6, 1.8))
    real[:, column.FREQUENCY] = torch.where(some(0.6), 0.0, between(-1.0, 1.0))
    real[:, column.PRESENCE] = torch.where(some(0.6), 0.0, between(-1.0, 1.0))
    tables.seen_SV[:slots] = torch.randint(0, 9, (slots, vocab), generator=generator, dtype=torch.int32)
    tables.seen_SV[:slots] *= torch.rand(slots, vocab, generator=generator) < 0.3
    whole[:, column.GENERATED] = torch.randint(0, 6, (slots,), generator=generator)
    whole[:, column.MIN_TOKENS] = torch.where(some(0.5), 0, torch.randint(0, 9, (slots,), generator=generator))
    tables.stop_SK[:slots] = torch.randint(0, vocab, (slots, STOPS), generator=generator)
    whole[:, column.BIASED] = torch.randint(0, min(BIASES, vocab) + 1, (slots,), generator=generator) * some(0.5)
    for slot, number in enumerate(whole[:, column.BIASED].tolist()):
        tables.bias_id_SB[slot, :number] = torch.randperm(vocab, generator=generator)[:number].sort().values
        tables.bias_SB[slot, :number] = torch.randn(number, generator=generator) * 4
    return tables


@dataclass
class Case:
    """Logits rows of decode rows of `width`, then of other rows, padded ones among them, in poisoned strided rows."""

    tables: SlotTables
    logits: Tensor
    rows: SampledRows
    features: Feature = ALL_FEATURES
    device: str = "cpu"

    @staticmethod
    def random(
        vocab: int,
        decode_rows: int,
        width: int,
        others: int,
        seed: int,
        kind: str = ALL,
        dtype: torch.dtype = torch.float32,
        spread: float = 3.0,
        by_slot: bool = False,
    ) -> Case:
        generator = torch.Generator().manual_seed(seed)
        sampled = decode_rows + others
        slots = sampled + 3
        number = decode_rows * width + others
        tables = random_tables(slots, vocab, seed, kind)
        # A permuted grid: no two logits of a row so close that rounding decides between them.
        grid = torch.rand(number, vocab, generator=generator).argsort(1).double()
        share = (grid + 0.1 + 0.8 * torch.rand(number, vocab, generator=generator, dtype=torch.float64)) / vocab
        values = (torch.special.ndtri(share) * spread).to(dtype)
        logits = torch.full((number, vocab + 24), torch.nan, dtype=dtype)[:, :vocab]
        logits.copy_(values)
        slot_R = torch.randperm(slots, generator=generator)[:sampled]
        slot_R[1::5] = torch.where(torch.arange(len(slot_R[1::5])) % 2 == 0, -1, slots)
        shape = (slots + 1 if by_slot else decode_rows, max(width - 1, 1))
        # Mostly ids that the row itself would choose, so that it matters whether they count as generated.
        draft = torch.randint(-1, vocab + 1, shape, generator=generator)
        likely = logits.float().topk(min(3, vocab)).indices
        chosen = likely[torch.arange(draft.numel()) % max(number, 1), torch.arange(draft.numel()) % likely.shape[1]]
        draft = torch.where(torch.rand(shape, generator=generator) < 0.8, chosen.view(shape), draft)
        rows = SampledRows(
            slot_R,
            torch.randint(0, 2**40, (number,), generator=generator),
            ahead=1,
            width=width,
            decode_rows=decode_rows,
            draft=draft if width > 1 or by_slot else None,
            by_slot=by_slot,
            before=1 if by_slot else 0,
        )
        if by_slot:
            rows = SampledRows(slot_R, rows.position_N, draft=draft, by_slot=True, before=1)
        return Case(tables, logits, rows)

    @staticmethod
    def tied(vocab: int, seed: int, levels: int = 5) -> tuple[Case, Tensor]:
        """Rows whose logits are a few different numbers, so that the border of top_p falls among equal ones, and the
        ids that stay (bool [N, V]) by an oracle in float64: from the most probable id on, the lowest first of equal
        ones, until top_p of what top_k has left is reached. The bound lies halfway between two sums, so no rounding
        decides."""
        generator = torch.Generator().manual_seed(seed)
        rows = 8
        logits = torch.randint(0, levels, (rows, vocab), generator=generator) * -0.75
        logits[0], logits[1, 0] = 0.25, 3.0
        tables = neutral_tables(rows, vocab)
        tables.real_SF[:rows, column.TEMPERATURE] = torch.tensor([1, 1, 0.5, 2, 1, 0.3, 1, 1.7])
        tables.whole_SI[:rows, column.TOP_K] = torch.tensor([0, 0, 0, 0, max(vocab // 3, 1), 0, max(vocab // 2, 1), 0])
        tables.whole_SI[:rows, column.SEED] = torch.arange(rows) * 10**15 + seed
        kept_NV = torch.zeros(rows, vocab, dtype=torch.bool)
        for row in range(rows):
            temperature = float(tables.real_SF[row, column.TEMPERATURE])
            share_V = (logits[row].double() / temperature).exp()
            top_k = int(tables.whole_SI[row, column.TOP_K]) or vocab
            share_V *= share_V >= share_V.sort(descending=True).values[top_k - 1]
            order_V = (-share_V).sort(stable=True).indices
            sum_V = (share_V[order_V] / share_V.sum()).cumsum(0)
            number = int(torch.randint(0, int((share_V > 0).sum()), (1,), generator=generator))
            before = float(sum_V[number - 1]) if number else 0.0
            tables.real_SF[row, column.TOP_P] = (before + float(sum_V[number])) / 2
            kept_NV[row, order_V[: number + 1]] = True
        position_N = torch.randint(0, 2**40, (rows,), generator=generator)
        return Case(tables, logits, SampledRows(torch.arange(rows), position_N, ahead=1)), kept_NV

    def kept(self) -> Tensor:
        """The ids that the kernels' filters leave, bool [N, V], on the CPU; slot n is row n's."""
        from kernels.sampling import reference

        memory, token_N, fault_1 = self.buffers()
        launch.sample(self.logits, self.rows, self.tables, token_N, fault_1, self.features, memory)
        logits_NV, rows = self.logits.cpu(), len(self.logits)
        temperature_N1 = self.tables.real_SF[:rows, column.TEMPERATURE].cpu().unsqueeze(1)
        scaled_NV = (logits_NV - logits_NV.amax(1, keepdim=True)) / temperature_N1
        # A top_p so near 1 that fp32 has no number between is none; of a row without filters nothing is searched.
        top_k_N = self.tables.whole_SI[:rows, column.TOP_K].cpu()
        top_p_N = self.tables.real_SF[:rows, column.TOP_P].cpu()
        searched_N = (top_p_N < 1) | (top_k_N > 0) & (top_k_N < logits_NV.shape[1])
        kept_NV = reference.kept(scaled_NV, memory.floor_N.cpu(), memory.last_N.cpu())
        return kept_NV | ~searched_N.unsqueeze(1)

    def left_out(self, kept_NV: Tensor, want_NV: Tensor) -> float:
        """Return the largest probability, in float64, of the ids in which two nuclei differ, of any row. Ids must be
        kept from the most probable one on, of equal ones the lowest first."""
        temperature_N1 = self.tables.real_SF[: len(kept_NV), column.TEMPERATURE].unsqueeze(1)
        share_NV = (self.logits.double() / temperature_N1).softmax(1)
        order_NV = (-self.logits).sort(dim=1, stable=True).indices
        ours_NV, theirs_NV = kept_NV.gather(1, order_NV), want_NV.gather(1, order_NV)
        assert (ours_NV.long().diff(dim=1) <= 0).all()
        return float((share_NV.gather(1, order_NV) * (ours_NV != theirs_NV)).sum(1).max())

    def masked(self, seed: int) -> Case:
        """Add masks that allow nearly all ids, few, one or none, for some rows. The masks are in another order than the
        rows, and there is poison in those that are nobody's and in the bits behind the vocabulary."""
        generator = torch.Generator().manual_seed(seed)
        number, vocab = self.logits.shape
        words = mask_words(vocab)
        share_M1 = torch.tensor([0.98, 0.5, 0.02, 0.0])[torch.randint(0, 4, (number + 2, 1), generator=generator)]
        allowed_MV = torch.rand(number + 2, words * 32, generator=generator) < share_M1
        allowed_MV[torch.arange(number + 2), torch.randint(0, vocab, (number + 2,), generator=generator)] = True
        allowed_MV[0] = False
        allowed_MV[:, vocab:] = True
        weight = torch.tensor([1 << bit if bit < 31 else -(1 << 31) for bit in range(32)], dtype=torch.int64)
        bits_MB = (allowed_MV.view(number + 2, words, 32) * weight).sum(2).to(torch.int32)
        index_N = torch.randperm(number + 2, generator=generator)[:number].to(torch.int32)
        index_N[torch.rand(number, generator=generator) < 0.3] = -1
        masks = TokenMasks(torch.cat((index_N, index_N.new_full((5,), 2147480000))), bits_MB)
        return replace(self, rows=replace(self.rows, masks=masks))

    def to(self, device: str) -> Case:
        """The same on another device, logits strided and poisoned as before."""
        vocab = self.logits.shape[1]
        logits = torch.full((len(self.logits), vocab + 24), torch.nan, dtype=self.logits.dtype, device=device)
        logits[:, :vocab] = self.logits.to(device)

        def moved(values: dict[str, object]) -> dict[str, object]:
            return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in values.items()}

        tables = SlotTables(**moved(vars(self.tables)))  # type: ignore[arg-type]
        rows = SampledRows(**moved(vars(self.rows)))  # type: ignore[arg-type]
        if rows.masks is not None:
            rows = replace(rows, masks=TokenMasks(**moved(vars(rows.masks))))  # type: ignore[arg-type]
        return Case(tables, logits[:, :vocab], rows, self.features, device)

    def buffers(self) -> tuple[SampleWorkspace, Tensor, Tensor]:
        """A poisoned workspace, tokens, and the count of faults."""
        device = self.logits.device

        def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
            bad = torch.nan if dtype.is_floating_point else 2147480000
            return torch.full(shape, bad, dtype=dtype, device=device)

        workspace = SampleWorkspace.allocate(len(self.logits), self.logits.shape[1], poisoned)
        token_N = torch.full((len(self.logits),), -7, dtype=torch.int64, device=device)
        return workspace, token_N, torch.zeros(1, dtype=torch.int64, device=device)

    def launched(self, dependent: bool = False) -> tuple[list[int], int]:
        """Tokens and faults by the kernels."""
        workspace, token_N, fault_1 = self.buffers()
        launch.sample(
            self.logits, self.rows, self.tables, token_N, fault_1, self.features, workspace, dependent=dependent
        )
        return token_N.tolist(), int(fault_1)

    def launched_by_name(self, dependent: bool = False) -> tuple[list[int], list[int], int]:
        """Tokens, which rows are bad, and faults, by the kernels. The names lie behind an odd number of tokens."""
        workspace, token_N, fault_1 = self.buffers()
        nonfinite_N = token_N.new_full((len(token_N) + 1,), -7)[1:]
        launch.sample(
            self.logits,
            self.rows,
            self.tables,
            token_N,
            fault_1,
            self.features,
            workspace,
            nonfinite_N=nonfinite_N,
            dependent=dependent,
        )
        return token_N.tolist(), nonfinite_N.tolist(), int(fault_1)

    def expected_by_name(self) -> tuple[list[int], list[int], int]:
        """The same by the reference, on a CPU."""
        from kernels.sampling import sample_rows

        host = self if self.device == "cpu" else self.to("cpu")
        token_N, fault_1 = torch.full_like(host.rows.position_N, -7), torch.zeros(1, dtype=torch.int64)
        nonfinite_N = torch.full_like(token_N, -7)
        sample_rows(host.logits, host.rows, host.tables, token_N, fault_1, host.features, nonfinite_N=nonfinite_N)
        return token_N.tolist(), nonfinite_N.tolist(), int(fault_1)

    def expected(self) -> tuple[list[int], int]:
        """Tokens and faults by the reference, on a CPU."""
        from kernels.sampling import reference

        host = self if self.device == "cpu" else self.to("cpu")
        slot_N, position_N, draft_NX, window_N = host.rows.expanded()
        token_N, fault_1 = torch.full_like(slot_N, -7), torch.zeros(1, dtype=torch.int64)
        reference.sample(
            host.logits,
            slot_N,
            position_N,
            host.tables,
            token_N,
            fault_1,
            host.features,
            draft_NX,
            window_N,
            masks=host.rows.masks,
        )
        return token_N.tolist(), int(fault_1)
