"""Output heads, whose rows the ranks share.

Shape legend: Y rows of a rank, E hidden features.
"""

from __future__ import annotations

from workers.parallel.group import TensorParallel
from workers.weights.part import Part
from workers.weights.source import WeightSource
from workers.weights.weight import Weight


def head_rows(vocab: int, group: TensorParallel) -> tuple[int, slice]:
    """How many rows each rank has room for, and which are this rank's: the last ranks have fewer, or none, where the
    vocabulary does not divide."""
    share = -(-vocab // group.size)
    begin = min(group.rank * share, vocab)
    return share, slice(begin, min(begin + share, vocab))


def load_head(source: WeightSource, name: str, vocab: int, hidden: int) -> Weight:
    """This rank's rows of head `name`, [Y, E]; the last ranks' are padded with zeros."""
    share, rows = head_rows(vocab, source.group)
    head_YE = source.empty(share, hidden).zero_()
    source.fill(Weight(head_YE[: rows.stop - rows.start]), Part(name, vocab, hidden, own=rows))
    return Weight(head_YE)
