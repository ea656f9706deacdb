"""Selection by GPUs that share out a cache: what each has found is exchanged over symmetric memory, in graphs, and is
what a sort of all scores finds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from selection_by_shards import Case, drawn
from torch import Tensor, multiprocessing

from kernels import sparse, sparse_shards
from kernels.page import PAGE_TOKENS
from kernels.sparse_shards import Candidates, OwnPages
from workers.parallel.group import Group
from workers.parallel.mesh import Mesh

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.gpus,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA devices"),
]

REPLAYS = 5
FEW = [-1.0, 0.0, -0.0, 2.0]
MANY = [float(x) for x in range(97)]
CASES = [
    Case([5000, 40, 0], [(0, 5000), (1, 33), (2, 0), (0, 2048)], 2048, 2),
    Case([9000], [(0, 9000)], 2048, 2, first=1),
    Case([700, 300], [(row, bound) for row in (0, 1) for bound in range(200, 300)], 64, 2),
    Case([3000], [(0, 3000)], 512, 2, owners=[1]),
]
"""Few tokens and many, a shard without entries, contexts that are selected as a whole."""


class Rows:
    """Memory of one rank for a case."""

    def __init__(self, case: Case, group: Group, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.case, self.group, self.device, tokens = case, group, device, len(case.tokens)
        self.table_RP = case.table().to(device)
        self.row_T, self.bound_T = torch.tensor(case.tokens, dtype=torch.int32, device=device).t().contiguous()
        self.pages = OwnPages.allocate(*self.table_RP.shape, empty)
        self.own_T, self.first_T = empty(tokens, dtype=torch.int32), empty(tokens, dtype=torch.bool)
        self.score_TN = torch.full((tokens, case.columns * PAGE_TOKENS), 1e30, device=device)
        self.candidates = Candidates.allocate(tokens, case.count, case.selected, empty)
        self.selected_TS, self.own_TS = (empty(tokens, case.selected, dtype=torch.int32) for _ in range(2))
        self.fault_1 = torch.zeros(1, dtype=torch.int64, device=device)
        columns = self.score_TN.shape[1], self.candidates.score_TX.shape[1]
        self.workspaces = [
            sparse.SelectWorkspace.allocate(tokens, count, empty, selected=case.selected) for count in columns
        ]

    def find(self) -> None:
        sparse_shards.find_own_pages(self.table_RP, self.pages, self.group.mesh.shards)
        sparse_shards.own_bounds(self.row_T, self.bound_T, self.pages, self.own_T, self.first_T)

    def draw(self, score_RN: Tensor) -> None:
        """Lay the scores of this rank's entries where an indexer leaves them."""
        column_RP, own = self.pages.column_RP.cpu(), self.own_T.tolist()
        score_TN = torch.full(self.score_TN.shape, 1e30)
        for token, (row, _) in enumerate(self.case.tokens):
            at_N = torch.arange(own[token])
            position_N = column_RP[row, at_N // PAGE_TOKENS].long() * PAGE_TOKENS + at_N % PAGE_TOKENS
            score_TN[token, : own[token]] = score_RN[row, position_N]
        if self.case.first:
            score_TN[:, : self.case.first].masked_fill_(self.first_T.cpu().unsqueeze(1), -torch.inf)
        self.score_TN.copy_(score_TN)

    def select(self, *, dependent: bool) -> None:
        candidates, how = self.candidates, {"dependent": dependent}
        part = self.selected_TS, self.score_TN, self.row_T, self.pages, candidates.part_TY
        own = self.score_TN, self.own_T, self.selected_TS, self.fault_1, self.workspaces[0]
        sparse.select_positions(*own, **how)
        sparse_shards.offer_candidates(*part, **how)
        self.group.gather_shards(candidates.part_TY.view(torch.float32), candidates.part_TDY.view(torch.float32))
        sparse_shards.order_candidates(candidates, **how)
        chosen = candidates.score_TX, candidates.count_T, candidates.index_TS, self.fault_1, self.workspaces[1]
        sparse.select_positions(*chosen, **how)
        kept = candidates, self.selected_TS, self.row_T, self.pages, self.own_TS
        sparse_shards.keep_selected(*kept, first=self.case.first, **how)

    def check(self, score_RN: Tensor) -> None:
        assert int(self.fault_1) == 0
        table_RP, own = self.case.table(), self.group.mesh.shards
        selected, mine = self.selected_TS.tolist(), self.own_TS.tolist()
        for token, want in enumerate(self.case.wanted(score_RN)):
            row = self.case.tokens[token][0]
            assert [at for at in selected[token] if at >= 0] == want
            there = [at for at in want if own.owns(int(table_RP[row, at // PAGE_TOKENS]))]
            assert [at for at in mine[token] if at >= 0] == there


def rank_main(rank: int, ranks: int, folder: Path) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = Group.connect(Mesh.of(rank, ranks, cache=ranks), f"file://{folder}/rendezvous", device, timeout_s=60)
    cases = [replace(case, count=ranks, seed=ranks) for case in CASES]
    every = [Rows(case, group, device) for case in cases]
    scores = [drawn(case, FEW) for case in cases]
    for rows, score_RN in zip(every, scores, strict=True):
        rows.find()
        rows.draw(score_RN)
        rows.select(dependent=False)
        rows.check(score_RN)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for rows in every:
            rows.find()
            rows.select(dependent=torch.cuda.get_device_capability(device) >= (9, 0))
    for replay in range(REPLAYS):
        scores = [drawn(replace(case, seed=100 + replay), (FEW, MANY)[replay % 2]) for case in cases]
        for rows, score_RN in zip(every, scores, strict=True):
            rows.draw(score_RN)
        if replay % ranks == rank:
            torch.cuda._sleep(1_000_000)  # cycles, about half a millisecond
        graph.replay()
        for rows, score_RN in zip(every, scores, strict=True):
            rows.check(score_RN)
    graph.reset()
    group.close()


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gpus_select_what_a_sort_finds(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    multiprocessing.spawn(rank_main, args=(ranks, tmp_path), nprocs=ranks)
