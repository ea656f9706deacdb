"""Sampling state on a GPU: the tokens of the state on a CPU, eagerly and captured, and no allocation once reserved."""

from __future__ import annotations

import pytest
import torch
from captured import capture, check_replays
from sampling_loop import chi_square_p
from test_sampling_speculation import CASES, TARGET, filtered_distribution, seeded

from kernels.decode_state import accept_drafts
from workers.memory.scratch import Scratch
from workers.protocol.plan import Admission, BatchLayout, SamplingParams
from workers.step.sampling import SamplingState

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEPENDENT = [False, True] if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0) else [False]
VOCAB, WIDTH = 6000, 3
TENANTS = [
    SamplingParams(99, temperature=0.0),
    SamplingParams(99, temperature=0.8, seed=1),
    SamplingParams(99, temperature=0.8, seed=2**64 - 1, top_k=4),
    SamplingParams(99, temperature=1.1, seed=3, top_p=0.7, min_p=0.05),
    SamplingParams(99, temperature=0.0, repetition_penalty=1.4),
    SamplingParams(99, temperature=0.9, seed=4, frequency_penalty=0.6, repetition_penalty=0.8, top_p=0.9),
    SamplingParams(99, temperature=1.0, seed=5, logit_bias=((7, 2.5), (3, 6.0), (0, -100.0))),
    SamplingParams(99, temperature=1.0, seed=6, stop_ids=(0, 7, 8, 9), min_tokens=9, presence_penalty=1.5, top_k=9),
]


def state(device: str) -> SamplingState:
    made = SamplingState(len(TENANTS), VOCAB, torch.device(device))
    made.admit([Admission(slot, p, 1, (5, 6, 6, 8)) for slot, p in enumerate(TENANTS)])
    return made


def logits(rows: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


class Step:
    """Target tokens, verification, counts and two drafts of every row: what a decode step asks of sampling."""

    def __init__(self, made: SamplingState, scratch: Scratch | None = None) -> None:
        rows, device = len(TENANTS) + 1, made.device
        self.state, self.scratch, self.layout = made, scratch, BatchLayout(WIDTH, rows)
        self.slot_R = torch.cat([torch.arange(len(TENANTS)).flip(0), torch.tensor([-1])]).to(device)
        self.fed_RW = torch.zeros(rows, WIDTH, dtype=torch.int64, device=device)
        self.position_T = torch.zeros(rows * WIDTH, dtype=torch.int64, device=device)
        self.logits_NV = torch.zeros(rows * WIDTH, VOCAB, device=device)
        self.target_N = torch.zeros(rows * WIDTH, dtype=torch.int64, device=device)
        self.accepted_R = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draft_SK = torch.zeros(len(TENANTS) + 1, WIDTH - 1, dtype=torch.int64, device=device)
        self.draft_KR = torch.zeros(WIDTH - 1, rows, dtype=torch.int64, device=device)

    @property
    def outputs(self) -> list[torch.Tensor]:
        tables = self.state.tables
        return [self.target_N, self.accepted_R, self.draft_KR, tables.whole_SI, tables.seen_SV, self.state.fault_1]

    def fill(self, seed: int) -> None:
        self.logits_NV.copy_(logits(len(self.logits_NV), seed))
        likely_N = self.logits_NV.cpu().argmax(1).view(self.fed_RW.shape)
        self.fed_RW[:, 1:] = likely_N[:, :-1].to(self.fed_RW.device)
        self.position_T.copy_(torch.arange(len(self.position_T)) * 7 + seed)
        self.draft_SK.copy_(torch.arange(self.draft_SK.numel()).view(self.draft_SK.shape) + seed)

    def run(self) -> None:
        made, rows = self.state, len(self.slot_R)
        made.target_tokens(
            self.logits_NV,
            self.layout,
            self.slot_R,
            self.fed_RW,
            self.position_T,
            ahead=1,
            out=self.target_N,
            scratch=self.scratch,
        )
        target_RW = self.target_N.view(rows, WIDTH)
        accept_drafts(target_RW, self.fed_RW[:, 1:], self.accepted_R, VOCAB, made.fault_1)
        made.commit(self.slot_R, target_RW, self.accepted_R, more=1)
        for index in range(WIDTH - 1):
            made.draft_tokens(
                self.logits_NV[index * rows : (index + 1) * rows],
                self.slot_R,
                self.position_T[index * rows : (index + 1) * rows],
                drafted_SX=self.draft_SK[:, :index] if index else None,
                out=self.draft_KR[index],
                scratch=self.scratch,
            )


@pytest.mark.parametrize("dependent", DEPENDENT)
@pytest.mark.parametrize("reserved", [False, True])
def test_a_step_is_that_of_the_cpu(reserved: bool, dependent: bool) -> None:
    ours, theirs = Step(state("cuda")), Step(state("cpu"))
    ours.state.dependent = dependent
    if reserved:
        ours.state.reserve()
    for seed in range(5):
        for step in (ours, theirs):
            step.fill(seed)
            step.run()
        for gpu, cpu in zip(ours.outputs, theirs.outputs, strict=True):
            assert torch.equal(gpu.cpu(), cpu)
    assert int(ours.accepted_R.sum()) > 0


def test_a_captured_step_allocates_nothing_and_follows_its_inputs() -> None:
    made, theirs = state("cuda"), Step(state("cpu"))
    made.reserve()
    measured = Scratch(made.device)
    Step(made, measured).run()
    buffer = torch.full((measured.peak,), 255, dtype=torch.uint8, device="cuda")  # NaN, and ids of -1
    ours = Step(made, Scratch(made.device, buffer))
    graph = capture(ours.run)
    fresh = [table.clone() for table in vars(state("cuda").tables).values()]
    for seed in range(3):

        def refill() -> None:
            ours.fill(seed)  # noqa: B023
            buffer.fill_(255)
            made.fault_1.zero_()
            for table, before in zip(vars(made.tables).values(), fresh, strict=True):
                table.copy_(before)

        check_replays(graph, refill, ours.outputs)
        theirs.state = state("cpu")
        theirs.fill(seed)
        theirs.run()
        for gpu, cpu in zip(ours.outputs, theirs.outputs, strict=True):
            assert torch.equal(gpu.cpu(), cpu)


def test_mixed_layouts() -> None:
    """Decode rows, then final prefill rows."""
    layout = BatchLayout(2, 3, (4, 1, 7, 5), (True, False, True, True))
    slot_R = torch.tensor([4, 5, 2, 3, 1, 7])
    fed_DW = torch.tensor([[5, 6], [9, 8], [1, 2]])
    position_N = torch.arange(9) * 11
    drawn = [
        state(device)
        .target_tokens(
            logits(9, 1).to(device), layout, slot_R.to(device), fed_DW.to(device), position_N.to(device), ahead=1
        )
        .tolist()
        for device in ("cpu", "cuda")
    ]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("case", CASES)
def test_draws_follow_the_filtered_distribution(case: str) -> None:
    """The statistic of test_sampling_speculation, over the kernels' own draws: every token of its model before them."""
    vocab, slots = len(TARGET), 2000
    made = SamplingState(slots, vocab, torch.device("cuda"))
    made.admit([Admission(slot, seeded(CASES[case], slot)) for slot in range(slots)])
    slot_R = torch.arange(slots, device="cuda")
    before_R = torch.arange(slots) % vocab
    logits_RV = TARGET[before_R].cuda()
    observed = torch.zeros(vocab, vocab, dtype=torch.int64)
    for position in range(11):
        token_R = made.draft_tokens(logits_RV, slot_R, torch.full_like(slot_R, position)).cpu()
        observed.index_put_((before_R, token_R), torch.tensor(1), accumulate=True)
    assert int(observed.sum()) >= 20_000
    expected = filtered_distribution(CASES[case]) * observed.sum(1, keepdim=True)
    assert chi_square_p(observed, expected) > 1e-4
