"""Selection by shards as it was compiled, launched dependently one layer after the other, under drawn schedules."""

from __future__ import annotations

import pytest
import torch
from selection_by_shards import Case, drawn, garbage

from kernels import sparse
from kernels.page import PAGE_TOKENS, Shards
from kernels.sparse import launch as sparse_launch
from kernels.sparse import workspace as workspaces
from kernels.sparse_shards import Candidates, OwnPages, launch
from tests.support.ptx import emulated

pytestmark = pytest.mark.long


def offered(case: Case, scores: torch.Tensor, positions: list[list[int]]) -> torch.Tensor:
    """What a shard offers of these positions of each token: by hand."""
    part = torch.full((len(case.tokens), 2 * case.selected), 0x7FFFFFFF, dtype=torch.int32)
    for token, own in enumerate(positions):
        row = case.tokens[token][0]
        part[token, : len(own)] = scores[row, own].view(torch.int32)
        part[token, case.selected : case.selected + len(own)] = torch.tensor(own, dtype=torch.int32)
    return part


@pytest.mark.parametrize(("count", "hopper"), [(2, False), (4, True)])
def test_layers_one_after_the_other(count: int, hopper: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layer finds other scores in the same memory; the other shards' parts come from nowhere. A planted fault that
    this finds: the number of candidates is read through L1, where that of the layer before may be."""
    monkeypatch.setattr(workspaces, "WHOLE_TOKENS", 1)
    case = Case([300, 0, 130], [(0, 300), (0, 64), (1, 0), (2, 129)], 64, count, seed=count)
    table_RP, tokens = case.table(), len(case.tokens)
    row_T, bound_T = torch.tensor(case.tokens, dtype=torch.int32).t().contiguous()
    pages, candidates = OwnPages.allocate(*table_RP.shape, garbage), Candidates.allocate(tokens, count, 64, garbage)
    own_T, first_T = garbage(tokens, dtype=torch.int32), torch.zeros(tokens, dtype=torch.bool)
    selected_TS, own_TS = (garbage(tokens, 64, dtype=torch.int32) for _ in range(2))
    fault_1, found = torch.zeros(1, dtype=torch.int64), []
    columns = candidates.score_TX.shape[1]
    workspace = sparse.SelectWorkspace.allocate(tokens, columns, garbage, selected=64, hopper=hopper)
    with emulated(count):
        launch.find_own_pages(table_RP, pages, Shards(count, 0))
        launch.own_bounds(row_T, bound_T, pages, own_T, first_T)
    layers = [drawn(case, values) for values in ([0.0, 1.0], list(range(9)))]
    owner = [[(int(table_RP[row, at // PAGE_TOKENS]) - 1) % count for at in range(bound)] for row, bound in case.tokens]
    inputs = []
    for scores in layers:
        score_TN, best = torch.full((tokens, case.columns * PAGE_TOKENS), 1e30), []
        for shard in range(count):
            mine = [[at for at in range(len(own)) if own[at] == shard] for own in owner]
            # Python's sort is stable: of equal scores the lowest positions come first.
            of_row = [scores[row].tolist() for row, _ in case.tokens]
            ranked = [sorted(own, key=of_row[token].__getitem__, reverse=True) for token, own in enumerate(mine)]
            best.append([sorted(own[:64]) for own in ranked])
            if shard == 0:
                assert own_T.tolist() == list(map(len, mine))
                index_TS = torch.full_like(selected_TS, -1)
                for token, own in enumerate(mine):
                    score_TN[token, : len(own)] = scores[case.tokens[token][0], own]
                    kept = torch.tensor([own.index(at) for at in best[0][token]], dtype=torch.int32)
                    index_TS[token, : len(kept)] = kept
        parts = [offered(case, scores, best[shard]) for shard in range(count)]
        inputs.append((score_TN, index_TS, parts))
    with emulated(10 + count, consecutive=True):
        for score_TN, index_TS, parts in inputs:
            launch.offer_candidates(index_TS, score_TN, row_T, pages, candidates.part_TY, dependent=True)
            candidates.part_TDY[:, 0] = candidates.part_TY
            for shard in range(1, count):
                candidates.part_TDY[:, shard] = parts[shard]
            launch.order_candidates(candidates, dependent=True)
            chosen = candidates.score_TX, candidates.count_T, candidates.index_TS, fault_1
            sparse_launch.select_positions(*chosen, workspace, dependent=True)
            launch.keep_selected(candidates, selected_TS, row_T, pages, own_TS, 0, dependent=True)
            found.append((candidates.part_TY.clone(), selected_TS.clone(), own_TS.clone()))
    for (part_TY, chosen_TS, mine_TS), scores, (_, _, parts) in zip(found, layers, inputs, strict=True):
        here = part_TY[:, 64:] != 0x7FFFFFFF
        assert torch.equal(part_TY[:, 64:], parts[0][:, 64:])
        assert torch.equal(part_TY[:, :64][here], parts[0][:, :64][here])
        for token, want in enumerate(case.wanted(scores)):
            assert [at for at in chosen_TS[token].tolist() if at >= 0] == want
            assert [at for at in mine_TS[token].tolist() if at >= 0] == [at for at in want if owner[token][at] == 0]
    assert int(fault_1) == 0
