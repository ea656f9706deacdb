"""Log-probabilities: against torch in float64, of the rows that asked alone, in memory that is there before."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiny_models import VOCAB, write_tiny
from tests.workers.crowd import crowd, serve
from tests.workers.harness import InlineEngine
from workers.config import EngineConfig
from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.rank import rank
from workers.step import logprobs
from workers.step.logprobs import Logprobs
from workers.step.sampling import SamplingState

CPU = torch.device("cpu")


def random_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def taken(
    logits_NV: torch.Tensor, token_N: torch.Tensor, k: int, rows: list[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = list(range(len(logits_NV))) if rows is None else rows
    found = Logprobs(logits_NV.shape[1], CPU).take(logits_NV, token_N, rows, k)
    return found.chosen_A, found.ids_AK, found.values_AK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [0, 1, 5, 50])
def test_against_float64(k: int, dtype: torch.dtype) -> None:
    logits = random_logits(6, 50).to(dtype)
    token = torch.randint(0, 50, (6,), generator=torch.Generator().manual_seed(1))
    chosen, ids, values = taken(logits, token, k)
    raw = torch.log_softmax(logits.double(), 1)
    torch.testing.assert_close(chosen.double(), raw.gather(1, token.unsqueeze(1)).squeeze(1), rtol=0, atol=1e-5)
    assert ids.shape == values.shape == (6, k)
    torch.testing.assert_close(values.double(), raw.gather(1, ids), rtol=0, atol=1e-5)
    order = raw.sort(dim=1, descending=True, stable=True)
    assert torch.equal(ids, order.indices[:, :k])
    in_fp32 = torch.log_softmax(logits.float(), 1)
    assert torch.equal(chosen, in_fp32.gather(1, token.unsqueeze(1)).squeeze(1))
    assert torch.equal(values, in_fp32.gather(1, ids))


def test_equal_logits_name_the_lowest_ids() -> None:
    logits = torch.tensor([[-0.0, 2.0, 0.0, -1.0, 2.0, 0.0], [-3.0, -2.0, -1.0, -math.inf, -2.0, -5.0]])
    _, ids, values = taken(logits, torch.tensor([0, 3]), 6)
    assert ids.tolist() == [[1, 4, 0, 2, 5, 3], [2, 1, 4, 0, 5, 3]]
    assert values[1, -1] == -math.inf


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits, token = random_logits(9, 50), torch.arange(9)
    together = taken(logits, token, 4)
    for row in range(9):
        alone = taken(logits[row : row + 1].clone(), token[row : row + 1], 4)
        assert all(torch.equal(a[0], b[row]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("rows_at_once", [2, 9])
def test_named_ids_of_each_row_that_names_any(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, token, layout = random_logits(4, 50), torch.arange(4), BatchLayout(width=2, decode_rows=2)
    monkeypatch.setattr(logprobs, "MOST_BYTES", Logprobs(50, CPU)._row_bytes(20) * rows_at_once)
    state = SamplingState(3, 50, CPU)
    state.admit(
        [
            Admission(0, SamplingParams(9, logprobs=1, logprob_token_ids=(7, 49, 0))),
            Admission(1, SamplingParams(9, logprobs=2)),
            Admission(2, SamplingParams(9, logprobs=0, logprob_token_ids=(3,))),
        ]
    )
    wanted = torch.log_softmax(logits.double(), 1)
    for slots, names in (((0, 1), ((7, 49, 0), ())), ((1, 2), ((), (3,))), ((2, 0), ((3,), (7, 49, 0)))):
        found = state.logprobs(logits, token, layout, slots)
        entries = found.entries([[0, 1], [2, 3]])
        for row, ids in enumerate(names):
            for place, entry in enumerate(entries[row]):
                assert entry.named == pytest.approx(wanted[2 * row + place, list(ids)].tolist(), abs=1e-5)
    state.admit([Admission(0, SamplingParams(9, logprobs=0))])
    found = state.logprobs(logits, token, layout, (0, 1))
    assert found.named_AJ is None, "former tenants' names are forgotten"
    with pytest.raises(ValueError, match="logprob_token_ids names token ids outside the vocabulary of 50"):
        state.admit([Admission(0, SamplingParams(9, logprobs=0, logprob_token_ids=(50,)))])


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 7])
def test_pieces_change_nothing(rows_at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are picked in any order from logits that lie apart."""
    logits, token, rows = random_logits(9, 64)[:, :50], torch.arange(9), [8, 0, 3, 4, 7, 1]
    whole = taken(logits, token, 4, rows)
    monkeypatch.setattr(logprobs, "MOST_BYTES", Logprobs(50, CPU)._row_bytes(20) * rows_at_once)
    assert all(torch.equal(a, b) for a, b in zip(taken(logits, token, 4, rows), whole, strict=True))
    assert torch.equal(whole[0], torch.log_softmax(logits, 1)[rows, rows])


@pytest.mark.parametrize("k", [-1, 51])
def test_numbers_that_there_are_not(k: int) -> None:
    with pytest.raises(ValueError, match="top logprobs of a vocabulary of 50"):
        taken(random_logits(1, 50), torch.tensor([0]), k)


class Storages(TorchDispatchMode):
    """The largest piece of memory that any operation made, bytes."""

    largest = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = [a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, torch.Tensor)]
        known = {a.untyped_storage().data_ptr() for a in given}
        result = func(*args, **kwargs)
        for made in torch.utils._pytree.tree_leaves(result):
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in known:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("asking", [1, 24])
def test_nothing_as_wide_as_the_vocabulary_is_allocated_in_a_step(asking: int) -> None:
    """24 of 24 rows of width 3 ask for 20, or one does."""
    vocab, slots, width = 20_000, 24, 3
    state = SamplingState(slots, vocab, CPU)
    state.allocate(slots * width)
    state.admit([Admission(slot, SamplingParams(9, logprobs=20 if slot < asking else -1)) for slot in range(slots)])
    layout = BatchLayout(width, slots)
    logits, token = random_logits(slots * width, vocab), torch.arange(slots * width)
    with Storages() as made:
        found = state.logprobs(logits, token, layout, range(slots))
    assert found is not None
    assert list(found.index) == list(range(asking * width)), "of those who asked, and of nobody else"
    assert made.largest < 4 * vocab
    assert torch.equal(found.chosen_A, torch.log_softmax(logits, 1)[: asking * width].diagonal())


def test_memory_is_bounded_however_many_rows_there_are() -> None:
    """There are 1,024 rows of width 3 and 129,280 ids; a CPU backs with memory only what is touched."""
    made = Logprobs(129_280, CPU)
    made.allocate(1024 * 3)
    assert made._buffer is not None
    assert made._buffer.numel() <= (1 << 26) + (1 << 12)


@pytest.mark.parametrize("width", [1, 3])
def test_all_memory_of_sampling_is_taken_before_the_cache_is_sized(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serving takes no more memory, whatever there is to ask for."""
    happened: list[str] = []
    allocate, pages = SamplingState.allocate, rank.own_pages

    def noted_allocate(state: SamplingState, logits_rows: int) -> None:
        happened.append("sampling")
        assert logits_rows == 6 * width
        allocate(state, logits_rows)

    def noted_pages(*args: Any) -> int:
        happened.append("cache")
        return pages(*args)

    monkeypatch.setattr(SamplingState, "allocate", noted_allocate)
    monkeypatch.setattr(rank, "own_pages", noted_pages)
    folder = write_tiny(tmp_path, "v3", seed=3, num_hidden_layers=1)
    config = EngineConfig(model=str(folder), device="cpu", width=width, max_rows=6, token_budget=100, max_context=300)
    run = InlineEngine(config)
    assert happened == ["sampling", "cache"]
    sampling = run.runner.parts.sampling
    assert sampling is not None
    assert sampling.tables.seen_SV.shape == (7, VOCAB)

    def memory() -> list[int]:
        assert sampling is not None
        assert sampling._logprobs._buffer is not None
        return [sampling.tables.seen_SV.data_ptr(), sampling._logprobs._buffer.data_ptr()]

    before = memory()
    serve(run, crowd(20, VOCAB, seed=1))
    assert memory() == before
