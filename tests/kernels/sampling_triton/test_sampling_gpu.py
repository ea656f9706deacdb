"""The sampling and verification kernels on a GPU: eager, captured, and replayed on other rows, against the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from captured import capture, check_replays
from sampling_case import ALL, FILTERED, GREEDY, PLAIN, Case

from kernels.decode_state import accept_drafts
from kernels.sampling import ALL_FEATURES, count_tokens, launch, reference
from kernels.sampling import tables as column

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEPENDENT = [False, True] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else [False]
SHAPES = [(1, 1, 0), (3, 4, 2), (40, 2, 5)]


@pytest.mark.parametrize("dependent", DEPENDENT)
@pytest.mark.parametrize("kind", [GREEDY, PLAIN, FILTERED, ALL])
@pytest.mark.parametrize("vocab", [67, 5003, 102400])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_the_reference(shape: tuple[int, int, int], vocab: int, kind: str, dependent: bool) -> None:
    case = Case.random(vocab, *shape, seed=3, kind=kind)
    assert case.to("cuda").launched(dependent) == case.expected()


@pytest.mark.parametrize("kind", [GREEDY, PLAIN, FILTERED, ALL])
@pytest.mark.parametrize("vocab", [67, 5003, 129280])
@pytest.mark.parametrize("shape", SHAPES)
def test_masked_tokens_are_those_of_the_reference(shape: tuple[int, int, int], vocab: int, kind: str) -> None:
    case = Case.random(vocab, *shape, seed=4, kind=kind).masked(5)
    assert case.to("cuda").launched_by_name() == case.expected_by_name()


@pytest.mark.parametrize("spread", [0.02, 1.0, 12.0])
def test_floors_are_those_of_the_reference(spread: float) -> None:
    """Flat and steep rows, small and large k and p, ties: a few values must be set aside or nearly all of them."""
    vocab, rows = 129280, 12
    case = Case.random(vocab, rows, 1, 0, 7, FILTERED, spread=spread)
    case.rows.slot_R.copy_(torch.arange(rows))
    case.tables.whole_SI[:rows, column.TOP_K] = torch.tensor([1, 50, 0, 0, 5000, 40000, 129279, 0, 7, 300, 0, 20000])
    case.tables.real_SF[:rows, column.TOP_P] = torch.tensor([1, 1, 0.9, 0.5, 1, 0.3, 1, 0.999, 0.8, 0.99, 0.1, 0.6])
    case.tables.real_SF[:rows, column.MIN_P] *= torch.arange(rows) % 2
    case.logits[6] = (case.logits[6] * 8).round() / 8
    gpu = case.to("cuda")
    memory, token_N, fault_1 = gpu.buffers()
    launch.sample(gpu.logits, gpu.rows, gpu.tables, token_N, fault_1, ALL_FEATURES, memory)
    scaled_NV = (case.logits - case.logits.amax(1, keepdim=True)) / case.tables.real_SF[:rows, :1]
    kept_N = reference.kept(
        scaled_NV, *reference.filter_floor(scaled_NV, torch.arange(rows), case.tables, ALL_FEATURES)
    ).sum(1)
    ours_N = reference.kept(scaled_NV, memory.floor_N.cpu(), memory.last_N.cpu()).sum(1)
    # top_k is exact; the mass is a sum in fp32, here, and in fp64, there: an id of a large nucleus may lie between.
    exact = case.tables.real_SF[:rows, column.TOP_P] == 1
    assert kept_N[exact].tolist() == ours_N[exact].tolist()
    assert (kept_N - ours_N).abs().le(1 + kept_N * 2e-5).all(), (kept_N, ours_N)


@pytest.mark.parametrize(("vocab", "levels"), [(7, 3), (5003, 5), (5003, 1000), (129280, 40), (129280, 2000)])
def test_of_equal_ids_at_the_border_of_top_p_the_lowest_stay(vocab: int, levels: int) -> None:
    for seed in range(3):
        case, kept_NV = Case.tied(vocab, seed, levels)
        # top_p is a number in fp32, and the mass a sum in it: between the border here and there may lie ids that are
        # as improbable, all together, as such a number is inexact.
        assert case.left_out(case.to("cuda").kept(), kept_NV) < 4e-6
        if vocab < 100:
            assert case.to("cuda").launched() == case.expected()


@pytest.mark.parametrize("dependent", DEPENDENT)
def test_replayed_on_other_rows(dependent: bool) -> None:
    """Everything a token depends on is the replay's: logits, slots, parameters, counts, positions, drafts."""
    first = Case.random(30000, 6, 3, 2, seed=1, kind=GREEDY).to("cuda")
    memory, token_N, fault_1 = first.buffers()

    def run() -> None:
        launch.sample(
            first.logits, first.rows, first.tables, token_N, fault_1, ALL_FEATURES, memory, dependent=dependent
        )

    first.rows.slot_R.fill_(-1)  # captured on padding alone
    graph = capture(run)
    for seed, kind in ((5, ALL), (6, FILTERED), (7, GREEDY), (8, ALL)):
        other = Case.random(30000, 6, 3, 2, seed=seed, kind=kind)
        for name, tensor in vars(other.tables).items():
            getattr(first.tables, name).copy_(tensor)
        first.logits.copy_(other.logits)
        first.rows.slot_R.copy_(other.rows.slot_R)
        first.rows.position_N.copy_(other.rows.position_N)
        assert first.rows.draft is not None
        assert other.rows.draft is not None
        first.rows.draft.copy_(other.rows.draft)

        def refill() -> None:
            token_N.fill_(-7)
            fault_1.zero_()
            memory.aside_NA.fill_(math.nan)

        check_replays(graph, refill, [token_N, fault_1])
        assert (token_N.tolist(), int(fault_1)) == other.expected()


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    case = Case.random(20000, 64, 1, 0, seed=2).to("cuda")
    together, _ = case.launched()
    for row in range(0, 64, 7):
        one = slice(row, row + 1)
        rows = type(case.rows)(case.rows.slot_R[one], case.rows.position_N[one], ahead=1)
        assert Case(case.tables, case.logits[one], rows, device="cuda").launched()[0] == together[one]


def test_broken_logits_are_counted() -> None:
    case = Case.random(20000, 9, 1, 0, seed=2)
    case.rows.slot_R.copy_(torch.arange(9))
    case.logits[1, 17], case.logits[4, 19000] = math.nan, math.inf
    case.logits[7] = -math.inf
    tokens, fault = case.to("cuda").launched()
    assert (tokens, fault) == case.expected()
    assert fault == 3


def test_addresses_past_two_to_the_31_elements() -> None:
    rows, vocab = 20, 129280
    case = Case.random(vocab, rows, 1, 0, seed=2).to("cuda")
    wide = torch.empty(rows, 2**27, dtype=torch.float32, device="cuda")[:, :vocab]
    wide.copy_(case.logits)
    expected = case.launched()
    case.logits = wide
    assert case.launched() == expected


def test_verification_and_counts_replayed() -> None:
    rows, width, vocab, slots = 37, 4, 500, 64
    generator = torch.Generator().manual_seed(1)
    tables = Case.random(vocab, slots - 3, 1, 0, seed=1).tables
    gpu = type(tables)(**{name: x.cuda() for name, x in vars(tables).items()})
    target, fed = torch.zeros(rows, width).long().cuda(), torch.zeros(rows, width).long().cuda()
    slot, accepted, fault, told = (torch.zeros(n, dtype=torch.int64, device="cuda") for n in (rows, rows, 1, 1))

    def run() -> None:
        accept_drafts(target, fed[:, 1:], accepted, vocab, fault, told)
        count_tokens(gpu, slot, target, accepted, vocab, fault, more=1)

    graph = capture(run)
    for _ in range(3):
        target_DW = torch.randint(-1, vocab + 1, (rows, width), generator=generator)
        fed_DW = torch.randint(0, vocab, (rows, width), generator=generator)
        same = torch.rand(rows, width - 1, generator=generator) < 0.7
        fed_DW[:, 1:] = torch.where(same, target_DW[:, :-1], fed_DW[:, 1:])
        slot_R = torch.randperm(slots, generator=generator)[:rows]
        slot_R[::6] = -1
        expected = type(tables)(**{name: x.clone() for name, x in vars(tables).items()})
        accepted_D, fault_1 = torch.zeros(rows).long(), torch.zeros(1).long()
        accept_drafts(target_DW, fed_DW[:, 1:], accepted_D, vocab, fault_1)
        faults = int(fault_1)
        count_tokens(expected, slot_R, target_DW, accepted_D, vocab, fault_1, more=1)

        def refill() -> None:
            target.copy_(target_DW)  # noqa: B023
            fed.copy_(fed_DW)  # noqa: B023
            slot.copy_(slot_R)  # noqa: B023
            fault.zero_()
            gpu.whole_SI.copy_(tables.whole_SI)
            gpu.seen_SV.copy_(tables.seen_SV)

        check_replays(graph, refill, [accepted, fault, told, gpu.whole_SI, gpu.seen_SV])
        assert int(told) == faults
        assert accepted.tolist() == accepted_D.tolist()
        assert int(fault) == int(fault_1)
        assert torch.equal(gpu.whole_SI.cpu(), expected.whole_SI)
        assert torch.equal(gpu.seen_SV.cpu(), expected.seen_SV)
