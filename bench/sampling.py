"""Times sampling on this machine's GPU: one call inside a CUDA graph, logits out of the L2 cache.

    python bench/sampling.py                                   # all kinds of rows
    python bench/sampling.py --vocab 102400 --rows 1,64,256 --kind greedy,top_p

A graph holds the calls of several logits tensors in turn, together several times the L2 cache. All four kernels run,
whatever the rows need, as they do in a captured step. "floor" is one pass over the logits at 4.2 TB/s.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import timing

from kernels.sampling import ALL_FEATURES, SampledRows, SampleWorkspace, SlotTables, launch
from kernels.sampling import tables as column

L2_BYTES = 60e6
KINDS = ("greedy", "noise", "top_k", "top_p", "top_k_p", "flat_p", "penalties")


def tables_of(kind: str, slots: int, vocab: int) -> SlotTables:
    tables = SlotTables.allocate(slots + 1, 64, 1024, torch.device("cuda"))
    seen_SV = torch.zeros(slots + 1, vocab, dtype=torch.int32, device="cuda")
    tables = SlotTables(**{**vars(tables), "seen_SV": seen_SV})
    if kind != "greedy" and kind != "penalties":
        tables.real_SF[:, column.TEMPERATURE] = 0.8
    if kind in ("top_k", "top_k_p"):
        tables.whole_SI[:, column.TOP_K] = 50
    if kind in ("top_p", "top_k_p", "flat_p"):
        tables.real_SF[:, column.TOP_P] = 0.9
    if kind == "penalties":
        tables.real_SF[:, column.FREQUENCY] = 0.3
        seen_SV[:, ::50] = 2
    return tables


def microseconds(rows: int, vocab: int, kind: str, dependent: bool) -> float:
    """Median time of one call."""
    copies = max(2, min(32, int(4 * L2_BYTES / (rows * vocab * 4)) + 1))
    tables = tables_of(kind, rows, vocab)
    spread = 0.5 if kind == "flat_p" else 2.0
    logits = [torch.randn(rows, vocab, device="cuda") * spread for _ in range(copies)]
    for tensor in logits:
        if kind != "flat_p":  # a language model's next token: a few likely ones above the many
            tensor[:, :40] += torch.linspace(14, 6, 40, device="cuda")
    place = torch.arange(rows, device="cuda")
    sampled = SampledRows(place, place)
    memory = SampleWorkspace.allocate(rows, vocab, lambda *shape, dtype: torch.empty(shape, dtype=dtype, device="cuda"))
    token_N, fault_1 = torch.zeros_like(place), torch.zeros(1, dtype=torch.int64, device="cuda")

    def run(tensor: torch.Tensor) -> None:
        launch.sample(tensor, sampled, tables, token_N, fault_1, ALL_FEATURES, memory, dependent=dependent)

    return timing.microseconds([partial(run, tensor) for tensor in logits], repeats=9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", default="102400,129280")
    parser.add_argument("--rows", default="1,4,16,64,256,1024")
    parser.add_argument("--kind", default=",".join(KINDS))
    parser.add_argument("--no-dependent", action="store_true", help="without programmatic dependent launch")
    arguments = parser.parse_args()
    for vocab in map(int, arguments.vocab.split(",")):
        print(f"\nvocabulary {vocab}, us a call")
        rows_list = [int(rows) for rows in arguments.rows.split(",")]
        print("kind".ljust(12) + "".join(f"{rows:>10}" for rows in rows_list))
        print("floor".ljust(12) + "".join(f"{rows * vocab * 4 / 4.2e6:>10.1f}" for rows in rows_list))
        for kind in arguments.kind.split(","):
            times = [microseconds(rows, vocab, kind, not arguments.no_dependent) for rows in rows_list]
            print(kind.ljust(12) + "".join(f"{time:>10.1f}" for time in times), flush=True)


if __name__ == "__main__":
    main()
