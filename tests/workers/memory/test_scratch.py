import itertools

import pytest
import torch

from workers.memory.scratch import Scratch, ScratchExhausted

CPU = torch.device("cpu")


def use(scratch: Scratch) -> list[torch.Tensor]:
    kept = [scratch.empty(3, 5, dtype=torch.bfloat16)]
    for _ in range(2):
        with scratch.scope():
            kept.append(scratch.empty(1000, dtype=torch.float32))
            kept.append(scratch.empty(7, dtype=torch.int64))
    kept.append(scratch.empty(2, 2, dtype=torch.float32))
    return kept


def test_a_measured_buffer_holds_the_same_requests_at_the_same_places() -> None:
    measure = Scratch(CPU)
    use(measure)
    buffer = torch.empty(measure.peak, dtype=torch.uint8)
    first, second = use(Scratch(CPU, buffer)), use(Scratch(CPU, buffer))
    assert [x.data_ptr() for x in first] == [x.data_ptr() for x in second]
    assert [(x.shape, x.dtype) for x in first] == [(x.shape, x.dtype) for x in use(measure)]


def test_live_pieces_do_not_overlap_and_scopes_are_reused() -> None:
    buffer = torch.empty(1 << 16, dtype=torch.uint8)
    outer, a1, b1, a2, _, last = use(Scratch(CPU, buffer))
    assert a1.data_ptr() == a2.data_ptr()
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in (outer, a1, b1))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert last.data_ptr() == a1.data_ptr()
    assert all(x.data_ptr() % 256 == buffer.data_ptr() % 256 for x in (outer, a1, b1, last))


def test_more_than_was_measured_is_refused() -> None:
    scratch = Scratch(CPU, torch.empty(512, dtype=torch.uint8))
    scratch.empty(100, dtype=torch.float32)
    with pytest.raises(ScratchExhausted, match="reserved"):
        scratch.empty(1, dtype=torch.float32)
