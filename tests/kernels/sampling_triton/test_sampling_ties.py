"""The equally probable ids that top_p keeps at its border, by the reference on a CPU, against an oracle in float64."""

import pytest
import torch
from sampling_case import Case, neutral_tables

from kernels.sampling import ALL_FEATURES, SampledRows, reference
from kernels.sampling import tables as column


@pytest.mark.parametrize("vocab", [1, 7, 900, 2000])
def test_of_equal_ids_at_the_border_of_top_p_the_lowest_stay(vocab: int) -> None:
    for seed in range(5):
        case, kept_NV = Case.tied(vocab, seed)
        temperature_N = case.tables.real_SF[: len(kept_NV), column.TEMPERATURE]
        scaled_NV = (case.logits - case.logits.amax(1, keepdim=True)) / temperature_N.unsqueeze(1)
        found = reference.filter_floor(scaled_NV, torch.arange(len(kept_NV)), case.tables, ALL_FEATURES)
        assert torch.equal(reference.kept(scaled_NV, *found), kept_NV)


def test_no_id_is_drawn_beyond_the_smallest_set_of_top_p() -> None:
    """Eight equal ids at 0.5: the first four are drawn, and each of them as often as the others."""
    rows = 400
    tables = neutral_tables(rows, 8)
    tables.real_SF[:rows, column.TEMPERATURE], tables.real_SF[:rows, column.TOP_P] = 1.0, 0.5
    tables.whole_SI[:rows, column.SEED] = torch.arange(rows) * 7919
    case = Case(tables, torch.zeros(rows, 8), SampledRows(torch.arange(rows), torch.zeros(rows).long()))
    counts = torch.tensor(case.expected()[0]).bincount(minlength=8)
    assert counts[4:].tolist() == [0, 0, 0, 0]
    assert ((counts[:4] - rows / 4) ** 2 / (rows / 4)).sum() < 16.3  # chi-square, 3 degrees of freedom, p = 0.001
